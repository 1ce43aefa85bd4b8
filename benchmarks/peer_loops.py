"""The key loops of two peers as kernels of their own, to be compiled and put through the same model of clocks.

They are written after Triton's tutorial 06 (fused attention) and FlexAttention's forward template (torch 2.13,
`_inductor/kernel/flex/templates`): the same operations in the same order, without what surrounds the loop.
"""

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


TUTORIAL, FLEX = "Triton tutorial", "FlexAttention"

PEERS = {
    (TUTORIAL, 128): (tutorial_loop, (128, 64, 8, 3), "434-477"),
    (FLEX, 128): (flex_loop, (128, 64, 8, 3), "392-408"),
    (TUTORIAL, 64): (tutorial_loop, (128, 64, 8, 3), "396-403"),
}
"""(name, d) -> the loop, its tile (rows, keys, warps, stages), and the published Tflop/s of the whole kernel on an
H100, bf16 or fp16, without a mask, N of 2k to 16k (tritonbench PR 2391, pytorch/benchmark PR 2443, FlashAttention-3's
chart)."""


def compiled_peer(name: str, d: int, capability: int):
    """Triton's compiled kernel of a peer's loop."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, (rows, keys, warps, stages), _ = PEERS[name, d]
    signature = dict.fromkeys(("q_at", "k_at", "v_at", "out_at"), "*bf16") | {"scale": "fp32", "N": "i32"}
    signature |= dict.fromkeys(("D", "ROWS", "KEYS"), "constexpr")
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={"D": d, "ROWS": rows, "KEYS": keys},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
