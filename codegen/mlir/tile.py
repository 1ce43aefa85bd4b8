"""One tile: a block of keys against the groups of queries that are worked on together, in stages.

    scores       S^T = K Q^T                                  product
    maxima       score program, each lane's maximum           vectors
    weights      exponentials, their sums                     vectors
    accumulate   O^T += V^T P^T                               product

Where the products run on a unit of their own (AMX), two tiles are in the works at a time. With several planes, so that
both units are busy:

    the weights of one tile beside the scores of the next, then the product with V of the one beside the maxima of the
    next

The processor overlaps the two by itself where their instructions stand close together: the products take pieces of
vector work that they write between tile instructions. No memory is needed twice: the weights of a key step are made
before the next tile's scores of that step are stored over the scores that they were made of. With one plane that gains
nothing, and products and vector work alternate:

    the scores of the next tile and the product with V of the last, then maxima and weights of the next

Sums over many keys lose digits: each addition rounds to the last place of what has been added up so far. So output and
sum begin anew every `KEY_SPAN` keys and are added to those of the spans before (where the result is float32; others
have no such digits).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from fusion.codegen.mlir.amx import Amx
from fusion.codegen.mlir.bounds import BoundedScores
from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.dense import DenseLoad, dense_loads
from fusion.codegen.mlir.products import Groups, InterleavedWork, MultiplyAdd, Products
from fusion.codegen.mlir.relative_bias import DistanceTable, distance_parts, without_parts
from fusion.codegen.mlir.scope import Lanes, Scope
from fusion.codegen.mlir.skeleton import KernelFunction
from fusion.codegen.mlir.softmax import PAIR, UNROLL, Group, GroupSoftmax, KeyBlock, RowProgram, Store
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.training_statistics import TrainingStatistics
from fusion.codegen.mlir.work_items import Item, Tile, Tiling
from fusion.ir.expr import Expr, I, coord
from fusion.ir.spec import AttentionSpec, Normalizer

GROUP_PAIR = (0, 1)  # of the set of groups that overlapping products take
KEY_SPAN = 512


class TileKernel(KernelFunction):
    """The stages of a tile, and the memory that they work in."""

    loads: list[DenseLoad]

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int, with_statistics: bool = False
    ):
        degree = 5 if spec.out_dtype == "float32" else {1: 3, 2: 4}.get(tiling.planes, 5)
        super().__init__(spec, target, d, d_v, degree, flush=tiling.planes > 0)
        self.tiling = tiling
        whole = (self.programs.masked, self.programs.full, self.weight)
        self.by_distance = distance_parts(*whole)
        self.dense = dense_loads(*(without_parts(program, self.by_distance) for program in whole))
        self.may_flag = tiling.planes > 1
        self.worst = self.area(64, "worst") if self.may_flag else None
        self.products: Products
        if tiling.planes:
            exact_pairs = spec.normalizer is Normalizer.NONE or self.weight is not None
            self.products = Amx(self.b, d, d_v, tiling.planes, tiling.keys, self.worst, exact_pairs)
        else:
            self.products = MultiplyAdd(self.b, self.lanes, d, d_v, target.tile_rows, target.tile_groups)
        self.statistics = TrainingStatistics(self, tiling.groups) if with_statistics else None
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
        self.spans = 2 if self.spec.out_dtype == "float32" else 1
        self.output_bytes = self.spans * (p.e_padded + 1) * row
        self.output = self.area(groups * self.output_bytes, "output")
        self.maxima = self.area(groups * row, "maxima")
        self.highest = self.area(together * row, "highest")
        entries = keys + (together + 1) * lanes
        self.tables = [DistanceTable(self.context, part, self.area(4 * entries, "table")) for part in self.by_distance]
        self.staged = [self.area(together * keys * row, "staged") for _ in self.dense]

    def _part(self, base: Value, number: Value | int, size: int, hint: str) -> Value:
        return self.b.at(base, self.b.mul(number, size), "i8", hint)

    def _group_memory(self, g: Value, member: Value | int = 0) -> Group:
        """Memory of group g, number `member` of those that are worked on together."""
        p, keys, lanes, part = self.products, self.tiling.keys, self.lanes, self._part
        output = part(self.output, g, self.output_bytes, "o_rows")
        return Group(
            scores=part(self.scores, member, keys * lanes * 4, "s_rows"),
            factors=None if self.factors is None else part(self.factors, member, keys * lanes * 4, "w_rows"),
            weights=part(self.weights, member, p.weight_bytes(keys), "p_rows"),
            output=output,
            maximum=part(self.maxima, g, 4 * lanes, "m_at"),
            total=self.b.at(output, p.e_padded * lanes, "f32"),
            rows=self.sum_rows,
        )

    def _top(self) -> Scope:
        top, b, own = super()._top(), self.b, self.products.e_padded + 1
        with b.at_entry():
            self.several = b.compare("sgt", self.n_k, KEY_SPAN, "several") if self.spans > 1 else None
            one = b.constant(own, "i64")
            self.sum_rows = one if self.several is None else b.select(self.several, 2 * own, one, "sum_rows")
        return top

    def _end_key_span(self, tile: Tile) -> None:
        """Where a tile is the last of its span, add its groups' output and sum to those before."""
        if self.several is None:
            return
        b = self.b
        spans = [b.div(b.add(tile.block.first, n), KEY_SPAN, "chapter") for n in (0, self.tiling.keys)]
        with b.when(b.binary("arith.andi", self.several, b.compare("ne", *spans), "ends")):
            with b.loop(0, tile.here, hint="member") as member:
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

    def _make_tile(self, item: Item, scope: Scope, g: Value, j0: Value, n: Value) -> Tile:
        """The tile of the groups from g on and n keys from j0 on."""
        b, step = self.b, self.products.key_step
        steps = b.div(b.add(n, step - 1), step, "steps")
        return Tile(
            item=item, scope=scope, g=g, steps=steps,
            here=b.least(b.sub(item.groups, g), self.together, "here"),
            block=KeyBlock(first=j0, count=n, padded=b.mul(steps, step)),
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

    def _alternate(self, old: Tile, new: Tile, near: BoundedScores | None = None) -> None:
        """All products and all vector work of a turn each in one piece: the product with V of a tile after the scores
        of the next, so that neither waits for what has just been stored. near: every row's maximum is known beforehand,
        and programs and exponentials are one pass."""
        b = self.b
        self._all_scores(new)
        with b.when(b.compare("sgt", old.steps, 0)):
            self._accumulate(old)
        if near is None:
            self._make_weights(new)
            return
        for program in self._variants(new):
            with b.loop(0, new.here, hint="member") as member:
                self._stage(new, member, program)
                self._weights_at_once(new, member, near.exponents[program])

    def _weights_at_once(self, tile: Tile, member: Value, exponent: Expr) -> None:
        b, block, softmax = self.b, tile.block, self._softmax(tile, member)
        rows, store = self._row_program(tile, member, exponent), self._store_of(softmax)
        whole = b.mul(b.div(block.count, UNROLL), UNROLL)
        softmax.apply_and_weigh(rows, store, whole)
        with b.when(b.compare("slt", whole, block.padded)):
            with b.loop(whole, block.count, hint="j") as j:
                softmax.apply_row(rows, j)
            softmax.fill_beyond(float("-inf"))
            one, zero = (b.constant(x, self.vector) for x in (1.0, 0.0))
            softmax.exponentials(store, whole, block.padded, (one, zero))

    def _overlap(self, old: Tile, new: Tile) -> None:
        """The second half of a tile and the first half of the next; either may have no keys."""
        b, step_keys = self.b, self.products.key_step
        p = self.products
        assert isinstance(p, Amx)
        both = b.least(old.steps, new.steps, "both")
        beside = self._weights_beside(old)
        with b.loop(0, both, hint="step") as step:
            self._emit_remaining_work(step, p.score_parts, functools.partial(self._weights, old))
            self._scores(new, step, 0, beside)
        with b.loop(both, new.steps, hint="step") as step:
            self._scores(new, step)
        self._weights(old, b.mul(both, step_keys), old.block.padded)
        self._no_maxima(new)
        values, packed, output = self._second_product(old)
        pair = [[side.member(b, member) for member in GROUP_PAIR] for side in (packed, output)]
        both = b.least(old.steps, b.div(new.block.count, step_keys), "both")
        for program in self._variants(new):
            with b.loop(0, new.here, hint="member") as member:
                self._stage(new, member, program)
            with b.when(b.compare("sgt", both, 0)):
                p.accumulate(values, both, *pair, beside=self._maxima_beside(new, program))
            with b.loop(0, both, hint="step") as step:
                self._emit_remaining_work(step, p.value_parts, functools.partial(self._all_maxima, new, program))
            self._all_maxima(new, program, b.mul(both, step_keys), new.block.count)
        with b.when(b.compare("slt", both, old.steps)):
            p.accumulate(values, old.steps, *pair, first=both)
        self._end_key_span(old)
        with b.when(b.compare("sgt", new.steps, 0)):
            self._update_maxima(new)

    def _width(self, parts: int) -> int:
        """How many keys of each of a step's `parts` parts are worked on beside a product."""
        return self.products.key_step // parts // PAIR * PAIR

    def _emit_remaining_work(self, step: Value, parts: int, work: Callable[[Value, Value], None]) -> None:
        """`work(low, high)` on the keys of a step that its parts leave over."""
        b, keys, done = self.b, self.products.key_step, parts * self._width(parts)
        if done < keys:
            start = b.mul(step, keys)
            work(b.add(start, done), b.add(start, keys))

    def _weights_beside(self, tile: Tile) -> InterleavedWork:
        b = self.b
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        stores = [self._store_of(softmax) for softmax in softmaxes]
        coefficients = [softmax.coefficients() for softmax in softmaxes]
        zero = b.constant(0.0, self.vector)
        plain = self.spec.normalizer is Normalizer.NONE

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            start = b.add(b.mul(step, self.products.key_step), b.mul(part, self._width(parts)))
            sums = {member: [zero] * PAIR for member in GROUP_PAIR}

            def piece(member: int, key: int) -> None:
                at = b.add(start, key)
                if plain:
                    softmaxes[member].weigh_plain(stores[member], at)
                    return
                sums[member] = softmaxes[member].weigh(stores[member], at, coefficients[member], sums[member])
                if key + PAIR == self._width(parts):
                    softmaxes[member].add_total(sums[member])

            keys = range(0, self._width(parts), PAIR)
            return [functools.partial(piece, member, key) for key in keys for member in GROUP_PAIR]

        return pieces

    def _maxima_beside(self, tile: Tile, program: Expr) -> InterleavedWork:
        b = self.b
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        programs = [self._row_program(tile, member, program) for member in GROUP_PAIR]
        places = [self._part(self.highest, member, 4 * self.lanes, "h_at") for member in GROUP_PAIR]

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            start = b.add(b.mul(step, self.products.key_step), b.mul(part, self._width(parts)))
            highest: dict[int, Value] = {}

            def piece(member: int, key: int) -> None:
                if key == 0:
                    highest[member] = b.load(places[member], self.vector, "h")
                softmax = softmaxes[member]
                rows = softmax.apply_rows(programs[member], b.add(start, key), PAIR)
                highest[member] = softmax.raise_to(highest[member], rows)
                if key + PAIR == self._width(parts):
                    b.store(highest[member], places[member])

            keys = range(0, self._width(parts), PAIR)
            return [functools.partial(piece, member, key) for key in keys for member in GROUP_PAIR]

        return pieces

    def _no_maxima(self, tile: Tile) -> None:
        b = self.b
        with b.loop(0, tile.here, hint="member") as member:
            b.store(b.constant(float("-inf"), self.vector), self._part(self.highest, member, 4 * self.lanes, "h_at"))

    def _scores(self, tile: Tile, step: Value, first: Value | int = 0, beside: InterleavedWork | None = None) -> None:
        """One key step against the set of groups from member `first` on."""
        b, p = self.b, self.products
        at = b.at(self.packed_keys, b.mul(b.add(b.div(tile.block.first, p.key_step), step), p.key_bytes()), "i8")
        members = [b.add(k, first) for k in range(p.group_step)]
        queries = [self._part(self.queries, b.add(tile.g, m), p.query_bytes(), "q_at") for m in members]
        rows = [b.add(b.mul(m, self.tiling.keys), b.mul(step, p.key_step)) for m in members]
        p.scores(at, queries, [b.at(self.scores, b.mul(r, self.lanes), "f32") for r in rows], step, beside)

    def _sets(self, tile: Tile) -> Value:
        """How many pairs (or whatever the products take at a time) of groups the tile has."""
        b, step = self.b, self.products.group_step
        return b.div(b.add(tile.here, step - 1), step, "sets")

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
        at = b.at(self.packed_values, b.mul(b.div(tile.block.first, p.key_step), p.value_bytes()), "i8")
        weights = Groups(first=self.weights, stride=p.weight_bytes(self.tiling.keys))
        output = Groups(first=self._part(self.output, tile.g, self.output_bytes, "o_rows"), stride=self.output_bytes)
        return at, weights, output

    def _variants(self, tile: Tile) -> Iterator[Expr]:
        """The programs that may apply to a tile, each in the branch where it does."""
        b, block = self.b, tile.block
        start, last = tile.scope.value(coord("i0")), tile.scope.value(coord("i1"))
        ends = block.first, b.sub(b.add(block.first, block.count), 1)
        for table in self.tables:
            table.fill(tile.scope, start, last, *ends)
        whole = self._whole(self._with_keys(tile.scope, block.first, block.count))
        if whole is None:
            yield self.programs.masked
            return
        assert self.programs.full is not None
        with b.when(whole):
            yield self.programs.full
        with b.otherwise():
            yield self.programs.masked

    def _lane_scope(self, item: Item, scope: Scope, g: Value) -> Scope:
        b = self.b
        offset = b.mul(g, self.lanes)
        first, valid = b.add(item.first, offset), self._valid(b.sub(item.count, offset))
        lanes = Lanes(coord=I, first=first, count=self.lanes, valid=valid)
        return Scope(context=self.context, parent=scope, lanes=lanes)

    def _member_lanes(self, tile: Tile, member: Value | int) -> Scope:
        return self._lane_scope(tile.item, tile.scope, self.b.add(tile.g, member))

    def _softmax(self, tile: Tile, member: Value | int) -> GroupSoftmax:
        memory = self._group_memory(self.b.add(tile.g, member), member)
        return GroupSoftmax(self.context, memory, tile.block, self.exponent)

    def _staged_area(self, number: int, member: Value | int) -> Value:
        return self._part(self.staged[number], member, 4 * self.tiling.keys * self.lanes, "staged_rows")

    def _wanted(self, program: Expr) -> list[int]:
        """Which of the dense loads a program reads."""
        wanted = dense_loads(*(without_parts(part, self.by_distance) for part in (program, self.weight)))
        return [number for number, load in enumerate(self.loads) if load.expr in wanted]

    def _stage(self, tile: Tile, member: Value, program: Expr) -> None:
        """Dense operands of one group, with lanes innermost."""
        wanted = self._wanted(program)
        lanes = self._member_lanes(tile, member) if wanted else None
        for number in wanted:
            assert lanes is not None
            area = self._staged_area(number, member)
            self.loads[number].stage(lanes, tile.block.first, tile.block.count, area)

    def _row_program(self, tile: Tile, member: Value | int, program: Expr) -> RowProgram:
        b, lanes = self.b, self._member_lanes(tile, member)
        lanes.prepare(program, self.weight, bound=self.batch_names | {"i"})
        assert lanes.lanes is not None
        row = lanes.lanes.first
        staged = []
        for number in self._wanted(program):
            load, area = self.loads[number], self._staged_area(number, member)
            staged.append((load.expr, functools.partial(load.read, area)))
        for table in self.tables:
            staged.append((table.part, lambda key, table=table: table.read(row, b.add(tile.block.first, key))))
        return RowProgram(program=program, weight=self.weight, scope=lanes, staged=staged)

    def _maxima(self, tile: Tile, member: Value, program: Expr, low: Value | int, high: Value) -> None:
        """The score program on keys [low, high) of the block, for one group; its maxima join those in `highest`."""
        b, place = self.b, self._part(self.highest, member, 4 * self.lanes, "h_at")
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
                highest = b.load(self._part(self.highest, member, 4 * self.lanes, "h_at"), self.vector, "h")
                group = b.add(tile.g, member)
                if self.statistics is not None:
                    self.statistics.note_maximum(softmax, group, highest)
                softmax.rescale(highest, exact=self.spec.row_scale is not None)

    def _weights(self, tile: Tile, low: Value | int, high: Value) -> None:
        """Scores to weights for keys [low, high) of the block and all groups."""
        b = self.b
        with b.when(b.compare("slt", b.as_value(low, "i64"), high)), b.loop(0, tile.here, hint="member") as member:
            softmax = self._softmax(tile, member)
            write = softmax.plain_weights if self.spec.normalizer is Normalizer.NONE else softmax.exponentials
            write(self._store_of(softmax), low, high)

    def _store_of(self, softmax: GroupSoftmax) -> Store:
        return functools.partial(self.products.store_weights, softmax.group.weights)
