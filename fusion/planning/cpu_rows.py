"""Predicted time of the CPU kernel for few queries, which goes row by row with keys in lanes, and into how many parts
it cuts the keys.

Threads take pieces of work (rows that read the same keys; a part of these keys) from a common counter. A piece costs
the larger of its vector work and of its share of the reading; whoever ends last decides. Where all keys count, pieces
are equal, and what is lost beside whole rounds is that threads do not begin together; where a mask leaves keys out that
are known only at run time, up to a whole piece is lost (Graham's bound on list scheduling).
"""

from __future__ import annotations

import numpy as np

from fusion.machine import Machine
from fusion.planning.cpu import Times
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import target_of

LEAST_PART = 512
"""Keys of a part at least, where keys are cut."""

FEW_QUERIES = 8
"""Queries up to which a row at a time is faster than a tile that is mostly empty."""

WEIGHED = 32
"""Queries up to which it may be."""

MOST_ROWS = 8
"""Rows that share keys in a piece of work."""

VECTOR, PAIR_VECTOR = 1.1, 0.55
"""Cycles of the stated clock for a vector of K or V and a row; the second where rows share keys and bfloat16 is
multiplied in pairs. Such that 9 to 32 queries go row by row where that is faster: over 512 to 4096 keys, d = 64 and
128, up to some 22 queries in both dtypes (Zen 5; benchmarks/results/2026-11-27-zen5.md)."""

PAIRED = 32
"""Columns of a line of bfloat16: widths that are multiples of it are multiplied in pairs, on AMX tiles or without."""

TILED, TILED_SCORES = 1.6, 25.0
"""Cycles on AMX tiles, for a vector of K or V, whatever the rows that share it, and for a vector of scores of a row.
Measured over 512 to 2560 keys with 2 to 8 rows, d = 64 (Xeon)."""

WORTH_WAKING = 1 << 17
"""Multiply-adds that are worth waking a thread for (some 10 us): what SDPA's threads do, too."""

STAGED = 1.5e-7
"""Seconds of a row for keys that do not fill a vector: copied to where zeros follow them."""

MERGED = 1.5e-7
"""Seconds for what a row of a part leaves behind, written and merged."""

BEGUN_APART = 0.03
"""Share of a piece by which threads begin apart."""

PIECES = {False: 8, True: 32}
"""Pieces of work per core at most; True: where a mask makes them unequal. Heads in many short parts are read in as many
places at a time: eight heads over 16384 keys in bfloat16 took 0.27 ms whole and 0.59 ms in 16 parts each."""


def row_time(machine: Machine, problem: Problem, splits: np.ndarray, *, ragged: bool) -> Times:
    """Seconds with the keys cut into so many parts. ragged: a mask leaves out keys that are known at run time only."""
    kv_heads, rows, items = _items(problem)
    elements = max(1, problem.n_k) * (problem.d + problem.d_v) * problem.live_share(1)
    cores = max(1, min(machine.cores, int(kv_heads * rows * elements) // WORTH_WAKING + 1))
    pieces = items * splits
    rounds = np.ceil(pieces / cores)
    lost = 0.0 if cores == 1 else 1 - 1 / cores if ragged else BEGUN_APART
    share = (pieces / cores if ragged else rounds) / pieces + lost / pieces
    moved = items * elements * problem.key_bytes
    reach = (
        problem.n_k_total * (problem.d + problem.d_v) * problem.key_bytes or moved
    )  # rows take turns at a head's keys
    level = next((level for level in machine.levels if reach <= level.capacity), machine.levels[-1])
    resources = {
        "vectors": _cycles(machine, problem) / (machine.clock or 2.5e9) * share,
        "keys": moved / (level.bandwidth / max(1, machine.cores)) * share,
        "merge": np.where(splits > 1, rounds * min(rows, MOST_ROWS) * MERGED, 0.0),
        "staging": np.full(len(splits), STAGED * kv_heads * rows / cores if problem.n_k % machine.lanes() else 0.0),
        "launch": np.full(len(splits), machine.launch),
    }
    total = np.maximum(resources["vectors"], resources["keys"])
    total = total + resources["merge"] + resources["staging"] + resources["launch"]
    return Times(total=total, resources=resources)


def _cycles(machine: Machine, problem: Problem) -> float:
    """Cycles of the vector work, of all cores together, by the way that `row_products` of codegen/mlir takes."""
    kv_heads, rows, items = _items(problem)
    keys = max(1, problem.n_k) * problem.live_share(1) / machine.lanes()
    width = problem.d + problem.d_v
    stored = problem.dtype == "bfloat16" and problem.key_bytes == problem.element_bytes and not problem.n_k_total
    target, paired = target_of(machine), stored and problem.d % PAIRED == problem.d_v % PAIRED == 0
    if paired and target.amx:
        return keys * (items * width * TILED + kv_heads * rows * TILED_SCORES)
    return keys * kv_heads * rows * width * (PAIR_VECTOR if paired and target.pairs and rows > 1 else VECTOR)


def _items(problem: Problem) -> tuple[int, int, int]:
    """Key heads of the whole batch, rows that share the keys of one, and groups of rows that go over them together."""
    kv_heads = max(1, problem.batch) * max(1, problem.heads_kv)
    rows = max(1, problem.problems * problem.n_q // kv_heads)
    return kv_heads, rows, kv_heads * -(-rows // MOST_ROWS)


def part_counts(n_k: int) -> list[int]:
    """The numbers of parts that are weighed: powers of two."""
    return [1 << power for power in range(max(1, n_k // LEAST_PART).bit_length())]


def best_parts(machine: Machine, problem: Problem, *, ragged: bool) -> int:
    """Into how many parts the keys are cut: 1 where that gains nothing."""
    most = PIECES[ragged] * machine.cores // _items(problem)[2]
    counts = np.array([count for count in part_counts(problem.n_k) if count == 1 or count <= most])
    return int(counts[np.argmin(row_time(machine, problem, counts, ragged=ragged).total)])
