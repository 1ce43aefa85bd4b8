"""Auxiliary outputs: kernels that follow the forward, and recompute the weights of each tile from its statistics.

    AuxByRows    outputs per row, or per row and key, and reductions over the keys
    AuxByKeys    reductions over the queries

For weights as outputs this reads little beside the written bytes, and each element has one writer. All tiles are
visited: where a weight is zero, a function of it need not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusion.ir.expr import LOG_WEIGHT, ROW_MAX, ROW_SUM, WEIGHT, substitute
from fusion.ir.spec import AttentionSpec, AuxOutput, Reduction
from fusion.lowering.rows import log_weight, weight
from fusion.planning.choice import Tile
from fusion.planning.gpu_model import owner_of_keys

from . import source
from .backward import Queries
from .dtypes import DTYPES
from .expressions import Level
from .kernel import KernelText
from .matrices import sum_of
from .stages import Visit
from .tiles import Tiles

MOST_WRITTEN = 64
_IDENTITY = {Reduction.SUM: "0.0", Reduction.MAX: 'float("-inf")', Reduction.MIN: 'float("inf")'}
_REDUCED = {Reduction.SUM: "tl.sum", Reduction.MAX: "tl.max", Reduction.MIN: "tl.min"}
_COMBINED = {Reduction.SUM: "{} + {}", Reduction.MAX: "tl.maximum({}, {})", Reduction.MIN: "tl.minimum({}, {})"}
_EXISTS = {"i": "rows_ok", "j": "j_ok"}


class _AuxOutputs(Tiles):
    """Common part of both kernels: values of a tile, their reductions and stores."""

    def __init__(self, spec: AttentionSpec, d: int, d_v: int):
        super().__init__(spec, d, d_v, {ROW_MAX: "row_max", ROW_SUM: "row_sum"})
        self.outputs = {k: f for k, f in enumerate(spec.aux_outputs) if (f.over == "i") == (self.outer == "j")}
        made = {WEIGHT: weight(spec), LOG_WEIGHT: log_weight(spec.score)}
        self.value_of = {k: substitute(f.value, made) for k, f in self.outputs.items()}
        self.writer.count(*self.value_of.values())

    def statistics(self) -> list[str]:
        """Statements that read row_max and row_sum of the rows i."""
        return [*self.maximum(), self.plane("row_sum", 1)] if self.softmax else []

    def start(self) -> list[str]:
        """Statements that initialise the reductions. A maximum of Triton ignores NaN; eager's does not."""
        lines = []
        for k, f in self.outputs.items():
            if f.over:
                lines.append(f"total_{k} = tl.full([{self.length}], {_IDENTITY[f.reduction]}, tl.float32)")
            if f.over and f.reduction is not Reduction.SUM:
                lines.append(f"unordered_{k} = tl.full([{self.length}], 0, tl.int32)")
        return lines

    def tile(self, score: str) -> str:
        """Statements from a tile's score to the stores and reductions."""
        parts = [f"s = {score}"]
        for k, f in self.outputs.items():
            if f.over:
                parts += [self.statement(f"value_{k}", self.value_of[k]), self._reduced(k, f)]
            elif "j" in f.dims:
                parts += [self.statement(f"value_{k}", self.value_of[k]), self.store(k, f"value_{k}")]
        return source.block(*parts)

    def _reduced(self, k: int, aux: AuxOutput) -> str:
        term = f"tl.where({self.visited}, value_{k}, {_IDENTITY[aux.reduction]})"
        total = _COMBINED[aux.reduction].format(f"total_{k}", f"{_REDUCED[aux.reduction]}({term}, 1)")
        lines = [f"total_{k} = {total}"]
        if aux.reduction is not Reduction.SUM:
            unordered = f"tl.where({self.visited}, value_{k} != value_{k}, False).to(tl.int32)"
            lines.append(f"unordered_{k} = tl.maximum(unordered_{k}, tl.max({unordered}, 1))")
        return source.block(*lines)

    def finish(self) -> list[str]:
        lines = []
        for k, f in self.outputs.items():
            if f.over:
                plain = f.reduction is Reduction.SUM
                total = f"total_{k}" if plain else f'tl.where(unordered_{k} != 0, float("nan"), total_{k})'
                lines.append(self.store(k, f"({total})[:, None]"))
        return lines

    def store(self, k: int, value: str) -> str:
        """The statement that writes elements of an output, those that exist."""
        dims = self.outputs[k].dims
        places = (f"tl.cast({name}, tl.int64) * aux{k}_stride_{n}" for n, name in enumerate(dims))
        limits = " & ".join(_EXISTS[name] for name in dims if name in _EXISTS)
        dtype = DTYPES[self.outputs[k].dtype]
        return f"tl.store({sum_of(f'aux{k}_ptr', *places)}, {value}.to({dtype}), mask={limits})"


