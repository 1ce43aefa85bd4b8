"""The problem that the planner sees in an `AttentionSpec` at given sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from fusion.errors import ProblemError
from fusion.ir import AttentionSpec
from fusion.ir.expr import Expr, Kind, walk
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.reads import dense_loads, distance_parts
from fusion.ir.sizes import size_value
from fusion.ir.traffic import stored_bytes
from fusion.planning.key_ranges import key_ranges
from fusion.planning.problem import Problem


def problem_of(spec: AttentionSpec, sizes: Mapping[str, int] | Sequence[int] | None) -> Problem:
    """The sizes of a call as a `Problem`. `sizes`: values of `spec.sizes`, by name or in order. Rows visit the keys of
    the spec's closed-form ranges; masks that load data count as dense, since what they hold is known only at run time.
    Raises ProblemError where sizes are missing."""
    values = dict(zip(spec.sizes, sizes or (), strict=False)) if not isinstance(sizes, Mapping) else dict(sizes)
    missing = [name for name in spec.sizes if name not in values]
    if missing:
        raise ProblemError(f"the spec has the sizes {list(spec.sizes)}; values for {missing} are missing: give sizes=")
    n_q, n_k, d, d_v = (size_value(e, values) for e in (spec.n_q, spec.n_k, spec.d, spec.d_v))
    batch = [size_value(extent, values) for extent in spec.batch]
    heads, (score_flops, dense) = batch[-1] if batch else 1, _of_programs(*spec.programs())
    if (mixing := spec.mixing) is not None:  # a multiply-add for every head
        score_flops += batch[mixing.axis] * sum(matrix is not None for matrix in (mixing.scores, mixing.weights))
    return Problem(
        batch=math.prod(batch[:-1]),
        heads=heads,
        heads_kv=max(1, heads // spec.heads_per_key(heads)),
        n_q=n_q,
        n_k=n_k,
        d=d,
        d_v=d_v,
        dtype=spec.dtype,
        ranges=key_ranges(spec, values) if n_q and n_k else None,
        stored_bytes=_stored_bytes(spec, d, d_v, n_k, values),
        among=0 if spec.among is None else size_value(spec.among, values),
        score_flops=score_flops,
        dense=dense,
    )


@functools.lru_cache(maxsize=256)
def _of_programs(*programs: Expr | None) -> tuple[int, int]:
    """`Problem.score_flops` and `Problem.dense`: looked for once, as every new length asks."""
    operations = sum(part.op in PRIMITIVES and part.kind is Kind.FLOAT for part in walk(*programs))
    return operations, len(dense_loads(*programs, but=distance_parts(*programs)))


def _stored_bytes(spec: AttentionSpec, d: int, d_v: int, n_k: int, sizes: Mapping[str, int]) -> float:
    """Mean bytes of an element of k and v in memory; 0 where both are stored as they are multiplied, in no table."""
    as_is = not spec.tables and all(spec.values[n] is None and spec.operands[n] not in spec.stored for n in (1, 2))
    return 0 if as_is else stored_bytes(spec, d, d_v, n_k, sizes)
