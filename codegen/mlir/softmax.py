"""The part between the two products, for one group of queries (one vector of lanes) and one block of keys.

Pass one applies the score program to the rows of S^T and takes each lane's maximum. Pass two replaces x by exp2(x * c -
m * c), with c = scale * log2(e), adds up the sum, and hands the weights to the second product.

The maximum that is subtracted is allowed to be stale: as long as no lane's new maximum is more than 2**8 above it,
weights stay below 2**8 and nothing is rescaled. That is exact in floating point (only the common exponent differs) and
saves nearly all rescaling.

Special values. A maximum of -inf (no key yet) is replaced by 0, so that exp(-inf) gives weight 0 and a row that ends so
has sum 0. Where the maximum is so large (finfo.min of fully masked rows) that the rounding of m * c would count, c is
replaced for that lane by a power of two below it, whose products are exact: differences there are either exactly 0 or
far beyond what exp can tell apart from 0. NaN goes through the exponential, +inf becomes NaN by inf - inf, as in eager
mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fusion.codegen.mlir.builder import Builder, Value, vector_of
from fusion.codegen.mlir.scope import Context, Scope
from fusion.codegen.mlir.vectormath import LOG2E
from fusion.ir.expr import SCORE, Expr, J

RESCALE_ABOVE = 8.0  # in powers of two
HUGE = 2.0**30  # of m * c: above it neighbouring floats are 64 or more apart, 2**-64 in weights
UNROLL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Memory of one group of queries: scores [key][L], factors of the weight program [key][L] or None, packed weights,
    output [e][L], and vectors of the running maximum (in units of the programs' scale) and sum."""

    scores: Value
    factors: Value | None
    weights: Value
    output: Value
    maximum: Value
    total: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlock:
    """first: coordinate of the first key; count: keys in range; padded: count rounded up to the products' key step."""

    first: Value
    count: Value
    padded: Value


class Exponent:
    """How maxima enter the exponential. scale: of the programs."""

    def __init__(self, context: Context, scale: float):
        self.context, self.b, self.scale = context, context.b, scale
        self.vector = vector_of("f32", context.lanes)

    def coefficients(self, m: Value) -> tuple[Value, Value]:
        """(c, shift) such that the weight of x is exp2(x * c + shift), for the maximum m."""
        b = self.b
        factor = self.scale * LOG2E
        huge = b.compare("ogt", b.unary("math.absf", m), HUGE / factor, "huge")
        c = b.select(huge, min(1.0, 2.0 ** math.floor(math.log2(factor))), b.constant(factor, self.vector), "c")
        shift = b.select(b.compare("oeq", m, float("-inf")), 0.0, b.mul(m, c), "shift")
        return c, b.unary("arith.negf", shift, "shift")

    def excess(self, m: Value) -> Value:
        """By what factor all weights of a lane are too large because m * c was rounded. It cancels in a quotient of
        sums."""
        b = self.b
        c, shift = self.coefficients(m)
        rest = b.select(b.compare("oeq", m, float("-inf")), 0.0, b.fma(m, c, shift))
        return self.context.math.exp2(rest, 5)


