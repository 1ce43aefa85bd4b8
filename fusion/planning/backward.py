"""The backward passes as symbolic schedules, in the manner of `fusion.planning.forward`.

All recompute P from Q, K and the stored log-sum-exp L, with delta_i = sum_e dO[i,e] O[i,e] and dS = P o (dP - delta),
except the materialised one, which is handed P. Sources: FlashAttention (2205.14135, Alg. 3 and 4), FlashAttention-2
(2307.08691, Alg. 2), Li et al. (2410.09397) for the small cache.
"""

from __future__ import annotations

import sympy

from fusion.planning.schedule import Phase, Schedule
from fusion.planning.symbols import (
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
    R,
    blocks,
    d,
    d_v,
)  # fmt: skip

ZERO = sympy.Integer(0)

DELTA = Phase(name="delta", reads=2 * N_q * d_v, writes=N_q, footprint=sympy.Integer(3))


QUERIES_AT_REST = Phase(
    name="dQ",
    reads=N_q * (DIMS + 2) + blocks(N_q, B_o) * N_k * DIMS,
    writes=N_q * d,
    footprint=B_o * (2 * d + d_v + 2) + B_p * DIMS + 2 * B_o * B_p,
    flops=2 * PAIRS * (DIMS + d),
    exps=PAIRS,
)


def _split_kernels() -> Schedule:
    """One kernel with K, V blocks and their gradients at rest, another with Q blocks: deterministic."""
    keys = Phase(
        name="dK, dV",
        reads=N_k * DIMS + C * N_q * (DIMS + 2),
        writes=N_k * DIMS,
        footprint=2 * B_c * DIMS + B_r * (DIMS + 2) + 2 * B_r * B_c,
        flops=4 * PAIRS * DIMS,
        exps=PAIRS,
    )
    return Schedule(
        name="backward_split",
        title="backward, separate dK/dV and dQ kernels",
        source="derived here",
        phases=(DELTA, keys, QUERIES_AT_REST),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("cpu", "gpu"),
        colour="#0072B2",
    )


def _kernels_apart() -> Schedule:
    """As that, with a kernel each for dK and dV: scores are computed once more, and half as many sums are kept."""
    keys = Phase(
        name="dK",
        reads=N_k * DIMS + C * N_q * (DIMS + 2),
        writes=N_k * d,
        footprint=B_c * (2 * d + d_v) + B_r * (DIMS + 2) + 2 * B_r * B_c,
        flops=2 * PAIRS * (DIMS + d),
        exps=PAIRS,
    )
    values = Phase(
        name="dV",
        reads=N_k * d + C * N_q * (DIMS + 1),
        writes=N_k * d_v,
        footprint=B_c * DIMS + B_r * (DIMS + 1) + B_r * B_c,
        flops=2 * PAIRS * DIMS,
        exps=PAIRS,
    )
    return Schedule(
        name="backward_apart",
        title="backward, a kernel each for dK, dV and dQ",
        source="derived here",
        phases=(DELTA, keys, values, QUERIES_AT_REST),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("gpu",),
        colour="#009E73",
    )


def _fused_kernel() -> Schedule:
    """K, V blocks and their gradients at rest; dQ is added to once per key block, on GPUs in no certain order."""
    keys = Phase(
        name="dK, dV, dQ",
        reads=N_k * DIMS + C * N_q * (2 * d + d_v + 2),
        writes=N_k * DIMS + (C + 1) * N_q * d,
        footprint=2 * B_c * DIMS + B_r * (2 * d + d_v + 2) + 2 * B_r * B_c,
        flops=2 * PAIRS * (3 * d + 2 * d_v),
        exps=PAIRS,
    )
    return Schedule(
        name="backward_fused",
        title="FlashAttention backward: dQ accumulated in slow memory",
        source="2205.14135, Alg. 4",
        phases=(DELTA, keys),
        order="(N^2 d^2 + N d^3) / M",
        direction="backward",
        kernels=("cpu", "gpu"),
        colour="#56B4E9",
    )


def _materialized() -> Schedule:
    """Five kernels on a stored P. A pair of rows that does not fit is read twice by the softmax's derivative."""
    passes = sympy.Piecewise((1, 2 * N_k + 1 <= M), (2, True))
    product = (B_r + B_c) * d_v + B_r * B_c
    grad = (B_r + B_c) * d + B_r * B_c
    phases = (
        Phase(name="dV", reads=PAIRS + C * N_q * d_v, writes=N_k * d_v, footprint=product, flops=2 * PAIRS * d_v),
        Phase(name="dP", reads=N_q * d_v + R * N_k * d_v, writes=PAIRS, footprint=product, flops=2 * PAIRS * d_v),
        Phase(
            name="dS",
            reads=2 * passes * PAIRS,
            writes=PAIRS,
            footprint=sympy.Piecewise((2 * N_k + 1, 2 * N_k + 1 <= M), (2 * B_c + 1, True)),
        ),
        Phase(name="dQ", reads=PAIRS + R * N_k * d, writes=N_q * d, footprint=grad, flops=2 * PAIRS * d),
        Phase(name="dK", reads=PAIRS + C * N_q * d, writes=N_k * d, footprint=grad, flops=2 * PAIRS * d),
    )
    return Schedule(
        name="backward_materialized",
        title="standard backward: P, dP and dS stored",
        source="2205.14135, Alg. 3",
        phases=phases,
        order="N d + N^2",
        direction="backward",
        closed_form=False,
        colour="#7F7F7F",
    )


def _small_cache() -> Schedule:
    """P and dS tile by tile with the head dimension cut, spilled; then three blocked products."""
    tiles = Phase(
        name="P, dS",
        reads=(N_q * C + N_k * R) * DIMS + 2 * N_q,
        writes=2 * PAIRS,
        footprint=2 * B_r * B_c + B_d * (B_r + B_c) + 2 * B_r,
        flops=2 * PAIRS * DIMS,
        exps=PAIRS,
    )

    def product(name: str, rows: sympy.Expr, depth: sympy.Expr, columns: sympy.Expr) -> Phase:
        return Phase(
            name=name,
            reads=PAIRS * blocks(columns, B_e) + depth * columns * blocks(rows, B_o),
            writes=rows * columns,
            footprint=B_o * B_e + B_p * (B_o + B_e),
            flops=2 * PAIRS * columns,
        )

    phases = (DELTA, tiles, product("dV", N_k, N_q, d_v), product("dK", N_k, N_q, d), product("dQ", N_q, N_k, d))
    return Schedule(
        name="backward_small_cache",
        title="backward with the head dimension tiled (M < d^2)",
        source="2410.09397",
        phases=phases,
        order="(N^2 d + N d^2) / sqrt(M)",
        direction="backward",
        colour="#D55E00",
    )


BACKWARD = (_split_kernels(), _kernels_apart(), _fused_kernel(), _materialized(), _small_cache())
