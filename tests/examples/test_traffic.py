"""The model put on the FlashAttention paper's own measurement (2205.14135, Fig. 2 left).

GPT-2 medium on an A100: 16 heads, d = 64, N = 1024, batch 64, fp16, forward and backward with mask and dropout:
40.3 GB moved by standard attention, 4.4 GB by FlashAttention. Nothing below is fitted to these two numbers.
"""

import pytest

from examples.io_model import counts, schedule
from examples.io_model.schedule import sizes_of
from examples.io_model.tiles import least_io
from fusion.machine import MIB, machine
from fusion.planning.problem import Problem

GPT2 = Problem(n_q=1024, n_k=1024, d=64, d_v=64, batch=64, heads=16, heads_kv=16, dtype="float16")
BYTES = GPT2.problems * GPT2.element_bytes


def test_standard_attention_moves_forty_gigabytes():
    """Matrix products, softmax and its derivative as the materialised schedules count them, plus the pointwise kernels.

    Traffic to HBM is asked for, so the fast memory is a core's share of L2, in which the operands of one head fit.
    """
    capacity = machine("a100").level("L2").capacity // machine("a100").cores // GPT2.element_bytes
    moved = 0.0
    for name in ("materialized", "backward_materialized"):
        tile = least_io(schedule(name), GPT2, capacity)
        moved += float(counts(name, sizes_of(GPT2, capacity), tile).io)
    pairs = GPT2.n_q * GPT2.n_k
    mask = 2 * pairs  # scores in, masked scores out; the mask itself is shared by all heads
    dropout = 2.5 * pairs  # weights in, dropped weights out, one byte (half an element) of keep-mask
    moved += 2 * (mask + dropout)  # forward, and the same again on the gradients
    assert moved == pytest.approx(20 * pairs, rel=0.07)  # twenty passes over N x N, and the operands
    assert moved * BYTES == pytest.approx(40.3e9, rel=0.25)


def test_flash_attention_moves_four_gigabytes():
    """Alg. 1 and Alg. 4 with the paper's own B_c = ceil(M / 4d), M being the A100's 192 KiB a core.

    Mask and dropout cost no traffic: they are computed in the tile from indices and the generator's state.
    """
    capacity = 192 * MIB // 1024 // GPT2.element_bytes
    tile = {"B_c": -(-capacity // (4 * GPT2.d)), "B_r": min(-(-capacity // (4 * GPT2.d)), GPT2.d)}
    assert tile == {"B_c": 384, "B_r": 64}
    moved = sum(float(counts(name, sizes_of(GPT2, capacity), tile).io) for name in ("key_stationary", "backward_fused"))
    assert moved * BYTES == pytest.approx(4.4e9, rel=0.25)


def test_the_nine_times_of_the_paper():
    """The ratio of the two, which the paper's abstract rounds to nine."""
    capacity = 98304
    standard = 20 * GPT2.n_q * GPT2.n_k
    tile = {"B_c": 384, "B_r": 64}
    flash = sum(float(counts(name, sizes_of(GPT2, capacity), tile).io) for name in ("key_stationary", "backward_fused"))
    assert standard / flash == pytest.approx(40.3 / 4.4, rel=0.25)
