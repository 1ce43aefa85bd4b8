"""Facts about processors, stated once: `processors` defines their form, `cpu` and `gpus` have the facts."""

from __future__ import annotations

from fusion.errors import UnknownMachineError
from fusion.machine.gpus import INTERPRETER, NAMED, of_device, of_target
from fusion.machine.memory import GIB, KIB, MIB, MemoryLevel
from fusion.machine.processors import Machine, dtype_bytes, dtype_name, with_cores

__all__ = [
    "GIB", "INTERPRETER", "KIB", "MIB", "NAMED", "Machine", "MemoryLevel", "dtype_bytes", "dtype_name", "machine",
    "of_device", "of_target", "with_cores",
]  # fmt: skip


def machine(name: str | Machine | None = None) -> Machine:
    """Machine of that name ("cpu", or None, is the one this runs on; "cuda" its GPU); a `Machine` is returned
    unchanged.

    Raises UnknownMachineError, which lists the valid names.
    """
    if isinstance(name, Machine):
        return name
    key = "cpu" if name is None else str(name).lower()
    if key in ("cpu", "this", "detect"):
        return Machine.detect()
    if key in NAMED:
        return NAMED[key]
    kind, _, index = key.partition(":")
    if kind == "cuda":
        return of_device(int(index) if index.isdigit() else None)
    raise UnknownMachineError(
        f"machine {name!r} is not known; known: cpu (this computer), {', '.join(NAMED)}, or a fusion.machine.Machine"
    )
