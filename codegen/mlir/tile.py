"""One tile: a block of keys against the groups of queries that are worked on together, in stages.

    scores       S^T = K Q^T                                  product
    maxima       score program, each lane's maximum           vectors
    weights      exponentials, their sums                     vectors
    accumulate   O^T += V^T P^T                               product

Sums over many keys lose digits: each addition rounds to the last place of what has been added up so far. So output and
sum begin anew every `KEY_SPAN` keys (`HALF_KEY_SPAN` where the result has fewer digits) and are added to those of the
spans before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fusion.ir.expr import Expr, I, coord
from fusion.ir.reads import dense_loads, distance_parts
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.planning.register_tiles import HALF_KEY_SPAN, KEY_SPAN, Target, Tiling

from .amx import products_of
from .builder import Value
from .dense import DenseLoad, DistanceTable
from .further import FurtherOutputs, TrainingStatistics
from .products import Groups, InterleavedWork
from .rows import RowReader
from .scope import Lanes, Scope
from .skeleton import KernelFunction
from .softmax import Group, GroupSoftmax, KeyBlock, RowProgram, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A work item: some query rows of one batch element."""

    number: Value  # of the item, among all of a call
    scope: Scope  # knows the batch coordinates
    readers: list[RowReader]  # of Q, K and V
    first: Value  # row
    count: Value  # of rows
    groups: Value  # groups of lanes that hold them
    padded_groups: Value  # the same, up to a multiple of the products' group step


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """The keys that an item visits. low, high: from low on, before high. skipping: whether a tile visits only those
    that its own rows need (i1); None where they need all."""

    low: Value | int
    high: Value
    skipping: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some groups of an item against a block of keys."""

    item: Item
    scope: Scope  # knows the tile's first and last row (i0, i1)
    g: Value  # the first group
    here: Value  # how many of its groups exist
    block: KeyBlock
    steps: Value  # of keys, in the block
    weights: Value  # where they lie


class TileKernel(KernelFunction):
    """The stages of a tile, and the memory that they work in."""

    loads: list[DenseLoad]

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int, with_statistics: bool = False
    ):
        degree = 5 if spec.out_dtype == "float32" or spec.further else {1: 3, 2: 4}.get(tiling.planes, 5)
        super().__init__(spec, target, d, d_v, degree, flush=tiling.planes > 0 and not spec.further)
        self.tiling = tiling
        whole = (self.programs.masked, self.programs.full, self.weight)
        self.by_distance = distance_parts(*whole)
        self.dense = dense_loads(*whole, but=self.by_distance)
        self.may_flag = tiling.planes > 1
        self.worst = self.area(64, "worst") if self.may_flag else None
        exact_pairs = spec.normalizer is Normalizer.NONE or self.weight is not None
        self.products = products_of(self.b, target, tiling, d, d_v, self.worst, exact_pairs, mirrored=False)
        self.statistics = TrainingStatistics(self, tiling.groups) if with_statistics else None
        self.further = FurtherOutputs(self, tiling.groups) if spec.further else None
        self._tile_areas()

    def _tile_areas(self) -> None:
        p, groups, keys, lanes = self.products, self.tiling.groups, self.tiling.keys, self.lanes
        row = 4 * lanes
        self.queries = self.area(groups * p.query_bytes(), "queries")
        # Scores and weights of a few groups at a time: they stay in the first-level cache.
        together = self.together = self.tiling.together or p.group_step
        self.scores = self.area(together * keys * row, "scores")
        self.factors = self.area(together * keys * row, "factors") if self.weight is not None else None
        self.weights = self.area(together * p.weight_bytes(keys), "weights")
        # Per group: the output and, as one more row, the sum; then the same of the spans before.
        self.span = KEY_SPAN if self.spec.out_dtype == "float32" else HALF_KEY_SPAN
        self.output_bytes = 2 * (p.e_padded + 1) * row
        self.output = self.area(groups * self.output_bytes, "output")
        self.maxima = self.area(groups * row, "maxima")
        self.highest = self.area(together * row, "highest")
        entries = keys + (together + 1) * lanes
        self.tables = [DistanceTable(self.context, part, self.area(4 * entries, "table")) for part in self.by_distance]
        self.staged_at_once = together if p.overlaps else 1  # of the groups that are worked on together
        self.staged = [self.area(self.staged_at_once * keys * row, "staged") for _ in self.dense]

    def _part(self, base: Value, number: Value | int, size: int, hint: str) -> Value:
        return self.b.row(base, number, size, "i8", hint)

    def _group_memory(self, g: Value, member: Value | int = 0, weights: Value | None = None) -> Group:
        """Memory of group g, number `member` of those that are worked on together; weights: where theirs lie."""
        p, keys, lanes, part = self.products, self.tiling.keys, self.lanes, self._part
        output = part(self.output, g, self.output_bytes, "o_rows")
        return Group(
            scores=part(self.scores, member, keys * lanes * 4, "s_rows"),
            factors=None if self.factors is None else part(self.factors, member, keys * lanes * 4, "w_rows"),
            weights=part(weights or self.weights, member, p.weight_bytes(keys), "p_rows"),
            output=output,
            maximum=part(self.maxima, g, 4 * lanes, "m_at"),
            total=self.b.at(output, p.e_padded * lanes, "f32"),
            rows=self.sum_rows,
            kept=self.further.kept_rows(g) if self.further is not None and self.further.keeps else None,
            scored=self.further.scored_rows(g) if self.further is not None and self.further.keeps_scores else None,
        )

    def _top(self) -> Scope:
        top, b, own = super()._top(), self.b, self.products.e_padded + 1
        with b.at_entry():
            self.several = b.compare("sgt", self.n_k, self.span, "several")
            self.sum_rows = b.select(self.several, b.constant(2 * own, "i64"), b.constant(own, "i64"), "sum_rows")
        return top

    def _end_key_span(self, tile: Tile) -> None:
        """Where a tile is the last of its span, and another follows, add its groups' output and sum to those before."""
        b, first = self.b, tile.block.first
        following = b.add(first, self.tiling.keys)
        ends = b.compare("ne", b.div(first, self.span), b.div(following, self.span))
        ends = b.and_(ends, b.compare("slt", following, self.n_k), "ends")
        with b.when(ends), b.loop(0, tile.here, hint="member") as member:
            self._merge_partial_sums(b.add(tile.g, member), 0, 1)

    def _merge_partial_sums(self, g: Value, source: int, target: int) -> None:
        """Add a group's running rows (0) to those of the spans before (1), or the other way round, and clear
        them."""
        b, own = self.b, (self.products.e_padded + 1) * self.lanes
        base = self._group_memory(g).output
        with b.loop(0, self.products.e_padded + 1, hint="e") as e:
            at = [b.at(base, b.add(b.mul(e, self.lanes), own * part), "f32") for part in (source, target)]
            b.store(b.add(*(b.load(cell, self.vector, "o") for cell in at)), at[1])
            b.store(b.constant(0.0, self.vector), at[0])

    def _make_tile(self, item: Item, scope: Scope, g: Value, j0: Value, n: Value, weights: Value | None = None) -> Tile:
        """The tile of the groups from g on and n keys from j0 on."""
        b, step = self.b, self.products.key_step
        steps = b.ceil_div(n, step, "steps")
        return Tile(
            item=item, scope=scope, g=g, steps=steps,
            here=b.least(b.sub(item.groups, g), self.together, "here"),
            block=KeyBlock(first=j0, count=n, padded=b.mul(steps, step)), weights=weights or self.weights,
        )  # fmt: skip

    def _tile(self, tile: Tile) -> None:
        """All stages, one after the other."""
        self._all_scores(tile)
        self._make_weights(tile)
        self._accumulate(tile)

    def _make_weights(self, tile: Tile) -> None:
        b = self.b
        self._no_maxima(tile)
        for program in self._variants(tile):
            with b.loop(0, tile.here, hint="member") as member:
                self._stage(tile, member, program)
                self._maxima(tile, member, program, 0, tile.block.count)
        self._update_maxima(tile)
        self._weights(tile, 0, tile.block.padded)

    def _highest_of(self, member: Value | int) -> Value:
        return self._part(self.highest, member, 4 * self.lanes, "h_at")

    def _no_maxima(self, tile: Tile) -> None:
        b = self.b
        with b.loop(0, tile.here, hint="member") as member:
            b.store(b.constant(float("-inf"), self.vector), self._highest_of(member))

    def _scores(self, tile: Tile, step: Value, first: Value | int = 0, beside: InterleavedWork | None = None) -> None:
        """One key step against the set of groups from member `first` on."""
        b, p = self.b, self.products
        at = b.row(self.packed_keys, b.add(b.div(tile.block.first, p.key_step), step), p.key_bytes(), "i8")
        members = [b.add(k, first) for k in range(p.group_step)]
        queries = [self._part(self.queries, b.add(tile.g, m), p.query_bytes(), "q_at") for m in members]
        rows = [b.add(b.mul(m, self.tiling.keys), b.mul(step, p.key_step)) for m in members]
        p.scores(at, queries, [b.row(self.scores, r, self.lanes) for r in rows], step, beside)
        row = b.add(tile.item.first, b.mul(b.add(tile.g, first), self.lanes))
        key, block = b.add(tile.block.first, b.mul(step, p.key_step)), self.tiling.groups * self.lanes
        for load in self.loads:
            load.ask_ahead(row, p.group_step * self.lanes, key, p.key_step, block, self.n_k)

    def _sets(self, tile: Tile) -> Value:
        """How many pairs (or whatever the products take at a time) of groups the tile has."""
        b, step = self.b, self.products.group_step
        return b.ceil_div(tile.here, step, "sets")

    def _all_scores(self, tile: Tile) -> None:
        b = self.b
        sets = self._sets(tile)
        with b.loop(0, tile.steps, hint="step") as step, b.loop(0, sets, hint="set") as number:
            self._scores(tile, step, b.mul(number, self.products.group_step))

    def _accumulate(self, tile: Tile) -> None:
        values, weights, output = self._second_product(tile)
        self.products.accumulate_sets(values, tile.steps, weights, output, self._sets(tile))
        self._end_key_span(tile)

    def _second_product(self, tile: Tile) -> tuple[Value, Groups, Groups]:
        """Where the values of the tile's keys, its weights and its output lie."""
        b, p = self.b, self.products
        at = p.values_of(self.packed_values, b.div(tile.block.first, p.key_step))
        weights = Groups(first=tile.weights, stride=p.weight_bytes(self.tiling.keys))
        output = Groups(first=self._part(self.output, tile.g, self.output_bytes, "o_rows"), stride=self.output_bytes)
        return at, weights, output

    def _variants(self, tile: Tile) -> Iterator[Expr]:
        """The programs that may apply to a tile, each in the branch where it does."""
        b, block = self.b, tile.block
        self._fill_tables(tile)
        whole = self._whole(self._with_keys(tile.scope, block.first, block.count))
        if whole is None:
            yield self.programs.masked
            return
        assert self.programs.full is not None
        with b.when(whole):
            yield self.programs.full
        with b.otherwise():
            yield self.programs.masked

    def _fill_tables(self, tile: Tile) -> None:
        b, block = self.b, tile.block
        start, last = tile.scope.value(coord("i0")), tile.scope.value(coord("i1"))
        ends = block.first, b.sub(b.add(block.first, block.count), 1)
        # A turn that only ends the last tile has no keys, and what lies before the first is not the table's.
        with b.when(b.compare("sgt", block.count, 0)) if self.tables else contextlib.nullcontext():
            for table in self.tables:
                table.fill(tile.scope, start, last, *ends)

    def _lane_scope(self, item: Item, scope: Scope, g: Value) -> Scope:
        b = self.b
        offset = b.mul(g, self.lanes)
        first, valid = b.add(item.first, offset), self._valid(b.sub(item.count, offset))
        lanes = Lanes(coord=I, first=first, count=self.lanes, valid=valid)
        return scope.inner(lanes=lanes)

    def _member_lanes(self, tile: Tile, member: Value | int) -> Scope:
        return self._lane_scope(tile.item, tile.scope, self.b.add(tile.g, member))

    def _softmax(self, tile: Tile, member: Value | int) -> GroupSoftmax:
        memory = self._group_memory(self.b.add(tile.g, member), member, tile.weights)
        return GroupSoftmax(self.context, memory, tile.block, self.exponent, keeps_ends(self.spec))

    def _staged_area(self, number: int, member: Value | int) -> Value:
        place = member if self.staged_at_once > 1 else 0
        return self._part(self.staged[number], place, 4 * self.tiling.keys * self.lanes, "staged_rows")

    def _wanted(self, program: Expr) -> list[int]:
        """Which of the dense loads a program reads."""
        wanted = dense_loads(program, self.weight, but=self.by_distance)
        return [number for number, load in enumerate(self.loads) if load.expr in wanted]

    def _stage(self, tile: Tile, member: Value, program: Expr) -> None:
        """Dense operands of one group, with lanes innermost."""
        wanted = self._wanted(program)
        lanes = self._member_lanes(tile, member) if wanted else None
        for number in wanted:
            assert lanes is not None
            area = self._staged_area(number, member)
            self.loads[number].stage(lanes, tile.block.first, tile.block.count, area)

    def _stage_all(self, tile: Tile, program: Expr) -> None:
        """What a program reads of a tile, for all of its groups."""
        self._fill_tables(tile)
        with self.b.loop(0, tile.here, hint="member") as member:
            self._stage(tile, member, program)

    def _row_program(self, tile: Tile, member: Value | int, program: Expr) -> RowProgram:
        b, lanes = self.b, self._member_lanes(tile, member)
        lanes.prepare(program, self.weight, bound=self.batch_names | {"i"})
        row, last = b.mul(member, self.lanes), b.sub(tile.block.count, 1)
        loads = [(self.loads[number], self._staged_area(number, member)) for number in self._wanted(program)]
        staged = [(load.expr, functools.partial(load.read, area)) for load, area in loads]
        staged += [(table.part, lambda key, of=table: of.read(row, b.sub(key, last))) for table in self.tables]
        return RowProgram(program=program, weight=self.weight, scope=lanes, staged=staged)

    def _maxima(self, tile: Tile, member: Value, program: Expr, low: Value | int, high: Value) -> None:
        """The score program on keys [low, high) of the block, for one group; its maxima join those in `highest`."""
        b, place = self.b, self._highest_of(member)
        rows = self._row_program(tile, member, program)
        b.store(self._softmax(tile, member).apply(rows, low, high, b.load(place, self.vector, "h")), place)

    def _all_maxima(self, tile: Tile, program: Expr, low: Value | int, high: Value) -> None:
        b = self.b
        with b.when(b.compare("slt", b.as_value(low, "i64"), high)), b.loop(0, tile.here, hint="member") as member:
            self._maxima(tile, member, program, low, high)

    def _update_maxima(self, tile: Tile) -> None:
        """After the maxima of all rows: what they mean for the running maximum, sum and output."""
        b = self.b
        with b.loop(0, tile.here, hint="member") as member:
            softmax = self._softmax(tile, member)
            plain = self.spec.normalizer is Normalizer.NONE
            softmax.fill_beyond(0.0 if plain else float("-inf"))
            if not plain:
                highest = b.load(self._highest_of(member), self.vector, "h")
                group = b.add(tile.g, member)
                if self.statistics is not None:
                    self.statistics.note_maximum(softmax, group, highest)
                softmax.rescale(highest)

    def _weights(self, tile: Tile, low: Value | int, high: Value) -> None:
        """Scores to weights for keys [low, high) of the block and all groups."""
        b = self.b
        with b.when(b.compare("slt", b.as_value(low, "i64"), high)), b.loop(0, tile.here, hint="member") as member:
            softmax = self._softmax(tile, member)
            write = softmax.plain_weights if self.spec.normalizer is Normalizer.NONE else softmax.exponentials
            write(self._store_of(softmax), low, high)

    def _store_of(self, softmax: GroupSoftmax) -> Store:
        return functools.partial(self.products.store_weights, softmax.group.weights)
