"""The part between the two products, for one group of queries (one vector of lanes) and one block of keys.

Pass one applies the score program to the rows of S^T and takes each lane's maximum. Pass two replaces x by exp2(x * c -
m * c), with c = scale * log2(e), adds up the sum, and hands the weights to the second product.

The maximum that is subtracted is allowed to be stale: as long as no lane's new maximum is more than 2**8 above it,
weights stay below 2**8 and nothing is rescaled. That is exact in floating point (only the common exponent differs) and
saves nearly all rescaling. Where it is known beforehand (`lowering.bounded_scores`), both passes are one:
`apply_and_weigh`.

Special values. A maximum of -inf (no key yet) is replaced by 0, so that exp(-inf) gives weight 0 and a row that ends so
has sum 0. Where the maximum is so large (finfo.min of fully masked rows) that the rounding of m * c would count, c is
replaced for that lane by a power of two below it, whose products are exact: differences there are either exactly 0 or
far beyond what exp can tell apart from 0. NaN goes through the exponential, +inf becomes NaN by inf - inf, as in eager
mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.ir.expr import SCORE, Expr, J
from fusion.lowering.numbers import LOG2E, exponent_units

from .builder import Builder, Value, vector_of
from .scope import Context, Scope, staged_leaf

RESCALE_ABOVE = 8.0  # in powers of two
UNROLL = 4  # keys at a time where the program is applied
PAIR = 2  # and where only exponentials are left
SUMMED = 64
"""Keys whose weights are added up by themselves. Equal weights (of a fill, of scores that a clamp cut) lose the same to
each rounding of a long sum; eager mode's sums over vectors are as short."""

