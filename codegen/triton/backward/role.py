"""Common parts of the backward kernels: coordinates, statistics, and the gradient of the scores of a tile."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import ClassVar

from fusion.ir.derivative import SINK_UPSTREAM, UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import I0, I1, WEIGHT, ZERO, Expr, Kind, const, node, substitute
from fusion.ir.mask_facts import LARGEST
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.gradients import Axes
from fusion.lowering.numbers import LOG2E
from fusion.lowering.score_programs import is_tame

from .. import source
from ..descriptors import READ, boxes
from ..dtypes import DTYPES
from ..expressions import Level, number
from ..gradients import Captured, Gradients, gradients_of
from ..matrices import Matrix, accumulation, sum_of
from ..stages import Visit
from ..tiles import Tiles, load_where

SHARE = node("upstream", (), Kind.FLOAT, "share")
"""A score's weight before the weight program, in the place of dx."""

KNOWN = {UPSTREAM: "dx", WEIGHT_UPSTREAM: "dw", SINK_UPSTREAM: "dsink", SHARE: "y"}


class Role(Tiles):
    """Common part of the two kernels: coordinates, statistics, and the gradient of the scores of a tile.

    needs: marks the operands whose gradients are wanted, by this kernel or others.
    described: tiles of the loop are read by tensor descriptors where they can be.
    The loop over tiles is a function (see `stages`), called with MASKED for those that need the mask or are cut off.
    """

    written: ClassVar[frozenset[int]] = frozenset()  # those of Q, K and V (0, 1, 2) whose gradients it writes
    captures = True  # whether it may also have those of captured tensors

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...], described: bool = False):
        super().__init__(spec, d, d_v, KNOWN)
        mine = ((n in self.written) if n < 3 else self.captures for n in range(len(needs)))
        self.needs = needs = tuple(map(operator.and_, needs, mine))
        read = READ.get(self.name, ()) if described else ()
        self.boxes = {name: box for name, box in boxes(spec, d, d_v).items() if name in read}
        self.gradients: Gradients = gradients_of(spec, needs)
        w, grads = self.writer, self.gradients
        # Key ranges of a block of rows are computed in places of their own.
        self.ranges = w.apart(self.known | {I0: "i0", I1: "i1"}, outer="i", inner="j")
        captured = [part for item in grads.captured for part in {item.gradient, item.full}]
        w.known[WEIGHT] = "y"
        w.count(spec.score, spec.weight, grads.aux_outputs.weight, grads.score, grads.program, grads.full, *captured)

    def stages(self, visit: Visit, before: bool) -> list[str]:
        """Calls of the loop's function: for tiles that need no mask, and for the others; before: also before the
        former."""
        if self.listed:
            return [
                visit.call(start=0, stop="full_count", MASKED=False),
                visit.call(start="tiles_across - partial_count", stop="tiles_across", MASKED=True),
            ]
        first = [visit.call(stop="full_start", MASKED=True)] if before else []
        return [
            *first,
            visit.call(start="full_start", stop="full_stop", MASKED=False),
            visit.call(start="full_stop", MASKED=True),
        ]

    def gradient(self, number: int) -> list[str]:
        """Names of the gradient of Q, K or V, by panels; none where it is not wanted."""
        return [f"d{'qkv'[number]}{panel.suffix}" for panel in self.panels_of(number)] if self.needs[number] else []

    def zeros(self, number: int) -> list[str]:
        """Statements that initialise the gradient of Q, K or V."""
        each = zip(self.gradient(number), self.panels_of(number), strict=False)
        return [f"{name} = tl.full([{self.length}, {panel.width}], 0.0, tl.float32)" for name, panel in each]

    def accumulated(self, number: int, left: str, right: str) -> list[str]:
        """Statements that add left @ right to the gradient of Q, K or V."""
        return [
            accumulation(name, left, f"{right}{panel.suffix}", self.spec.dtype)
            for name, panel in zip(self.gradient(number), self.panels_of(number), strict=False)
        ]

    def store(self, number: int, parts: Sequence[Matrix]) -> list[str]:
        """Statements that write the gradient of Q, K or V."""
        dtype, lines = DTYPES[self.spec.operands[number].dtype], []
        for name, part, panel in zip(self.gradient(number), parts, self.panels_of(number), strict=False):
            limits = f"{self.owned} & ({panel.inside})" if panel.inside else self.owned
            lines += [f"{name}_at = {part.pointers}", f"tl.store({name}_at, {name}.to({dtype}), mask={limits})"]
        return lines

    def rows_of_output(self, name: str, rows: str, tensor: str = "dout", dtype: str = "") -> list[str]:
        """Statements that read the output or its gradient, [rows, d_v]."""
        axes = [f"tl.cast(b{axis}, tl.int64) * {tensor}_stride_b{axis}" for axis in range(len(self.spec.batch))]
        lines = []
        for panel in self.values:
            across = f"tl.cast({panel.column}, tl.int64) * {tensor}_stride_e"
            at = sum_of(f"{tensor}_ptr", *axes, f"tl.cast({rows}, tl.int64) * {tensor}_stride_i", across)
            lines.append(load_where(f"{name}{panel.suffix}", at, (panel.inside,), f".to({dtype or self.dtype})"))
        return lines

    def statistics(self) -> list[str]:
        """Statements that read row_max, log_share (of 1 / row_sum) or share (the scale of the row), and delta of the
        rows i."""
        if not self.softmax:
            return []
        scaled = self.spec.row_scale is not None
        lines = [
            *self.maximum(),
            self.plane("share", 1) if scaled else f"log_share = tl.load({self.in_plane('delta', 1)})",
            *(["delta = tl.load(delta_ptr + row_place)"] if self.differentiates else []),
        ]
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines.append('row_max = tl.where(row_max == float("-inf"), 0.0, row_max)')
        return lines

    def weight_of(self, score: str) -> str:
        """Text of a score's weight. A row's sum is in the exponent: to divide by it takes as many instructions for a
        row as the rest does for ten scores. It stays apart from the maximum, beside which it could be lost."""
        if self.spec.row_scale is not None:
            return f"tl.exp2(({score} - row_max) * {LOG2E}) * share"
        return f"tl.exp2(tl.fma({score} - row_max, {LOG2E}, log_share))"

    def tile(self, score: str, upstream: str, with_p: str = "") -> str:
        """Statements from s to ds and to the sums, or to p where only that is wanted. score, upstream: products of the
        tile. with_p: statements that use the weights p, as soon as they are there."""
        times = "" if self.spec.weight is const(1.0) else " * w"
        whole = [] if self.gradients.program is None else [self._variant(True)]
        programs, gradients = zip(self._variant(False), *whole, strict=True)
        weight = self.weight_of("x") if self.softmax else "x"
        of_weight, aux = self._aux_outputs()
        # y is 0 there, and the row may be NaN. Rows beyond the last repeat it, and are as NaN as that.
        only_existing = f"if MASKED:\n    dx = tl.where({self.visited}, dx, 0.0)"
        weights = source.block(
            f"s = {score}",
            source.by_mask(*programs),
            f"y = {weight}",
            f"if MASKED:\n    y = tl.where({self.visited}, y, 0.0)",
            f"p = y{times}",
            with_p,
        )
        if not self.differentiates:
            return weights
        return source.block(
            weights,
            f"dp = {upstream}",
            of_weight,
            f"dx = y * (dp{times}{aux} - delta)" if self.softmax else f"dx = dp{times}{aux}",
            "" if self.softmax and not aux and self.inner == "i" else only_existing,
            "dw = y * dp",
            source.by_mask(*gradients),
        )

    def _aux_outputs(self) -> tuple[str, str]:
        """Statements of the terms that auxiliary outputs add to the gradient of a weight, and the text that adds
        them."""
        w, value = self.writer, self.gradients.aux_outputs.weight
        if value is ZERO:
            return "", ""
        outside, statement = set(w.known), self.statement("daux", value)
        self._forget_tile(outside)
        return statement, " + daux"

    def _variant(self, full: bool) -> tuple[str, str]:
        """(from s to x and w, from dx and dw to ds and the sums), with the mask or, full, without."""
        w, found = self.writer, self.gradients
        outside = set(w.known)
        score, gradient = (found.program, found.full) if full else (self.spec.score, found.score)
        assert score is not None and gradient is not None
        lines = [self.statement("x", score)]
        if self.spec.weight is not const(1.0):
            lines.append(f"w = {self.bound(self.spec.weight, lines)}")
        # Sums before ds: then fewer values are held at a time.
        after = self.summed(full)
        if self.written:
            after += [self.statement("ds", gradient), *self.existing("ds", gradient)]
        self._forget_tile(outside)
        return source.block(*lines), source.block(*after)

    def _forget_tile(self, outside: set[Expr]) -> None:
        """Forget the names of values of a tile that were bound in a branch."""
        w = self.writer
        w.known = {e: name for e, name in w.known.items() if e in outside or w.level_of(e) is not Level.TILE}

    def existing(self, name: str, gradient: Expr) -> list[str]:
        """Statements that make a gradient 0 where a key does not exist: the gradient that arrives there is 0, but a
        derivative may be infinite, of a score that is 0 or of nothing loaded."""
        arrives = dict.fromkeys((UPSTREAM, WEIGHT_UPSTREAM), const(1.0))
        if self.inner == "i" or is_tame(substitute(gradient, arrives)):
            return []
        return [f"if MASKED:\n    {name} = tl.where(j_ok, {name}, 0.0)"]

    def summed(self, full: bool) -> list[str]:
        """Statements that add a tile's gradients of captured tensors."""
        raise NotImplementedError

    def sums_to(self, *axes: Axes) -> list[str]:
        """Statements that start sums along the inner coordinate."""
        return [f"sum_{n} = tl.full([{self.length}], 0.0, tl.float32)" for n, _ in self.captured(*axes)]

    def ranges_of(self, lines: Callable[[Callable[[Expr], str]], list[str]]) -> list[str]:
        """Statements about the rows i0..i1, written by a function that takes expressions in them to texts."""
        made = lines(self.ranges.value)
        return [*self.ranges.take(Level.BLOCK), *made]

    @property
    def differentiates(self) -> bool:
        """Whether the gradient of the scores is wanted."""
        return True

    @property
    def skips(self) -> bool:
        return self.spec.mask is not None and self.spec.mask.skips

    def captured(self, *axes: Axes) -> list[tuple[int, Captured]]:
        """The captured gradients that are summed over certain axes, numbered."""
        items = enumerate(self.gradients.captured)
        return [(n, item) for n, item in items if item.axes in axes and item.sink is None]

    def gradients_of_tile(self, full: bool, *axes: Axes) -> list[tuple[int, Captured, Expr]]:
        """The captured gradients that are summed over certain axes and are not zero in a tile, as expressions."""
        items = [(n, item, item.full if full else item.gradient) for n, item in self.captured(*axes)]
        return [(n, item, gradient) for n, item, gradient in items if gradient is not ZERO]

    def add(self, item: Captured, value: str, mask: str) -> list[str]:
        """Statements that add a value to the gradient of a load."""
        name = f"d{self.writer.operand(item.load.operand)}"
        at = self.writer.address(item.load, self.writer.level_of(item.load), name)
        inside = f", mask={mask}" if mask else ""
        return [*self.writer.take(Level.TILE), f'tl.atomic_add({at}, {value}, sem="relaxed"{inside})']


def dead_limit(spec: AttentionSpec) -> str:
    """Largest maximum of a row without a live key."""
    assert spec.mask is not None
    fill = spec.mask.fill
    return number(max(fill / 2, -LARGEST / 2)) if math.isfinite(fill) else 'float("-inf")'


ANY_DEAD = "tl.max(tl.max((alive == 0).to(tl.int32), 1), 0)"
"""1 where one of a column of rows has weights at dead keys, else 0."""


def alive(spec: AttentionSpec) -> str:
    """Statement that finds the rows that have no weights at dead keys: those without a live key have some there, and
    those with a score of +inf have NaN."""
    return f'alive = (row_max > {dead_limit(spec)}) & (row_max < float("inf"))'
