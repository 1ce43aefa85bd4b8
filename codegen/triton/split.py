"""The `split_k` schedule, for few queries and many keys (decoding): several programs share the keys of one block of
rows.

Each writes its part of the output, not yet divided, with the maximum and the sum of its keys; a second kernel brings
the parts to a common maximum and adds them up. The keys that `flash` would visit (a range, or listed tiles) are divided
between the parts, whose number is planned (`fusion.planning.gpu`). Only the second kernel knows whether a row has a
live key; where one has none and eager averages over all keys, it visits them all itself.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import LOG2E
from fusion.lowering.score_programs import dead_rows_matter

from . import source
from .forward import Forward, in_own_units
from .key_loop import PLAIN, KeyLoop, Order, nothing_summed
from .stages import Visit


class Part(Forward):
    """One part of the keys for one block of ROWS query rows of one head."""

    name = "attention_split"
    whole_rows = False

    def _programs(self, body: str) -> str:
        return source.block("split = tl.program_id(0) % splits", "program = tl.program_id(0) // splits", body)

    def _key_range(self) -> list[str]:
        """Statements of the part's share of the block's keys: of each list, or of the range, in whole tiles."""
        if self.listed:
            before = "tiles_across - partial_count"
            return [
                *super()._key_range(),
                "full_start = split * full_count // splits",
                "full_stop = (split + 1) * full_count // splits",
                f"start = {before} + split * partial_count // splits",
                f"stop = {before} + (split + 1) * partial_count // splits",
            ]
        return [
            *super()._key_range(),
            "end = tl.maximum(start, stop)",
            "share = ((end - start + splits - 1) // splits + KEYS - 1) // KEYS * KEYS",
            "start = tl.minimum(start + split * share, end)",
            "stop = tl.minimum(start + share, end)",
            "full_start = tl.minimum(tl.maximum(full_start, start), stop)",
            "full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)",
        ]

    def _stages(self) -> list[tuple[str, str, bool]]:
        return [("full_start", "full_stop", True), ("start", "stop", False)] if self.listed else super()._stages()

    def _finish(self) -> str:
        lines = [*self._settled(self.programs), *self._maximum_and_sum()] if self.softmax else []
        lines.append(self._at())
        for panel in self.values:
            at, acc = f"part_ptr + at * {self.d_v} + {panel.column}", f"acc{panel.suffix}"
            lines.append(f"tl.store({at}, {acc}, mask={self._rows_inside(panel)})")
        if self.softmax:
            lines += [
                "tl.store(part_max_ptr + at, row_max, mask=(rows <= i1)[:, None])",
                "tl.store(part_sum_ptr + at, row_sum, mask=(rows <= i1)[:, None])",
            ]
        return source.block(*lines)

    def _at(self) -> str:
        """Statement of `at`, the number of a row among all rows of all heads and parts."""
        return f"at = tl.cast(split * ({self.heads}) + {self.place()}, tl.int64) * {self.n_q} + rows[:, None]"

    def _again(self) -> str:
        """Empty: a part does not know whether another has a live key."""
        return ""


class Combine(Part):
    """The output of one block of ROWS query rows of one head from its parts."""

    name = "attention_combine"
    relative_to_maximum = True

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, statistics: bool = False, order: Order = PLAIN):
        super().__init__(spec, d, d_v, statistics, order)
        self.loop_programs = self.programs
        # Parts have their maxima in the score's own units.
        self.programs = replace(self.programs, scale=1.0, fills=())

    def body(self) -> tuple[list[Visit], str]:
        """The body with the loop over keys of `Part`, in the same module."""
        again = self._again()
        body = self._placed(source.block(*self._sum_of_parts(), again, Forward._finish(self)))
        return [], source.block("program = tl.program_id(0)", body)

    def _sum_of_parts(self) -> list[str]:
        """Statements that add the parts up, relative to the largest of their maxima."""
        loop, sums = [self._at()], []
        for panel in self.values:
            name, at = f"part{panel.suffix}", f"part_ptr + at * {self.d_v} + {panel.column}"
            loop.append(f"{name} = tl.load({at}, mask={self._rows_inside(panel)}, other=0.0)")
            sums.append((f"acc{panel.suffix}", name))
        start = nothing_summed(self.values, self.softmax)
        if self.softmax:
            loop += [
                "at_row = tl.reshape(at, [ROWS])",
                'part_max = tl.load(part_max_ptr + at_row, mask=rows <= i1, other=float("-inf"))',
                "part_sum = tl.load(part_sum_ptr + at_row, mask=rows <= i1, other=0.0)",
                "m_new = tl.maximum(m, part_max, propagate_nan=tl.PropagateNan.ALL)",
                'base = tl.where(m_new == float("-inf"), 0.0, m_new)',
                f"alpha = tl.exp2((m - base) * {LOG2E})",
                f"beta = tl.exp2((part_max - base) * {LOG2E})",
                *(f"{acc} = {acc} * alpha[:, None] + {part} * beta[:, None]" for acc, part in sums),
                "l = l * alpha + part_sum * beta",
                "m = m_new",
            ]
        else:
            loop += [f"{acc} = {acc} + {part}" for acc, part in sums]
        return [*start, "for split in tl.range(splits):", source.indented(source.block(*loop))]

    def _again(self) -> str:
        """Statements that visit all keys, for blocks with a row whose parts have no live key."""
        if not dead_rows_matter(self.spec):
            return ""
        self.loop = KeyLoop(self, self.loop_programs, self.order)
        self.boxes = self.loop.boxes
        end = f"({self.n_k} + KEYS - 1) // KEYS" if self.listed else self.n_k
        inside = source.block(
            "list_at = tile_list_ptr" if self.listed else "",
            *self._load_queries(),
            *self.loop.pointers(),
            *self.loop.initial(),
            self.loop.call("0", end, False, listed=False, begin="0"),
            self.loop.finish("0", self.n_k),
            *self._settled(self.loop_programs),
            f"m = {in_own_units('m', self.loop_programs)}",
        )
        return source.block(
            f"dead = ({self._dead()}) & (rows <= i1)",
            "if tl.max(dead.to(tl.int32), 0) != 0:",
            source.indented(inside),
        )
