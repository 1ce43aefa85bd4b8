"""The machine of a name or a device."""

from __future__ import annotations

from fusion.errors import UnknownMachineError
from fusion.machine import gpus
from fusion.machine.processors import Machine


def machine(name: str | Machine | None = None) -> Machine:
    """The machine of that name ("cpu", or None, is the one this runs on; "cuda" its GPU); a `Machine` is returned as
    it is.

    Raises UnknownMachineError, which lists the valid names.
    """
    if isinstance(name, Machine):
        return name
    key = "cpu" if name is None else str(name).lower()
    if key in ("cpu", "this", "detect"):
        return Machine.detect()
    if key in gpus.NAMED:
        return gpus.NAMED[key]
    kind, _, index = key.partition(":")
    if kind == "cuda":
        return gpus.of_device(int(index) if index.isdigit() else None)
    raise UnknownMachineError(
        f"machine {name!r} is not known; known: cpu (this computer), {', '.join(gpus.NAMED)}, or a "
        "fusion.machine.Machine"
    )
