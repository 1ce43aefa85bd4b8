"""Where training on CPUs is left to the inner compiler: attention in float32 whose scores stay in a cache.

Kernels compute scores again in the backward, and where a bias is trained write as many gradients as Inductor's code
does, which stores the scores: for little, where they are few. The limits are where a step of either takes as long,
forward and backward: `python benchmarks/train_cpu.py --lengths 16 32 64 128 256`, and by hand d = 32 and 128, up to
192 heads, and without AMX. In half precision kernels are kept. They are as fast or faster, but for a trained bias with
many heads: a step takes 1.3 times as long in bfloat16 at N = 16, and 1.6 times in float16 (1.2 at 64). Where heads are
mixed there are kernels for the forward alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.ir import AttentionSpec
from fusion.ir.expr import coordinates, loads
from fusion.ir.reads import is_shift_free
from fusion.ir.sizes import size_function
from fusion.machine import Machine

PAYS = {True: (136, 320), False: (144, 448)}
"""Rows and keys (the root of their product) from which on kernels are as fast, with AMX and without; the second where a
bias for each row and key is trained."""
PAYS_BY_DISTANCE = 48
"""The same where what is trained is a bias for each distance between row and key, whose gradients the inner compiler's
code adds up element by element: measured without AMX, 4 to 64 heads of 32 and 64 columns."""

OF_MIXED_HEADS = (
    "gradients of heads that are mixed come from the reference interpreter, in float32, which is predicted to take "
    "longer than storing scores in half precision"
)
"""Measured: 0.5 to 0.95 of the inner compiler's speed in bfloat16, in float32 1.05 to 1.6 times (4 to 16 heads, 64 to
1024 keys)."""


def short(spec: AttentionSpec, sizes: Sequence[int], machine: Machine) -> str | None:
    """Why a call with these sizes is left to the inner compiler in training, or None."""
    if any(operand.dtype not in ("float32", "bool", "int32", "int64") for operand in spec.operands):
        return OF_MIXED_HEADS if spec.mixing is not None else None
    n_q, n_k = size_function((spec.n_q, spec.n_k), spec.sizes)(sizes)
    pairs = (load for load in loads(spec.score) if {"i", "j"} <= coordinates(load))
    trained = [load for load in pairs if spec.operands[load.operand].order]  # what has a gradient states its order
    by_distance = trained and all(map(is_shift_free, trained))
    least = PAYS_BY_DISTANCE if by_distance else PAYS["amx_bf16" in machine.isa][bool(trained)]
    if not 0 < n_q * n_k < least**2:
        return None
    return (
        f"in training, storing {n_q} x {n_k} scores is predicted to take less than computing them again, which pays "
        f"from about {least} x {least} on"
    )
