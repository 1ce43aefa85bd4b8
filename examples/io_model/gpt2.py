"""The measurement of the FlashAttention paper (2205.14135, Fig. 2 left), by the formulas of this model.

    python -m examples.io_model.gpt2

GPT-2 medium on an A100: 16 heads, d = 64, N = 1024, batch 64, fp16, forward and backward with mask and dropout. There
standard attention moved 40.3 GB and FlashAttention 4.4 GB. Nothing here is fitted to these two numbers.
"""

from __future__ import annotations

from examples.io_model import counts, schedule
from examples.io_model.schedule import sizes_of
from examples.io_model.tiles import least_io
from fusion.machine import KIB, machine
from fusion.planning.problem import Problem

GPT2 = Problem(n_q=1024, n_k=1024, d=64, d_v=64, batch=64, heads=16, heads_kv=16, dtype="float16")
BYTES = GPT2.problems * GPT2.element_bytes
PAIRS = GPT2.n_q * GPT2.n_k


def standard() -> float:
    """Elements of a head that standard attention moves: matrix products, softmax and its derivative as the materialised
    schedules count them, and the pointwise kernels between.

    Traffic to HBM is asked for, so the fast memory is a core's share of L2, in which the operands of one head fit.
    """
    capacity = machine("a100").level("L2").capacity // machine("a100").cores // GPT2.element_bytes
    moved = 0.0
    for name in ("materialized", "backward_materialized"):
        tile = least_io(schedule(name), GPT2, capacity)
        moved += float(counts(name, sizes_of(GPT2, capacity), tile).io)
    mask = 2 * PAIRS  # scores in, masked scores out; the mask itself is shared by all heads
    dropout = 2.5 * PAIRS  # weights in, dropped weights out, one byte (half an element) of keep-mask
    return moved + 2 * (mask + dropout)  # forward, and the same again on the gradients


def flash() -> float:
    """Elements of a head that FlashAttention moves: its Alg. 1 and 4 with its own B_c = ceil(M / 4d), M being the
    A100's 192 KiB a core. Mask and dropout cost no traffic: they are computed in the tile, from indices and the
    generator's state."""
    capacity = 192 * KIB // GPT2.element_bytes
    keys = -(-capacity // (4 * GPT2.d))
    tile = {"B_c": keys, "B_r": min(keys, GPT2.d)}
    return sum(float(counts(name, sizes_of(GPT2, capacity), tile).io) for name in ("key_stationary", "backward_fused"))


if __name__ == "__main__":
    print("GB of GPT-2 medium, forward and backward     counted  measured")
    print(f"standard attention, with mask and dropout      {standard() * BYTES / 1e9:5.1f}      40.3")
    print(f"FlashAttention                                 {flash() * BYTES / 1e9:5.1f}       4.4")
