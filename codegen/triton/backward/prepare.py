"""Values per row that the other backward kernels need, computed before them."""

from __future__ import annotations

from fusion.ir.expr import ZERO
from fusion.ir.spec import Normalizer

from .. import source
from ..stages import Visit
from .role import ANY_DEAD, Role, alive


class Prepare(Role):
    """delta of one block of ROWS query rows: the row sums of dO * O, with what auxiliary outputs add; the logarithm of
    1 / row_sum; and whether one of the rows met no live key.

    That is for the kernel of dK and dV, whose ROWS must be the same; where tiles are listed, for all heads that share
    lists.
    """

    name, reads_rows = "attention_backward_prepare", True

    def body(self) -> tuple[list[Visit], str]:
        delta = " + ".join(f"tl.sum(do{p.suffix} * o{p.suffix}, 1)[:, None]" for p in self.values)
        lines = [
            *(panel.numbers for panel in self.values),
            *self.rows_of_output("do", "i", dtype="tl.float32"),
            *self.rows_of_output("o", "i", "out", "tl.float32"),
            f"row_place = tl.cast({self.place()}, tl.int64) * {self.n_q} + i",
        ]
        if self.gradients.aux_outputs.weight is not ZERO:
            delta = f"{delta} + tl.load(lacked_ptr + row_place)"
        if self.spec.row_scale is not None:
            lines.append(self.plane("slope", 2))
            delta = f"({delta}) * slope"
        if self.gradients.aux_outputs.log_sum is not ZERO:
            delta = f"{delta} - tl.load(off_ptr + row_place)"
        lines += [f"tl.store(delta_ptr + row_place, {delta}, mask=rows_ok)", *self._log_share()]
        if self.skips:
            lines += [
                "row_max = tl.load(statistics_ptr + row_place)",
                alive(self.spec),
                f"if {ANY_DEAD} != 0:",
                f"    tl.store(dead_ptr + {self.place_factor(self.listed)} * blocks + block, 1)",
            ]
        return [], source.block(*self.query_block(), *lines)

    def _log_share(self) -> list[str]:
        """Statements that write the logarithm of the scale of weights; a row without a live key has none where that
        makes them 0."""
        if self.spec.row_scale is not None:
            return []
        lines = [self.plane("row_sum", 1), "log_share = -tl.log2(row_sum)"]
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines += [
                "row_max = tl.load(statistics_ptr + row_place)",
                'log_share = tl.where(row_max == float("-inf"), float("-inf"), log_share)',
            ]
        return [*lines, f"tl.store({self.in_plane('delta', 1)}, log_share, mask=rows_ok)"]
