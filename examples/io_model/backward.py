"""The backward passes as symbolic schedules, in the manner of `forward`.

All recompute P from Q, K and the stored log-sum-exp L, with delta_i = sum_e dO[i,e] O[i,e] and dS = P o (dP - delta),
except the materialised one, which is handed P. Sources: FlashAttention (2205.14135, Alg. 3 and 4), FlashAttention-2
(2307.08691, Alg. 2), Li et al. (2410.09397) for the small cache.
"""

from __future__ import annotations

import sympy

from .schedule import (
    DIMS,
    PAIRS,
    B_c,
    B_d,
    B_e,
    B_o,
    B_p,
    B_r,
    C,
    M,
    N_k,
    N_q,
    Phase,
    R,
    Schedule,
    blocks,
    d,
    d_v,
)  # fmt: skip

_DELTA = Phase(name="delta", reads=2 * N_q * d_v, writes=N_q, footprint=sympy.Integer(3))

_QUERIES_AT_REST = Phase(
    name="dQ",
    reads=N_q * (DIMS + 2) + blocks(N_q, B_o) * N_k * DIMS,
    writes=N_q * d,
    footprint=B_o * (2 * d + d_v + 2) + B_p * DIMS + 2 * B_o * B_p,
    flops=2 * PAIRS * (DIMS + d),
    exps=PAIRS,
)

_PASSES = sympy.Piecewise((1, 2 * N_k + 1 <= M), (2, True))
_OF_VALUES, _OF_KEYS = ((B_r + B_c) * columns + B_r * B_c for columns in (d_v, d))


def _blocked(name: str, rows: sympy.Expr, depth: sympy.Expr, columns: sympy.Expr) -> Phase:
    """A product of a stored matrix of scores, with the head dimension cut."""
    return Phase(
        name=name,
        reads=PAIRS * blocks(columns, B_e) + depth * columns * blocks(rows, B_o),
        writes=rows * columns,
        footprint=B_o * B_e + B_p * (B_o + B_e),
        flops=2 * PAIRS * columns,
    )


BACKWARD = (
    # One kernel with K, V blocks and their gradients at rest, another with Q blocks: deterministic.
    Schedule(
        name="backward_split",
        title="backward, separate dK/dV and dQ kernels",
        source="derived here",
        phases=(
            _DELTA,
            Phase(
                name="dK, dV",
                reads=N_k * DIMS + C * N_q * (DIMS + 2),
                writes=N_k * DIMS,
                footprint=2 * B_c * DIMS + B_r * (DIMS + 2) + 2 * B_r * B_c,
                flops=4 * PAIRS * DIMS,
                exps=PAIRS,
            ),
            _QUERIES_AT_REST,
        ),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("cpu", "gpu"),
        colour="#0072B2",
    ),
    # As that, with a kernel each for dK and dV: scores are computed once more, and half as many sums are kept.
    Schedule(
        name="backward_apart",
        title="backward, a kernel each for dK, dV and dQ",
        source="derived here",
        phases=(
            _DELTA,
            Phase(
                name="dK",
                reads=N_k * DIMS + C * N_q * (DIMS + 2),
                writes=N_k * d,
                footprint=B_c * (2 * d + d_v) + B_r * (DIMS + 2) + 2 * B_r * B_c,
                flops=2 * PAIRS * (DIMS + d),
                exps=PAIRS,
            ),
            Phase(
                name="dV",
                reads=N_k * d + C * N_q * (DIMS + 1),
                writes=N_k * d_v,
                footprint=B_c * DIMS + B_r * (DIMS + 1) + B_r * B_c,
                flops=2 * PAIRS * DIMS,
                exps=PAIRS,
            ),
            _QUERIES_AT_REST,
        ),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("gpu",),
        colour="#009E73",
    ),
    # K, V blocks and their gradients at rest; dQ is added to once per key block, on GPUs in no certain order.
    Schedule(
        name="backward_fused",
        title="FlashAttention backward: dQ accumulated in slow memory",
        source="2205.14135, Alg. 4",
        phases=(
            _DELTA,
            Phase(
                name="dK, dV, dQ",
                reads=N_k * DIMS + C * N_q * (2 * d + d_v + 2),
                writes=N_k * DIMS + (C + 1) * N_q * d,
                footprint=2 * B_c * DIMS + B_r * (2 * d + d_v + 2) + 2 * B_r * B_c,
                flops=2 * PAIRS * (3 * d + 2 * d_v),
                exps=PAIRS,
            ),
        ),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("cpu", "gpu"),
        colour="#56B4E9",
    ),
    # Five kernels on a stored P. A pair of rows that does not fit is read twice by the softmax's derivative.
    Schedule(
        name="backward_materialized",
        title="standard backward: P, dP and dS stored",
        source="2205.14135, Alg. 3",
        phases=(
            Phase(
                name="dV", reads=PAIRS + C * N_q * d_v, writes=N_k * d_v, footprint=_OF_VALUES, flops=2 * PAIRS * d_v
            ),
            Phase(
                name="dP", reads=N_q * d_v + R * N_k * d_v, writes=PAIRS, footprint=_OF_VALUES, flops=2 * PAIRS * d_v
            ),
            Phase(
                name="dS",
                reads=2 * _PASSES * PAIRS,
                writes=PAIRS,
                footprint=sympy.Piecewise((2 * N_k + 1, 2 * N_k + 1 <= M), (2 * B_c + 1, True)),
            ),
            Phase(name="dQ", reads=PAIRS + R * N_k * d, writes=N_q * d, footprint=_OF_KEYS, flops=2 * PAIRS * d),
            Phase(name="dK", reads=PAIRS + C * N_q * d, writes=N_k * d, footprint=_OF_KEYS, flops=2 * PAIRS * d),
        ),
        order="N d + N^2",
        direction="backward",
        closed_form=False,
        colour="#7F7F7F",
    ),
    # P and dS tile by tile with the head dimension cut, spilled; then three blocked products.
    Schedule(
        name="backward_small_cache",
        title="backward with the head dimension tiled (M < d^2)",
        source="2410.09397",
        phases=(
            _DELTA,
            Phase(
                name="P, dS",
                reads=(N_q * C + N_k * R) * DIMS + 2 * N_q,
                writes=2 * PAIRS,
                footprint=2 * B_r * B_c + B_d * (B_r + B_c) + 2 * B_r,
                flops=2 * PAIRS * DIMS,
                exps=PAIRS,
            ),
            _blocked("dV", N_k, N_q, d_v),
            _blocked("dK", N_k, N_q, d),
            _blocked("dQ", N_q, N_k, d),
        ),
        order="(N^2 d + N d^2) / sqrt(M)",
        direction="backward",
        colour="#D55E00",
    ),
)
