"""Stages of the loop over tiles, for forward and backward kernels.

A mask is evaluated in as few tiles as possible: where it is known to hold, a simpler score program replaces the full
one (`MaskFacts.full`). The loop is therefore a function of the module, called once for the tiles that need neither the
mask nor bounds and once or twice for the others. `start`, `stop` are the keys to visit, `full_start`, `full_stop` those
among them that need nothing, in whole tiles; where tiles are listed (`tile_lists`), full ones are at the list's front,
the others at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.ir.expr import Expr
from fusion.ir.mask_facts import MaskFacts

from . import source
from .expressions import Writer

GLOBALS = frozenset({"tl", "triton", "float"})  # names that every function of a module finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A function that visits tiles. state: the accumulators that it takes and returns. parameters: all, in order."""

    name: str
    state: tuple[str, ...]
    parameters: tuple[str, ...]
    text: str

    def call(self, **given: object) -> str:
        """Call with these arguments, and with the other parameters' own names."""
        arguments = ", ".join(str(given.get(name, name)) for name in self.parameters)
        return f"{', '.join(self.state)}{' = ' if self.state else ''}{self.name}({arguments})"


def visit(name: str, doc: str, body: str, *, state: Sequence[str], first: Sequence[str], writer: Writer) -> Visit:
    """Function with this body. first: parameters after the state; other names that the body reads follow, constants (in
    capitals) last. writer: of the kernel."""
    leading = [*state, *first]
    rest = [found for found in source.free_names(body) if found not in {*leading, *writer.helpers, *GLOBALS}]
    constants = [found for found in rest if found.isupper() and found not in writer.spec.sizes]
    parameters = [*leading, *(found for found in rest if found not in constants), *constants]
    given = [f"{found}: tl.constexpr" if found in constants else found for found in parameters]
    returned = f"return {', '.join(state)}" if state else ""
    text = source.definition(name, given, doc, source.block(body, returned))
    return Visit(name=name, state=tuple(state), parameters=tuple(parameters), text=text)


def key_limits(mask: MaskFacts | None, n_k: str, value: Callable[[Expr], str]) -> list[str]:
    """Statements of `start`, `stop`, `full_start`, `full_stop` for the rows i0..i1. n_k: the number of keys. value: the
    text of an expression in i0 and i1."""
    lines = ["start = 0", f"stop = {n_k}"]
    if mask is not None and mask.key_lo is not None:
        lines[0] = f"start = tl.minimum(tl.maximum({value(mask.key_lo)}, 0), {n_k}) // KEYS * KEYS"
    if mask is not None and mask.key_hi is not None:
        lines[1] = f"stop = tl.maximum(tl.minimum({value(mask.key_hi)}, {n_k}), 0)"
    if mask is None or mask.full is None:
        return [*lines, "full_start = start", "full_stop = tl.maximum(start, stop // KEYS * KEYS)"]
    low = "start" if mask.full_lo is None else f"tl.maximum({value(mask.full_lo)}, start)"
    high = "stop" if mask.full_hi is None else f"tl.minimum({value(mask.full_hi)}, stop)"
    return [
        *lines,
        f"full_start = tl.minimum(({low} + KEYS - 1) // KEYS * KEYS, tl.maximum(stop, start))",
        f"full_stop = tl.maximum({high} // KEYS * KEYS, full_start)",
    ]


def listed(across: str, place: str) -> list[str]:
    """Statements that locate the list of a block's tiles, of the `across` possible ones, and the number of each kind.
    place: the number of its list."""
    return [
        f"tiles_across = {across}",
        f"tile_place = {place}",
        "list_at = tile_list_ptr + tl.cast(tile_place, tl.int64) * tiles_across",
        "full_count = tl.load(tile_counts_ptr + 2 * tile_place)",
        "partial_count = tl.load(tile_counts_ptr + 2 * tile_place + 1)",
    ]
