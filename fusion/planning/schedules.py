"""I/O of schedules, as formulas, and lower bounds on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

from fusion.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A loop nest over blocks, by the elements of one head that it moves between the slow and the fast memory, and
    that it holds in the fast one at most. Formulas in N_q, N_k queries and keys, d and d_v columns of K and V, live the
    share of the tiles that a mask leaves, B_r x B_c a tile, B_s the keys of a part, and stages, the tiles in flight.
    `TABLES` comes to the elements moved.

    skips: tiles that the mask hides are left out.
    products: how many that are needed are of width d, and of d_v.
    passes: how often a backward computes the scores, and reads their tables; 0 of a forward. Its kernel of dQ has tiles
        of B_o x B_p and the share live_q, that of dV alone B_u x B_v and live_v.
    """

    io: str
    footprint: str
    skips: bool = False
    products: tuple[int, int] = (1, 1)
    passes: int = 0

    def moved(self, tables: bool = True) -> str:
        """The I/O with that of tables."""
        return self.io + (TABLES if self.passes < 2 else f" + {self.passes}*{TABLES[3:]}") * tables


_FOOTPRINT = "B_r*(d + d_v) + stages*B_c*(d + d_v) + B_r*B_c + 2*B_r"


def _backward(passes: int, io: str, footprint: str) -> Schedule:
    """The schedule of a backward, which begins with delta, the sums over dO * O."""
    io = f"N_q*(2*d_v + 1) + {io}"
    return Schedule(io=io, footprint=footprint, skips=True, products=(3, 2), passes=passes)


_QUERIES = "N_q*(2*d + d_v + 2) + live_q*N_k*(d + d_v)*ceil(N_q/B_o)"
_QUERIES_HELD = "B_o*(2*d + d_v + 2) + B_p*(d + d_v) + 2*B_o*B_p"
SCHEDULES = {
    "flash": Schedule(
        io="N_q*(d + d_v + 1) + N_k*(d + d_v)*ceil(N_q/B_r)",
        footprint=_FOOTPRINT,
    ),
    "block_sparse": Schedule(
        io="N_q*(d + d_v + 1) + live*N_k*(d + d_v)*ceil(N_q/B_r)",
        footprint=_FOOTPRINT,
        skips=True,
    ),
    "split_k": Schedule(
        io="N_q*(d_v + 1) + N_q*(d + 2*d_v + 2)*ceil(N_k/B_s) + live*N_k*(d + d_v)*ceil(N_q/B_r)",
        footprint=f"max({_FOOTPRINT}, 2*B_r*(d_v + 1))",
        skips=True,
    ),
    "whole_rows": Schedule(
        io="N_q*(d + d_v + 1) + N_k*(d + d_v)*ceil(N_q/B_r)",
        footprint="B_r*N_k + max((B_r + B_c)*d, (B_r + B_c)*d_v + 2*B_r)",
    ),
    "backward_fused": _backward(
        1,
        "2*N_k*(d + d_v) + N_q*d + live*N_q*(3*d + d_v + 2)*ceil(N_k/B_c)",
        "2*B_c*(d + d_v) + B_r*(2*d + d_v + 2) + 2*B_r*B_c",
    ),
    "backward_split": _backward(
        2,
        f"2*N_k*(d + d_v) + live*N_q*(d + d_v + 2)*ceil(N_k/B_c) + {_QUERIES}",
        f"max(2*B_c*(d + d_v) + B_r*(d + d_v + 2) + 2*B_r*B_c, {_QUERIES_HELD})",
    ),
    "backward_apart": _backward(
        3,
        "N_k*(3*d + 2*d_v) + live*N_q*(d + d_v + 2)*ceil(N_k/B_c) + live_v*N_q*(d + d_v + 1)*ceil(N_k/B_v)"
        f" + {_QUERIES}",
        "max(B_c*(2*d + d_v) + B_r*(d + d_v + 2) + 2*B_r*B_c, "
        f"B_v*(d + d_v) + B_u*(d + d_v + 1) + B_u*B_v, {_QUERIES_HELD})",
    ),
}
"""The schedules of kernels, by name. `examples/io_model` has them as sums of phases, with others that have no
kernel, and proves the formulas on a simulated memory."""
TABLES = " + t*N_q*N_k"
"""I/O of biases and masks with an element for each score. t: what is read of them for a score, in elements of the
products' dtype and in the mean over all scores, of which those in skipped tiles read nothing."""


@functools.lru_cache(maxsize=64)
def _compiled(formula: str) -> CodeType:
    return compile(formula, formula, "eval")


def elements(formula: str, sizes: Mapping[str, float]) -> float:
    """The value of one of the formulas above."""
    return float(eval(_compiled(formula), {"ceil": math.ceil, "max": max}, dict(sizes)))


def lower_bound(problem: Problem, capacity: float, backward: bool = False) -> float:
    """Elements that any schedule moves for all heads: the larger of what must be moved, and of what a fast memory of
    M = `capacity` elements imposes. The former reads each key head once however many query heads share it, and no key
    that the mask hides from all queries; of a table it reads the elements of live scores. A backward also reads dO, and
    writes three gradients in place of the output."""
    n_q, n_k, d, d_v = (max(1, size) for size in (problem.n_q, problem.n_k, problem.d, problem.d_v))
    batch = max(1, problem.batch)
    if problem.n_k_total:
        # Where every query has keys of its own, all queries and the keys of all sets are one problem, of whose scores a
        # share is wanted. Each key is read once at least, and a set holds no key twice.
        queries, keys = problem.heads * n_q, min(problem.n_k_total, problem.heads * n_k)
        compulsory = (queries + keys) * (problem.d + problem.d_v)
        compulsory += (queries * problem.d + keys * (problem.d + problem.d_v)) * backward
        share = min(1.0, n_k / problem.n_k_total)
        return batch * max(compulsory, share * _products_bound(queries, problem.n_k_total, d, capacity, backward))
    rows, keys = problem.needed()
    written = n_q * problem.d + rows * problem.d_v if backward else n_q * problem.d_v  # and dO
    compulsory = problem.problems * (rows * problem.d + written)
    compulsory += batch * max(1, problem.heads_kv) * (keys + n_k * backward) * (problem.d + problem.d_v)
    live = problem.live_share(1, 1)
    elements = sum(table.copies * table.bytes for table in problem.tables) / problem.element_bytes
    compulsory += live * n_q * n_k * elements
    imposed = live * _products_bound(n_q, n_k, d, capacity, backward)
    return max(compulsory, problem.problems * imposed)


def _products_bound(n_q: int, n_k: int, d: int, capacity: float, backward: bool) -> float:
    """The order of the elements that standard products of Q and K move (2402.07443; of a backward 2410.09397), with the
    constant 1."""
    pairs = n_q * n_k * d + math.sqrt(n_q * n_k) * d**2 * backward
    return pairs * min(d / capacity, 1 / math.sqrt(capacity))
