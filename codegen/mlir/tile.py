"""One tile: a block of keys against the vectors of queries that are worked on together, in stages.

    scores       S^T = K Q^T                                  product
    maxima       score program, each lane's maximum           vectors
    weights      exponentials, their sums                     vectors
    accumulate   O^T += V^T P^T                               product

Sums over many keys lose digits: each addition rounds to the last place of what has been added up so far. So output and
sum begin anew every `KEY_SPAN` keys (`HALF_KEY_SPAN` where the result has fewer digits) and are added to those of the
spans before. Vector products sum up the keys of a tile by themselves and add that to memory, and begin anew every
`TILE_SPAN` keys. Accumulators on AMX cannot be added to memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.ir.expr import I0, I1, Expr, I
from fusion.ir.reads import dense_loads, distance_parts
from fusion.ir.results import keeps_ends
from fusion.ir.spec import Normalizer
from fusion.planning.register_tiles import Tiling, key_span

from .amx import products_of
from .aux_outputs import AuxOutputs, TrainingStatistics
from .builder import Value
from .dense import DenseLoad, DistanceTable
from .products import InterleavedWork
from .rows import RowReader
from .scope import Scope
from .softmax import Group, GroupSoftmax, KeyBlock, RowProgram, Store
from .values import Array

if TYPE_CHECKING:
    from .kernel import AttentionKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A work item: some query rows of one batch element."""

    number: Value  # of the item, among all of a call
    scope: Scope  # knows the batch coordinates
    readers: list[RowReader]  # of Q, K and V
    first: Value  # row
    count: Value  # of rows
    groups: Value  # vectors of queries that hold them
    padded_groups: Value  # the same, up to a multiple of the products' group step
    part: Value | None  # of the keys, where they are in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """The keys that an item visits. low, high: from low on, before high. skipping: whether a tile visits only those
    that its own rows need (i1); None where they need all."""

    low: Value | int
    high: Value
    skipping: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTile:
    """Some groups of an item against a block of keys."""

    item: Item
    scope: Scope  # knows the tile's first and last row (i0, i1)
    g: Value  # the first group
    here: Value  # how many of its groups exist
    block: KeyBlock
    steps: Value  # of keys, in the block
    weights: Array


class Tiles:
    """The stages of a kernel's tiles, and the memory that they work in."""

    loads: list[DenseLoad]

    def __init__(self, kernel: AttentionKernel, tiling: Tiling, with_statistics: bool):
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        self.tiling, self.spec, self.programs, self.weight = tiling, kernel.spec, kernel.programs, kernel.weight
        self.plain = self.spec.normalizer is Normalizer.NONE
        whole = (self.programs.masked, self.programs.full, self.weight)
        self.by_distance = distance_parts(*whole)
        self.dense = dense_loads(*whole, but=self.by_distance)
        keeps_nan = self.plain or self.weight is not None
        self.products = p = products_of(kernel, tiling, kernel.d, kernel.d_v, keeps_nan)
        groups, keys, row = tiling.groups, tiling.keys, 4 * self.lanes
        self.statistics = TrainingStatistics(kernel, groups) if with_statistics else None
        self.aux_outputs = AuxOutputs(kernel, p.key_step, groups) if self.spec.aux_outputs else None
        self.queries = kernel.array(groups, p.query_bytes, "queries")
        # Scores and weights of a few groups at a time: they stay in the first-level cache.
        group_block = self.group_block = tiling.group_block or p.nr
        self.scores = kernel.array(group_block, keys * row, "scores")
        self.factors = kernel.array(group_block, keys * row, "factors") if self.weight is not None else None
        self.weights = kernel.array(group_block, p.weight_bytes * keys, "weights")
        # Per group: the output and, as one more row, the sum; then the same of the spans before.
        self.span = key_span(kernel.target, tiling.planes, self.spec.out_dtype)
        self.own_rows = p.e_padded + 1
        self.output = kernel.array(groups, 2 * self.own_rows * row, "output")
        self.block_totals = kernel.array(groups, row, "block_totals")
        self.max_of = kernel.array(groups, row, "maxima")
        self.highest = kernel.array(group_block, row, "highest")
        entries = keys + (group_block + 1) * self.lanes
        self.tables = [
            DistanceTable(kernel.context, part, kernel.area(4 * entries, "table")) for part in self.by_distance
        ]
        staged = group_block if p.overlaps else 1  # of the groups that are worked on together
        self.staged = [kernel.array(staged, keys * row, "staged") for _ in self.dense]

    def enter(self) -> None:
        """At the start of the function, where the number of keys is known."""
        b = self.b
        with b.at_entry():
            self.several = b.compare("sgt", self.kernel.n_k, self.span, "several")
            rows = (b.constant(n * self.own_rows, "i64") for n in (2, 1))
            self.sum_rows = b.select(self.several, *rows, "sum_rows")

    def group(self, g: Value, member: Value | int = 0, weights: Array | None = None) -> Group:
        """Memory of group g, number `member` of those that are worked on together; weights: where theirs lie."""
        output, aux = self.output[g], self.aux_outputs
        return Group(
            scores=self.scores[member],
            factors=None if self.factors is None else self.factors[member],
            weights=(weights or self.weights)[member],
            output=output,
            maximum=self.max_of[g],
            total=self.b.at(output, self.products.e_padded * self.lanes, "f32"),
            block_total=self.block_totals[g],
            rows=self.sum_rows,
            kept=aux.kept_rows(g) if aux is not None and aux.keeps else None,
            scored=aux.scored_rows(g) if aux is not None and aux.keeps_scores else None,
        )

    def clear(self, item: Item, maximum: float) -> None:
        """No key yet: maxima in use, sums and outputs of an item."""
        b = self.b
        with b.loop(0, item.padded_groups, hint="g") as g:
            memory = self.group(g)
            b.store(b.constant(maximum, self.vector), memory.maximum)
            b.fill(memory.output, memory.rows, b.constant(0.0, self.vector), hint="e")
            b.store(b.constant(0.0, self.vector), memory.block_total)

    def end_block(self, tile: ScoreTile) -> None:
        """Add the sums of a tile to those of the tiles before. Where it is the last of a span of keys and another
        follows, add its groups' output and sum to those of the spans before."""
        b, first = self.b, tile.block.first
        with b.loop(0, tile.here, hint="member") as member:
            memory = self.group(b.add(tile.g, member))
            b.move_sums(memory.block_total, memory.total, 1, self.vector)
        following = b.add(first, self.tiling.keys)
        ends = b.compare("ne", b.div(first, self.span), b.div(following, self.span))
        ends = b.and_(ends, b.compare("slt", following, self.kernel.n_k), "ends")
        with b.when(ends), b.loop(0, tile.here, hint="member") as member:
            memory = self.group(b.add(tile.g, member))
            b.move_sums(memory.output, self._before(memory.output), self.own_rows, self.vector)

    def _before(self, own: Value) -> Value:
        """Address of sums of the spans before, from that of the own."""
        return self.b.at(own, self.own_rows * self.lanes, "f32")

    def all_sums(self, g: Value) -> None:
        """Add the sums of the spans before to a group's own, once."""
        b, output = self.b, self.output[g]
        with b.when(self.several):
            b.update(output, self.own_rows * self.lanes, b.add, self.vector, self._before(output))

    def total(self, memory: Group) -> Value:
        """The sum of a group over all spans."""
        b = self.b
        own, before = (b.load(at, self.vector, "l") for at in (memory.total, self._before(memory.total)))
        return b.select(self.several, b.add(own, before), own)

    def tile(self, item: Item, scope: Scope, g: Value, j0: Value, n: Value, weights: Array | None = None) -> ScoreTile:
        """The tile of the groups from g on and n keys from j0 on."""
        b, step = self.b, self.products.key_step
        steps = b.ceil_div(n, step, "steps")
        return ScoreTile(
            item=item, scope=scope, g=g, steps=steps,
            here=b.least(b.sub(item.groups, g), self.group_block, "here"),
            block=KeyBlock(first=j0, count=n, padded=b.mul(steps, step)), weights=weights or self.weights,
        )  # fmt: skip

    def rows_and_keys(self, item: Item, keys: KeyRange, g: Value, j0: Value) -> tuple[Scope, Value]:
        """The scope that knows the rows of the groups from g on, and how many keys from j0 on they visit."""
        b, lanes, kernel, mask = self.b, self.lanes, self.kernel, self.spec.mask
        start, rows = b.add(item.first, b.mul(g, lanes)), b.sub(item.count, b.mul(g, lanes))
        last = b.sub(b.add(start, b.least(rows, self.group_block * lanes)), 1)
        tile = item.scope.inner({I0: start, I1: last})
        n = b.least(b.sub(keys.high, j0), self.tiling.keys, "n_keys")
        if keys.skipping is None:
            return tile, n
        assert mask is not None
        low, high = kernel.key_range(tile, self.products.key_step)
        needed = b.least(n, b.sub(high, j0))
        needed = b.select(b.compare("sle", b.add(j0, n), b.as_value(low, "i64")), 0, needed)
        if mask.tile_live is not None:
            live = b.as_value(kernel.with_keys(tile, j0, n).integer(mask.tile_live), "i64")
            needed = b.select(b.compare("eq", live, 0), 0, needed)
        return tile, b.select(keys.skipping, needed, n, "n_keys")

    @contextlib.contextmanager
    def members(self, tile: ScoreTile, low: Value | int = 0, high: Value | int = 1) -> Iterator[Value]:
        """A loop over the groups of a tile, where there are keys [low, high) to work on."""
        b, known = self.b, isinstance(low, int) and isinstance(high, int)
        some = contextlib.nullcontext() if known else b.when(b.compare("slt", b.as_value(low, "i64"), high))
        with some, b.loop(0, tile.here, hint="member") as member:
            yield member

    def reset_maxima(self, tile: ScoreTile) -> None:
        with self.members(tile) as member:
            self.b.store(self.b.constant(float("-inf"), self.vector), self.highest[member])

    def score(
        self, tile: ScoreTile, step: Value, first: Value | int = 0, beside: InterleavedWork | None = None
    ) -> None:
        """One key step against the set of groups from member `first` on."""
        b, p = self.b, self.products
        at = self.kernel.packed_keys[b.add(self.kernel.packed.number(tile.block.first), step)]
        members = [b.add(k, first) for k in range(p.nr)]
        queries = [self.queries[b.add(tile.g, m)] for m in members]
        rows = [b.add(b.mul(m, self.tiling.keys), b.mul(step, p.key_step)) for m in members]
        work = () if beside is None else (functools.partial(beside, step),)
        p.scores(at, queries, [b.row(self.scores.first, r, self.lanes) for r in rows], *work)
        row = b.add(tile.item.first, b.mul(b.add(tile.g, first), self.lanes))
        key, block = b.add(tile.block.first, b.mul(step, p.key_step)), self.tiling.groups * self.lanes
        for load in self.loads:
            load.prefetch_tile(row, p.nr * self.lanes, key, p.key_step, block, self.kernel.n_k)

    def score_all(self, tile: ScoreTile) -> None:
        b, size = self.b, self.products.nr
        sets = b.ceil_div(tile.here, size, "sets")
        with b.loop(0, tile.steps, hint="step") as step, b.loop(0, sets, hint="set") as number:
            self.score(tile, step, b.mul(number, size))

    def second_product(self, tile: ScoreTile, steps: Value) -> tuple[Value, Value, Array, Array]:
        """Addresses of the values of the tile's keys, key steps, its weights and its output."""
        at = self.products.values_of(self.kernel.packed_values, self.kernel.packed.number(tile.block.first))
        return at, steps, tile.weights, self.output.behind(tile.g)

    def accumulate(self, tile: ScoreTile) -> None:
        """The product with V of a tile, whole."""
        product = self.second_product(tile, tile.steps)
        self.products.accumulate(*product, self.b.ceil_div(tile.here, self.products.nr, "sets"))
        self.end_block(tile)

    def variants(self, tile: ScoreTile) -> Iterator[Expr]:
        """The programs that may apply to a tile, each in the branch where it does."""
        b, block, kernel = self.b, tile.block, self.kernel
        self._fill_tables(tile)
        whole = kernel.whole(kernel.with_keys(tile.scope, block.first, block.count))
        if whole is None:
            yield self.programs.masked
            return
        assert self.programs.full is not None
        with b.when(whole):
            yield self.programs.full
        with b.otherwise():
            yield self.programs.masked

    def _fill_tables(self, tile: ScoreTile) -> None:
        b, block = self.b, tile.block
        ends = tile.scope.value(I0), tile.scope.value(I1), block.first, b.sub(b.add(block.first, block.count), 1)
        # A step that only ends the last tile has no keys, and what lies before the first is not the table's.
        with b.when(b.compare("sgt", block.count, 0)) if self.tables else contextlib.nullcontext():
            for table in self.tables:
                table.fill(tile.scope, *ends)

    def lane_scope(self, item: Item, scope: Scope, g: Value) -> Scope:
        """The scope that knows the queries in the lanes of a group."""
        b, offset = self.b, self.b.mul(g, self.lanes)
        return scope.along(I, b.add(item.first, offset), b.sub(item.count, offset))

    def softmax(self, tile: ScoreTile, member: Value | int) -> GroupSoftmax:
        memory = self.group(self.b.add(tile.g, member), member, tile.weights)
        return GroupSoftmax(self.kernel.context, memory, tile.block, self.kernel.exponent, keeps_ends(self.spec))

    def _wanted(self, program: Expr, member: Value | int) -> list[tuple[DenseLoad, Value]]:
        """The dense loads that a program reads, and where those of a member are staged."""
        wanted, place = dense_loads(program, self.weight, but=self.by_distance), member if self.products.overlaps else 0
        return [(load, area[place]) for load, area in zip(self.loads, self.staged, strict=True) if load.expr in wanted]

    def stage(self, tile: ScoreTile, member: Value, program: Expr) -> None:
        """Dense operands of one group, with lanes innermost."""
        if wanted := self._wanted(program, member):
            lanes = self.lane_scope(tile.item, tile.scope, self.b.add(tile.g, member))
            for load, area in wanted:
                load.stage(lanes, tile.block.first, tile.block.count, area)

    def stage_all(self, tile: ScoreTile, program: Expr) -> None:
        """Stage the operands that a program reads of a tile, for all of its groups."""
        self._fill_tables(tile)
        with self.members(tile) as member:
            self.stage(tile, member, program)

    def row_program(self, tile: ScoreTile, member: Value | int, program: Expr) -> RowProgram:
        b, lanes = self.b, self.lane_scope(tile.item, tile.scope, self.b.add(tile.g, member))
        lanes.prepare(program, self.weight, bound=self.kernel.batch_names | {"i"})
        row, last = b.mul(member, self.lanes), b.sub(tile.block.count, 1)
        staged: list[tuple[Expr, Callable[[Value], Value]]]
        staged = [(load.expr, functools.partial(load.read, area)) for load, area in self._wanted(program, member)]
        staged += [(table.part, lambda key, of=table: of.read(row, b.sub(key, last))) for table in self.tables]
        return RowProgram(program=program, weight=self.weight, scope=lanes, staged=staged)

    def maxima(self, tile: ScoreTile, program: Expr, low: Value | int, high: Value, staging: bool = False) -> None:
        """The score program on keys [low, high) of the block, for all groups; maxima join those in `highest`. staging:
        of dense operands, before."""
        b = self.b
        with self.members(tile, low, high) if not staging else self.members(tile) as member:
            if staging:
                self.stage(tile, member, program)
            place, rows = self.highest[member], self.row_program(tile, member, program)
            b.store(self.softmax(tile, member).apply(rows, low, high, b.load(place, self.vector, "h")), place)

    def rescale(self, tile: ScoreTile) -> None:
        """After the maxima of all rows: what they mean for the running maximum, sum and output."""
        b = self.b
        with self.members(tile) as member:
            softmax = self.softmax(tile, member)
            softmax.fill_beyond(0.0 if self.plain else float("-inf"))
            if not self.plain:
                highest = b.load(self.highest[member], self.vector, "h")
                if self.statistics is not None:
                    self.statistics.note_maximum(softmax, b.add(tile.g, member), highest)
                softmax.rescale(highest)

    def weigh(self, tile: ScoreTile, low: Value | int, high: Value) -> None:
        """Scores to weights for keys [low, high) of the block and all groups."""
        with self.members(tile, low, high) as member:
            softmax = self.softmax(tile, member)
            softmax.weigh_rows(self.store_of(softmax), low, high)

    def store_of(self, softmax: GroupSoftmax) -> Store:
        return functools.partial(self.products.store_weights, softmax.group.weights)