class GroupSoftmax:
    """Writes the passes. `staged` binds dense loads: (load expression, memory of [key][L] values in the kernel's
    type)."""

    def __init__(self, context: Context, group: Group, block: KeyBlock, exponent: Exponent):
        self.context, self.group, self.block, self.exponent = context, group, block, exponent
        self.scale = exponent.scale
        self.b: Builder = context.b
        self.lanes = context.lanes
        self.vector = vector_of("f32", self.lanes)

    def _row(self, base: Value, key: Value | int) -> Value:
        return self.b.at(base, self.b.mul(key, self.lanes), "f32")

    def apply(
        self, scope: Scope, program: Expr, weight: Expr | None, staged: list[tuple[Expr, Callable[[Value], Value]]]
    ) -> Value:
        """Apply the program to all rows, in place; returns each lane's maximum over the block. `weight`: stored as
        factors."""
        b = self.b
        start = b.constant(float("-inf"), self.vector)
        main = b.mul(b.div(self.block.count, UNROLL), UNROLL)
        with b.carry(0, main, UNROLL, [start], hint="j") as (loop, j, (highest,)):
            rows = [self._apply_row(scope, b.add(j, u), program, weight, staged) for u in range(UNROLL)]
            while len(rows) > 1:
                rows = [self.largest(x, y) for x, y in zip(rows[::2], rows[1::2], strict=True)]
            loop.yields(self.largest(rows[0], highest))
        with b.carry(main, self.block.count, 1, loop.results, hint="j") as (rest, j, (highest,)):
            rest.yields(self.largest(self._apply_row(scope, j, program, weight, staged), highest))
        return rest.results[0]

    def _apply_row(
        self,
        scope: Scope,
        key: Value,
        program: Expr,
        weight: Expr | None,
        staged: list[tuple[Expr, Callable[[Value], Value]]],
    ) -> Value:
        b = self.b
        address = self._row(self.group.scores, key)
        score = b.load(address, self.vector, "s", align=4 * self.lanes)
        if program is SCORE and weight is None:
            return score
        row = Scope(context=self.context, parent=scope, known={SCORE: score, J: b.add(self.block.first, key, "j")})
        memo: dict[Expr, Value] = {}

        def leaf(expr: Expr) -> Value | None:
            for load, read in staged:
                if load is expr:
                    if expr not in memo:
                        memo[expr] = read(key)
                    return memo[expr]
            return None

        row.leaf = leaf
        x = row.vector(program)
        if program is not SCORE:
            b.store(x, address, align=4 * self.lanes)
        if weight is not None:
            assert self.group.factors is not None
            b.store(row.vector(weight), self._row(self.group.factors, key), align=4 * self.lanes)
        return x

    def largest(self, x: Value, y: Value) -> Value:
        """The larger; y where x is NaN (one `vmaxps`)."""
        return self.b.select(self.b.compare("ogt", x, y), x, y, "max")

    def fill_beyond(self, value: float) -> None:
        """Rows after the last key, which the products read."""
        b = self.b
        with b.loop(self.block.count, self.block.padded, hint="j") as j:
            b.store(b.constant(value, self.vector), self._row(self.group.scores, j), align=4 * self.lanes)
            if self.group.factors is not None:
                b.store(b.constant(0.0, self.vector), self._row(self.group.factors, j), align=4 * self.lanes)

    def rescale(self, highest: Value, columns: int, exact: bool) -> None:
        """Take over the block's maximum where it is too far above the one in use (exact: above it at all): rescale sum
        and output
        [columns][L]."""
        b, group = self.b, self.group
        old = b.load(group.maximum, self.vector, "m_old")
        limit = 0.0 if exact else RESCALE_ABOVE / (self.scale * LOG2E)
        far = b.compare("ogt", b.sub(highest, old), limit, "far")
        any_far = b.op(f"vector.reduction <or>, {far} : {far.type} into i1", "i1", "any_far")
        with b.when(any_far):
            new = self.largest(highest, old)
            b.store(new, group.maximum)
            factor = self.context.math.exp2(b.mul(b.sub(old, new), self.scale * LOG2E), 5)
            factor = b.select(b.compare("oeq", old, float("-inf")), 0.0, factor, "factor")
            b.store(b.mul(b.load(group.total, self.vector, "l"), factor), group.total)
            with b.loop(0, columns, hint="e") as e:
                cell = self._row(group.output, e)
                b.store(b.mul(b.load(cell, self.vector, "o"), factor), cell)

    def exponentials(self, store: Callable[[Value, Value, Value], None]) -> None:
        """Weights of all rows (padded ones too) and their sum; `store(key, first, second)` takes two rows at a time."""
        b, group = self.b, self.group
        c, shift = self.exponent.coefficients(b.load(group.maximum, self.vector, "m"))
        zero = b.constant(0.0, self.vector)
        with b.carry(0, self.block.padded, 2, [zero, zero], hint="j") as (loop, j, sums):
            pair = [self._weight(b.add(j, u), c, shift) for u in (0, 1)]
            loop.yields(*(b.add(s, p, "l") for s, p in zip(sums, pair, strict=True)))
            store(j, *(self._times_factor(b.add(j, u), p) for u, p in enumerate(pair)))
        total = b.add(loop.results[0], loop.results[1])
        b.store(b.add(b.load(group.total, self.vector, "l"), total), group.total)

    def _weight(self, key: Value, c: Value, shift: Value) -> Value:
        x = self.b.load(self._row(self.group.scores, key), self.vector, "x", align=4 * self.lanes)
        return self.context.math.exp2(self.b.fma(x, c, shift))

    def _times_factor(self, key: Value, p: Value) -> Value:
        if self.group.factors is None:
            return p
        return self.b.mul(p, self.b.load(self._row(self.group.factors, key), self.vector, "w"))

    def plain_weights(self, store: Callable[[Value, Value, Value], None]) -> None:
        """Without a normaliser: the program's values are the weights."""
        b = self.b
        with b.loop(0, self.block.padded, 2, hint="j") as j:
            rows = [b.add(j, u) for u in (0, 1)]
            store(j, *(self._times_factor(r, b.load(self._row(self.group.scores, r), self.vector, "x")) for r in rows))
