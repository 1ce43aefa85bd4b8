"""Facts about processors, stated once: `processors` defines their form, `cpu` and `gpus` have the facts."""

from __future__ import annotations

from typing import Any

from fusion.errors import UnknownMachineError
from fusion.machine.cpu import GIB, KIB, MIB, MemoryLevel
from fusion.machine.gpus import FIGURES, INTERPRETER, NAMED, of_architecture, of_device, of_target
from fusion.machine.processors import Machine, dtype_bytes, dtype_name, with_cores

__all__ = [
    "GIB", "INTERPRETER", "KIB", "MIB", "NAMED", "Machine", "MemoryLevel", "dtype_bytes", "dtype_name", "in_use",
    "machine", "of_device", "of_target", "with_cores",
]  # fmt: skip


def machine(name: str | Machine | None = None) -> Machine:
    """Machine of that name ("cpu", or None, is the one this runs on; "cuda" its GPU; "sm_89" or "gfx942" a GPU of this
    target of Triton's, with figures of its own behind a colon: "sm_89:cores=128,clock=2.52e9"); a `Machine` is
    returned unchanged.

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
    if kind.startswith(("sm_", "gfx")):
        return of_architecture(kind, **_figures(name, index)) if index else of_target(kind)
    raise UnknownMachineError(
        f"machine {name!r} is not known; known: cpu (this computer), {', '.join(NAMED)}, a target of Triton (sm_89, "
        "gfx942; sm_89:cores=128,clock=2.52e9 with figures), or a fusion.machine.Machine"
    )


def in_use(given: Machine) -> Machine:
    """This computer with as many of its cores as torch has threads; any other machine as it is."""
    import torch

    here = Machine.detect()
    is_this = (given.kind, given.name, given.cores) == ("cpu", here.name, here.cores)
    return with_cores(given, torch.get_num_threads()) if is_this else given


def _figures(name: object, text: str) -> dict[str, Any]:
    figures = {}
    for entry in text.split(","):
        key, _, value = entry.partition("=")
        try:
            figures[key] = FIGURES[key](float(value))
        except (KeyError, ValueError):
            known = ", ".join(f"{known}=NUMBER" for known in FIGURES)
            raise UnknownMachineError(f"machine {name!r} has the figure {entry!r}; figures are {known}") from None
    return figures