#: Takes the weights of two rows: (number of the first, which is even, weights of it and the next)
Store = Callable[[Value, Value, Value], None]
#: Stores the weights of two rows, as `Store`, but from their exponents; returns the last argument with both added
Weigh = Callable[[Value, Value, Value, Value], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Memory of one group of queries. kept, scored: the weights of all keys so far in the same units, and what they are
    exponentials of, [key][L], where auxiliary outputs are made of them."""

    scores: Value  # [key][L]
    factors: Value | None  # of the weight program, [key][L], or None
    weights: Value  # packed
    output: Value  # [e][L], with the running sum as a row after it
    maximum: Value  # vector of the running maximum, in units of the programs' scale
    total: Value  # the row of the running sum of the blocks before
    block_total: Value  # the row of the block's own
    rows: Value  # how many rows from `output` on are in units of that maximum (`KEY_SPAN`)
    kept: Value | None = None
    scored: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlock:
    """A block of keys."""

    first: Value  # coordinate of the first key
    count: Value  # keys in range
    padded: Value  # count rounded up to the products' key step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProgram:
    """Programs that are applied to the rows of scores."""

    program: Expr
    weight: Expr | None  # the factors of the weights, or None
    scope: Scope  # knows the lanes
    staged: Sequence[tuple[Expr, Callable[[Value], Value]]]  # where staged loads are read: (load, function of the key)


class Exponent:
    """Exponent of a score, less the maximum. scale: of the programs. plain: without a normaliser scores are weights."""

    def __init__(self, context: Context, scale: float, plain: bool):
        self.context, self.b, self.scale, self.plain = context, context.b, scale, plain
        self.vector = vector_of("f32", context.lanes)

    def larger(self, m: Value, x: Value, hint: str = "m") -> Value:
        """The larger of each lane, of x only what is a number: a NaN goes through the exponential (one `vmaxps`)."""
        return self.b.select(self.b.compare("ogt", x, m), x, m, hint)

    def coefficients(self, m: Value) -> tuple[Value, Value]:
        """(c, shift) such that the weight of x is exp2(x * c + shift), for the maximum m."""
        b = self.b
        unit, limit, exact = exponent_units(self.scale)
        huge = b.compare("ogt", b.unary("math.absf", m), limit, "huge")
        c = b.select(huge, exact, b.constant(unit, self.vector), "c")
        shift = b.select(b.compare("oeq", m, float("-inf")), 0.0, b.mul(m, c), "shift")
        return c, b.unary("arith.negf", shift, "shift")

    def excess(self, m: Value) -> Value:
        """By what factor all weights of a lane are too large because m * c was rounded. It cancels in a quotient of
        sums."""
        b = self.b
        c, shift = self.coefficients(m)
        rest = b.select(b.compare("oeq", m, float("-inf")), 0.0, b.fma(m, c, shift))
        return self.context.math.exp2(rest, 5)

    def change(self, m: Value, m_new: Value) -> Value:
        """Factor that turns weights for the maximum m into those for m_new, in the units of m_new: m * c was
        rounded, as it is here. 0 where m is -inf, NaN where both are +inf."""
        b = self.b
        c, shift = self.coefficients(m_new)
        return self.context.math.exp2(b.add(b.mul(m, c), shift, "down"), 5)

    def factor(self, m: Value, m_new: Value) -> Value:
        """Factor of sums in units of the maximum m when it becomes m_new. Before the first live key there
        is nothing to scale."""
        b = self.b
        same = b.or_(b.compare("oeq", m, m_new), b.compare("oeq", m, float("-inf")))
        return b.select(same, 1.0, self.change(m, m_new), "factor")


class GroupSoftmax:
    """Writes the passes, as loops over rows or row by row. true_maximum: the maximum in use is that of the scores, NaN
    where one is."""

    def __init__(self, context: Context, group: Group, block: KeyBlock, exponent: Exponent, true_maximum: bool):
        self.context, self.group, self.block, self.exponent = context, group, block, exponent
        self.true_maximum = true_maximum
        self.scale, self.plain = exponent.scale, exponent.plain
        self.b: Builder = context.b
        self.lanes = context.lanes
        self.vector = vector_of("f32", self.lanes)

    def _row(self, base: Value, key: Value | int) -> Value:
        return self.b.row(base, key, self.lanes)

    def apply(self, rows: RowProgram, low: Value | int, high: Value, highest: Value) -> Value:
        """Apply the program to rows [low, high), in place; returns each lane's maximum, `highest` included."""
        b = self.b
        main = b.add(low, b.floor_to(b.sub(high, low), UNROLL))
        for first, last, count in ((low, main, UNROLL), (main, high, 1)):
            with b.carry(first, last, count, [highest], hint="j") as (loop, j, (so_far,)):
                loop.yields(self.raise_to(so_far, self.apply_rows(rows, j, count)))
            highest = loop.results[0]
        return highest

    def raise_to(self, highest: Value, rows: list[Value]) -> Value:
        while len(rows) > 1:
            rows = [self.largest(x, y) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        return self.largest(rows[0], highest)

    def apply_rows(self, rows: RowProgram, first: Value, count: int) -> list[Value]:
        """`apply_row` for `count` keys from `first` on."""
        keys = [self.b.add(first, u) for u in range(count)]
        return self.b.side_by_side([functools.partial(self.apply_row, rows, key) for key in keys])

    def apply_row(self, rows: RowProgram, key: Value) -> Value:
        """The program's values for one key, which also take the place of the scores."""
        b, program, weight = self.b, rows.program, rows.weight
        row = self._row_scope(rows, key)
        if program is SCORE and weight is None:
            return row.known[SCORE]
        x = row.vector(program)
        if program is not SCORE:
            b.store(x, self._row(self.group.scores, key), align=4 * self.lanes)
        if weight is not None:
            assert self.group.factors is not None
            b.store(row.vector(weight), self._row(self.group.factors, key), align=4 * self.lanes)
        return x

    def _row_scope(self, rows: RowProgram, key: Value) -> Scope:
        """The scope that knows the key's coordinate, its scores and what is staged for it."""
        b = self.b
        score = b.load(self._row(self.group.scores, key), self.vector, "s", align=4 * self.lanes)
        known = {SCORE: score, J: b.add(self.block.first, key, "j")}
        return rows.scope.inner(known, leaf=staged_leaf(rows.staged, key))

    def largest(self, x: Value, y: Value) -> Value:
        """The larger; y where x is NaN, unless the true maximum is wanted."""
        if self.true_maximum:
            return self.b.binary("arith.maximumf", x, y, "max")
        return self.exponent.larger(y, x, "max")

    def fill_beyond(self, value: float) -> None:
        """Rows after the last key, which the products read."""
        b = self.b
        with b.loop(self.block.count, self.block.padded, hint="j") as j:
            b.store(b.constant(value, self.vector), self._row(self.group.scores, j), align=4 * self.lanes)
            if self.group.factors is not None:
                b.store(b.constant(0.0, self.vector), self._row(self.group.factors, j), align=4 * self.lanes)

    def rescale(self, highest: Value) -> None:
        """Take over a lane's maximum in the block where it is too far above the one in use, or has to be exact: rescale
        output and sum. Other lanes keep theirs, so that no row's numbers depend on those beside it."""
        b, group = self.b, self.group
        old = b.load(group.maximum, self.vector, "m_old")
        limit = 0.0 if self.true_maximum else RESCALE_ABOVE / (self.scale * LOG2E)
        far = b.compare("ugt" if self.true_maximum else "ogt", b.sub(highest, old), limit, "far")
        any_far = b.reduce("or", far, "any_far")
        with b.when(any_far):
            new = b.select(far, self.largest(highest, old), old, "m_new")
            b.store(new, group.maximum)
            change = b.select(b.compare("oeq", old, float("-inf")), 0.0, self.exponent.change(old, new))
            factor = b.select(far, change, 1.0, "factor")
            for base, count in ((group.output, group.rows), (group.kept, self.block.first)):
                if base is not None:
                    with b.loop(0, count, hint="e") as e:
                        cell = self._row(base, e)
                        b.store(b.mul(b.load(cell, self.vector, "o"), factor), cell)

    def coefficients(self) -> tuple[Value, Value] | None:
        """Coefficients of the exponentials, for the maxima in use; None where scores are the weights."""
        return None if self.plain else self.exponent.coefficients(self.b.load(self.group.maximum, self.vector, "m"))

    def no_sums(self) -> list[Value]:
        """Sums of weights before the first; without a normaliser there are none."""
        return [] if self.plain else [self.b.constant(0.0, self.vector)] * PAIR

    def weigh_rows(self, store: Store, low: Value | int, high: Value) -> None:
        """Weights of rows [low, high), an even number, and their sum."""
        b, coefficients, nothing = self.b, self.coefficients(), self.no_sums()
        with b.loop(low, high, SUMMED, hint="first") as first:
            end = b.least(b.add(first, SUMMED), high)
            with b.carry(first, end, PAIR, nothing, hint="j") as (loop, j, sums):
                loop.yields(*self.weigh(store, j, coefficients, sums))
            self.add_total(loop.results)

    def apply_and_weigh(self, rows: RowProgram, weigh: Weigh, first: Value, sums: Sequence[Value]) -> list[Value]:
        """The weights of PAIR keys from `first` on for each of `sums`, to which they are added, straight from the raw
        scores. The program gives what `weigh` takes."""
        b, keys = self.b, [self.b.add(first, u) for u in range(PAIR * len(sums))]

        def exponent(key: Value) -> Value:
            return self._row_scope(rows, key).vector(rows.program)

        exponents = b.side_by_side([functools.partial(exponent, key) for key in keys])
        return [weigh(keys[PAIR * n], *exponents[PAIR * n :][:PAIR], total) for n, total in enumerate(sums)]

    def weigh_all(self, rows: RowProgram, weigh: Weigh, low: Value | int, high: Value, whole: Weigh) -> None:
        """`apply_and_weigh` for keys [low, high), UNROLL at a time by `whole`; rows of no weight up to the key step."""
        b, zero = self.b, self.b.constant(0.0, self.vector)
        end = b.least(high, self.block.count)
        main = b.add(low, b.floor_to(b.sub(end, low), UNROLL))
        with b.carry(low, main, UNROLL, [zero] * (UNROLL // PAIR), hint="j") as (loop, j, sums):
            loop.yields(*self.apply_and_weigh(rows, whole, j, sums))
        self.add_total(loop.results)
        with b.when(b.compare("slt", main, high)):
            with b.loop(main, end, hint="j") as j:
                self.apply_row(rows, j)
            self.fill_beyond(float("-inf"))
            with b.carry(main, high, PAIR, [zero], hint="j") as (rest, j, (total,)):
                rest.yields(weigh(j, *(self._load(b.add(j, u)) for u in range(PAIR)), total))
            self.add_total(rest.results)

    def weigh(
        self, store: Store, key: Value, coefficients: tuple[Value, Value] | None, sums: Sequence[Value]
    ) -> list[Value]:
        """Weights of two rows; returns `sums` with them added."""
        b = self.b
        if self.group.scored is not None:
            self._keep(self.group.scored, key, [self._load(b.add(key, u)) for u in range(PAIR)])
        weight = lambda x: x if coefficients is None else self.context.math.exp2(b.fma(x, *coefficients))
        pair = [weight(self._load(b.add(key, u))) for u in range(PAIR)]
        self._keep(self.group.kept, key, pair)
        store(key, *(self._times_factor(b.add(key, u), p) for u, p in enumerate(pair)))
        return [b.add(s, p, "l") for s, p in zip(sums, pair, strict=False)]

    def add_total(self, sums: Sequence[Value]) -> None:
        b, total = self.b, self.group.block_total
        if sums:
            b.store(b.add(b.load(total, self.vector, "l"), functools.reduce(b.add, sums)), total)

    def _load(self, key: Value) -> Value:
        return self.b.load(self._row(self.group.scores, key), self.vector, "x", align=4 * self.lanes)

    def _times_factor(self, key: Value, p: Value) -> Value:
        if self.group.factors is None:
            return p
        return self.b.mul(p, self.b.load(self._row(self.group.factors, key), self.vector, "w"))

    def _keep(self, rows: Value | None, key: Value, pair: Sequence[Value]) -> None:
        if rows is not None:
            for u, value in enumerate(pair):
                self.b.store(value, self._row(rows, self.b.add(self.b.add(self.block.first, key), u)))
