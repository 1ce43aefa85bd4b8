"""The key loops of two peers as kernels of their own, to be compiled and put through the same model of clocks.

They are written after Triton's tutorial 06 (fused attention) and FlexAttention's templates, forward and backward (torch
2.13, `_inductor/kernel/flex/templates`): the same operations in the same order, without what surrounds the loop. The
backward's two loops are one kernel there, whose programs take one or the other; as two they have more registers each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl


@triton.jit
def tutorial_loop(q_at, k_at, v_at, out_at, scale, N, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """One scale that holds log2(e), no guards."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, keys = tl.arange(0, D), tl.arange(0, KEYS)
    q = tl.load(q_at + rows[:, None] * D + columns[None, :])
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.full([ROWS], 1.0, tl.float32)
    for first in tl.range(0, N, KEYS):
        k = tl.load(k_at + (first + keys)[None, :] * D + columns[:, None])
        s = tl.dot(q, k)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha[:, None]
        v = tl.load(v_at + (first + keys)[:, None] * D + columns[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
    tl.store(out_at + rows[:, None] * D + columns[None, :], (acc / l[:, None]).to(tl.bfloat16))


@triton.jit
def flex_loop(q_at, k_at, v_at, out_at, scale, N, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Scale and log2(e) apart, and a guard for rows without a live key."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, keys = tl.arange(0, D), tl.arange(0, KEYS)
    q = tl.load(q_at + rows[:, None] * D + columns[None, :])
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, N, KEYS):
        k = tl.load(k_at + (first + keys)[None, :] * D + columns[:, None])
        s = tl.dot(q, k) * scale
        x = s * 1.44269504
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(x - shift[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_at + (first + keys)[:, None] * D + columns[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc)
        m = m_new
    tl.store(out_at + rows[:, None] * D + columns[None, :], (acc / l[:, None]).to(tl.bfloat16))


@triton.jit
def flex_queries_loop(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dq_at, scale, N, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """dQ of a block of queries."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, keys = tl.arange(0, D), tl.arange(0, KEYS)
    own = rows[:, None] * D + columns[None, :]
    q, do = tl.load(q_at + own), tl.load(do_at + own)
    lse, delta = tl.load(lse_at + rows), tl.load(delta_at + rows)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    dq = tl.zeros([ROWS, D], tl.float32)
    for first in tl.range(0, N, KEYS):
        kt = tl.load(k_at + (first + keys)[None, :] * D + columns[:, None])
        s = tl.dot(q, kt) * scale
        p = tl.exp2(s * 1.44269504 - lse[:, None])
        vt = tl.load(v_at + (first + keys)[None, :] * D + columns[:, None])
        ds = p * (tl.dot(do, vt) - delta[:, None])
        dq += tl.dot(ds.to(kt.dtype), tl.trans(kt))
    tl.store(dq_at + own, (dq * scale).to(tl.bfloat16))


@triton.jit
def flex_keys_loop(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dk_at, dv_at, scale, N,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys."""
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    columns, rows = tl.arange(0, D), tl.arange(0, ROWS)
    own = keys[:, None] * D + columns[None, :]
    k, v = tl.load(k_at + own), tl.load(v_at + own)
    dk, dv = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    for first in tl.range(0, N, ROWS):
        qt = tl.load(q_at + (first + rows)[None, :] * D + columns[:, None])
        lse = tl.load(lse_at + first + rows)
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        s = tl.dot(k, qt) * scale
        p = tl.exp2(s * 1.44269504 - lse[None, :])
        do = tl.load(do_at + (first + rows)[:, None] * D + columns[None, :])
        dv += tl.dot(p.to(do.dtype), do)
        delta = tl.load(delta_at + first + rows)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk += tl.dot(ds.to(qt.dtype), tl.trans(qt))
    tl.store(dv_at + own, dv.to(tl.bfloat16))
    tl.store(dk_at + own, (dk * scale).to(tl.bfloat16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer's loop.

    what: the kernel.
    tile: rows, keys, warps, stages.
    products: matrix products over D columns for each score.
    published: Tflop/s of the whole kernel on an H100, bf16 or fp16, without a mask, N of 2k to 16k (tritonbench PR
        2391, pytorch/benchmark PR 2443, FlashAttention-3's chart); "" where nothing is.
    """

    name: str
    what: str
    d: int
    function: Callable
    tile: tuple[int, int, int, int]
    products: int = 2
    published: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.what}{f' (published {self.published})' if self.published else ''}"


TUTORIAL, FLEX = "Triton tutorial", "FlexAttention"
FLEX_BACKWARD = {64: ((128, 64, 8, 3), (64, 128, 8, 3)), 128: ((128, 64, 8, 3), (64, 128, 8, 3)),
                 256: ((64, 64, 4, 2), (64, 64, 4, 2))}  # fmt: skip
"""d -> the tiles for dQ, and for dK and dV, that FlexAttention takes on an H100 without tuning."""

PEERS = (
    Peer(name=TUTORIAL, what="forward", d=128, function=tutorial_loop, tile=(128, 64, 8, 3), published="434-477"),
    Peer(name=FLEX, what="forward", d=128, function=flex_loop, tile=(128, 64, 8, 3), published="392-408"),
    Peer(name=TUTORIAL, what="forward", d=64, function=tutorial_loop, tile=(128, 64, 8, 3), published="396-403"),
    *(
        Peer(name=FLEX, what=what, d=d, function=function, tile=tile, products=products)
        for d, tiles in FLEX_BACKWARD.items()
        for what, function, tile, products in (
            ("backward_queries", flex_queries_loop, tiles[0], 3),
            ("backward_keys", flex_keys_loop, tiles[1], 4),
        )
    ),
)


def compiled_peer(peer: Peer, capability: int):
    """Triton's compiled kernel of a peer's loop."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows, keys, warps, stages = peer.tile
    constants = {"D": peer.d, "ROWS": rows, "KEYS": keys}
    signature = {
        name: "constexpr" if name in constants else _TYPES.get(name, "*bf16") for name in peer.function.arg_names
    }
    pointers = [place for place, name in enumerate(peer.function.arg_names) if name.endswith("_at")]
    source = ASTSource(
        fn=peer.function,
        signature=signature,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


_TYPES = {"scale": "fp32", "N": "i32", "lse_at": "*fp32", "delta_at": "*fp32"}
"""Of parameters that are no tensors in bfloat16."""