class AuxByRows(_AuxOutputs):
    """Auxiliary outputs of one block of ROWS query rows of one head, and reductions over its keys."""

    name = "attention_further_rows"

    def body(self) -> tuple[list[Visit], str]:
        w = self.writer
        tile = source.block(self.keys(self.inside, "key_ok"), self.tile(self.product("q", "k", 0)))
        loop = source.with_used(self.tile_of_keys(), tile)
        later = source.block(
            self.read(0, self.parts(w, 0), ""),
            *self.start(),
            f"for first in tl.range(0, {self.n_k}, KEYS):",
            source.indented(loop),
            *self.finish(),
        )
        without_keys = [k for k, f in self.outputs.items() if not (f.over or "j" in f.dims)]
        of_rows = [self.store(k, source.spread(w.value(self.value_of[k]), "[ROWS, 1]")) for k in without_keys]
        statistics = self.statistics()
        kept = [*self.places(), *w.lines[Level.BLOCK], *statistics, *w.lines[Level.ROW]]
        return [], source.block(*self.query_block(), source.with_used(kept, source.block(*of_rows, later)))


class AuxByKeys(_AuxOutputs):
    """Auxiliary outputs of one block of KEYS keys of one head: reductions over the queries."""

    name = "attention_further_keys"
    outer, inner = "j", "i"

    def body(self) -> tuple[list[Visit], str]:
        w = self.writer
        extents = [w.value(extent) for extent in self.spec.batch]
        own = w.apart(w.known)
        own.lines = w.lines | {Level.TILE: []}
        keys = self.keys(own, "j_ok")
        tile = source.block(self.read(0, self.parts(self.inside, 0), ""), self.tile(self.product("k", "q", 0)))
        rows = [
            "rows = first_row + tl.arange(0, ROWS)",
            f"rows_ok = (rows < {self.n_q})[None, :]",
            f"rows = tl.minimum(rows, {self.n_q} - 1)",
            "row = rows[:, None]",
            "i = rows[None, :]",
            *self.inside.lines[Level.TILE],
            *self.statistics(),
        ]
        loop = source.with_used(rows, tile)
        later = source.block(
            keys,
            *self.start(),
            f"for first_row in tl.range(0, {self.n_q}, ROWS):",
            source.indented(loop),
            *self.finish(),
        )
        position = self.key_block(extents, [f"b{axis}" for axis in range(len(extents))])
        return [], source.block(*position, self.of_block(later))


def aux_tiles(tiles: Mapping[str, Tile]) -> dict[str, Tile]:
    """Tile of each kernel by its name: those of the backward, which hold more of each, so that they fit; but no wider
    than most keys whose weights a program writes without spilling."""
    rows = tiles[Queries.name]
    by_rows = replace(rows, keys=min(rows.keys, MOST_WRITTEN))
    return {AuxByRows.name: by_rows, AuxByKeys.name: tiles[owner_of_keys(tiles)]}


def aux_kernels(spec: AttentionSpec, d: int, d_v: int) -> list[KernelText]:
    """Kernels that write the auxiliary outputs of a spec."""
    return [kernel.text() for kernel in (AuxByRows(spec, d, d_v), AuxByKeys(spec, d, d_v)) if kernel.outputs]
