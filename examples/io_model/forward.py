"""The forward schedules.

Sources: FlashAttention (2205.14135), FlashAttention-2 (2307.08691), Rabe & Staats (2112.05682), Saha & Ye (2402.07443),
Li et al. (2410.09397), Alman & Song (2302.13214); counts with constants are derived here.
"""

from __future__ import annotations

import sympy

from .schedule import (
    DIMS,
    PAIRS,
    B_c,
    B_d,
    B_e,
    B_f,
    B_o,
    B_p,
    B_r,
    B_s,
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
    r,
    s,
    stages,
)  # fmt: skip


def _attend(share: sympy.Expr) -> Phase:
    return Phase(
        name="attend",
        reads=N_q * d + share * R * N_k * DIMS,
        writes=N_q * d_v + N_q,
        footprint=B_r * DIMS + stages * B_c * DIMS + B_r * B_c + 2 * B_r,
        flops=2 * share * PAIRS * DIMS,
        exps=share * (PAIRS + N_q * C),
    )


_PARTIAL = N_q * (d_v + 2) * C
_SPLITS = blocks(N_k, B_s)
_PASSES = sympy.Piecewise((1, N_k + 2 <= M), (2, True))
_FEATURE_BLOCKS = blocks(r, B_f)

FORWARD = (
    # A block of Q, its output and its statistics stay; K and V stream past.
    Schedule(
        name="flash",
        title="query-stationary: Q, O stay, K, V stream",
        source="2307.08691",
        phases=(_attend(sympy.Integer(1)),),
        order="N^2 d^2 / M",
        kernels=("cpu", "gpu"),
        colour="#0072B2",
    ),
    # A block of K and V stays; Q and the unfinished output with two statistics are read and written once per block.
    Schedule(
        name="key_stationary",
        title="FlashAttention-1: K, V blocks stay, Q and O stream",
        source="2205.14135, Alg. 1, Thm 2",
        phases=(
            Phase(
                name="attend",
                reads=N_k * DIMS + C * N_q * (DIMS + 2),
                writes=(C + 1) * N_q * (d_v + 2),
                footprint=B_c * DIMS + B_r * (DIMS + 2) + B_r * B_c,
                flops=2 * PAIRS * DIMS,
                exps=PAIRS + 2 * N_q * C,
            ),
        ),
        order="N^2 d^2 / M",
        colour="#56B4E9",
    ),
    # Every (query, key) chunk leaves its partial output and statistics in slow memory, merged per query chunk.
    Schedule(
        name="rabe_staats",
        title="Rabe & Staats: one partial output per chunk of keys",
        source="2112.05682",
        phases=(
            Phase(
                name="partial outputs",
                reads=N_q * d + R * N_k * DIMS,
                writes=_PARTIAL,
                footprint=B_r * DIMS + B_c * DIMS + B_r * B_c + 2 * B_r,
                flops=2 * PAIRS * DIMS,
                exps=PAIRS,
            ),
            Phase(
                name="merge", reads=_PARTIAL, writes=N_q * d_v + N_q, footprint=2 * B_r * (d_v + 2), exps=2 * N_q * C
            ),
        ),
        order="N^2 d^2 / M",
        colour="#CC79A7",
    ),
    # The keys are cut into splits of B_s, of which the share s is live, each a query-stationary problem of its own with
    # log-sum-exp; then the splits are merged.
    Schedule(
        name="split_k",
        title="query-stationary on splits of the keys, then a merge",
        source="Flash-Decoding",
        phases=(
            Phase(
                name="splits",
                reads=_SPLITS * N_q * d + s * R * N_k * DIMS,
                writes=_SPLITS * N_q * (d_v + 1),
                footprint=B_r * DIMS + stages * B_c * DIMS + B_r * B_c + 2 * B_r,
                flops=2 * s * PAIRS * DIMS,
                exps=s * (PAIRS + N_q * C),
            ),
            Phase(
                name="merge",
                reads=_SPLITS * N_q * (d_v + 1),
                writes=N_q * d_v + N_q,
                footprint=2 * B_r * (d_v + 1),
                exps=2 * N_q * _SPLITS,
            ),
        ),
        order="N^2 d^2 / M + (N_k / B_s) N d",
        kernels=("cpu", "gpu"),
        skips=True,
        colour="#009E73",
    ),
    # S by a blocked product with the head dimension cut too, spilled with the log-sum-exp; exp(S - L) V likewise.
    Schedule(
        name="small_cache",
        title="head dimension tiled too, scores spilled (M < d^2)",
        source="2402.07443, Sec. 3.2",
        phases=(
            Phase(
                name="scores",
                reads=N_q * d * C + N_k * d * R,
                writes=PAIRS + N_q,
                footprint=B_r * B_c + B_d * (B_r + B_c) + B_r,
                flops=2 * PAIRS * d,
                exps=PAIRS + 2 * N_q * C,
            ),
            Phase(
                name="output",
                reads=PAIRS * blocks(d_v, B_e) + N_k * d_v * blocks(N_q, B_o) + N_q,
                writes=N_q * d_v,
                footprint=B_o * B_e + B_p * (B_o + B_e) + B_o,
                flops=2 * PAIRS * d_v,
                exps=PAIRS * blocks(d_v, B_e),
            ),
        ),
        order="N^2 d / sqrt(M)",
        colour="#D55E00",
    ),
    # As flash, over the live blocks of K and V alone.
    Schedule(
        name="block_sparse",
        title="query-stationary over live tiles",
        source="2205.14135, Prop. 4",
        phases=(_attend(s),),
        order="N d + s N^2 d^2 / M",
        kernels=("cpu", "gpu"),
        skips=True,
        unmasked="flash",
        colour="#E69F00",
    ),
    # S = Q K^T, P = softmax(S), O = P V as three kernels. A row that does not fit is read twice by the softmax.
    Schedule(
        name="materialized",
        title="standard: S and P stored",
        source="2205.14135, Alg. 0, Thm 2",
        phases=(
            Phase(
                name="scores",
                reads=N_q * d + R * N_k * d,
                writes=PAIRS,
                footprint=(B_r + B_c) * d + B_r * B_c,
                flops=2 * PAIRS * d,
            ),
            Phase(
                name="softmax",
                reads=_PASSES * PAIRS,
                writes=PAIRS,
                footprint=sympy.Piecewise((N_k + 2, N_k + 2 <= M), (B_c + 2, True)),
                exps=_PASSES * PAIRS,
            ),
            Phase(
                name="output",
                reads=PAIRS + R * N_k * d_v,
                writes=N_q * d_v,
                footprint=(B_r + B_c) * d_v + B_r * B_c,
                flops=2 * PAIRS * d_v,
            ),
        ),
        order="N d + N^2",
        closed_form=False,
        colour="#7F7F7F",
    ),
    # Scores of a block of rows stay whole, so that heads can be mixed before and after the softmax: K, then V.
    Schedule(
        name="whole_rows",
        title="rows of scores whole, all heads together: for heads that are mixed",
        source="2003.02436; schedule derived here",
        phases=(
            Phase(
                name="attend",
                reads=N_q * d + R * N_k * DIMS,
                writes=N_q * d_v + N_q,
                footprint=B_r * N_k + sympy.Max((B_r + B_c) * d, (B_r + B_c) * d_v + 2 * B_r),
                flops=2 * PAIRS * DIMS,
                exps=PAIRS,
            ),
        ),
        order="N^3 d / M",
        kernels=("cpu",),
        mixes_heads=True,
        closed_form=False,
    ),
    # Polynomial features made in fast memory, B_f at a time: state = phi(K)^T [V, 1], which the queries read out.
    Schedule(
        name="polynomial",
        title="approximate: polynomial features, never stored",
        source="after 2302.13214; schedule derived here",
        phases=(
            Phase(
                name="state",
                reads=_FEATURE_BLOCKS * N_k * DIMS,
                writes=sympy.Integer(0),
                footprint=B_f * (d_v + 1) + B_c * (DIMS + B_f),
                flops=2 * r * N_k * (d_v + 1) + r * N_k,
            ),
            Phase(
                name="output",
                reads=_FEATURE_BLOCKS * N_q * d + (_FEATURE_BLOCKS - 1) * N_q * (d_v + 1),
                writes=(_FEATURE_BLOCKS - 1) * N_q * (d_v + 1) + N_q * d_v,
                footprint=B_f * (d_v + 1) + B_r * (DIMS + 1 + B_f),
                flops=2 * r * N_q * (d_v + 1) + r * N_q,
            ),
        ),
        order="N d + N r d^2 / M",
        exact=False,
        kernels=("cpu", "gpu"),
        closed_form=False,
        colour="#8C564B",
    ),
)
