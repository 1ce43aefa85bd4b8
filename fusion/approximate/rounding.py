"""Attention whose float32 products are computed in two bfloat16 planes instead of three: half of the tile products.

Exact attention on AMX tiles splits a float32 number into three bf16 numbers, and multiplies six pairs of them. Two
represent a number to 2^-17 of itself, and of their four products three are computed; the fourth is at most 2^-16 of the
product. So

    |error of a score| <= (2 * 2^-17 + 2^-16) * sum over c of |q_c k_c| <= TWO_PLANES * |q| |k|

A score that is off by t has a weight that is off by exp(t) - 1 of itself. The products of weights and values are
rounded in the same way, relative to their sum. All of this is known from the largest norms, before the kernel runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch import Tensor

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine

TWO_PLANES = 2.0**-15 * (1 + 2.0**-6)
"""Error of a product of two float32 numbers in two planes each, relative to their sizes, second order included."""
LARGE = 2.0**60
"""Norms up to which the parts of numbers below 2**-126, which tiles take for 0, add up to nothing in a score."""


def error_of(largest: float) -> float:
    """A bound on sum over j |error of w_ij| / sum over j w_ij where |q_i| |k_j| scale is at most `largest`, including
    the rounding of the products with V."""
    return math.expm1(TWO_PLANES * largest) + TWO_PLANES if largest < 1e4 else math.inf


class TwoPlanes:
    """Exact kernel of a spec on two planes; for specs that `admits` accepts."""

    def __init__(self, spec: AttentionSpec, one_by_one: AttentionSpec, scale: float, machine: Machine):
        """one_by_one: an equal attention over heads as plain tensors (of `ExactHeads`)."""
        from fusion.codegen.mlir.launch import Kernel
        from fusion.planning.cpu_planner import CpuPlanner
        from fusion.planning.register_tiles import target_of, tilings_for

        self.scale, target = scale, target_of(machine)

        def kernel(spec: AttentionSpec) -> Kernel:
            return Kernel(spec, tilings_for(spec, target, most_planes=2), target, CpuPlanner(spec, machine))

        self._whole = functools.cache(lambda: kernel(spec))
        self._some = functools.cache(lambda: kernel(one_by_one))

    @staticmethod
    def admits(spec: AttentionSpec, machine: Machine) -> bool:
        """Whether products of this spec take three planes."""
        from fusion.planning.register_tiles import target_of, tilings_for

        return tilings_for(spec, target_of(machine))[0].planes == 3

    def errors(self, queries: Sequence[float], keys: Sequence[float]) -> list[float]:
        """`error_of` of heads with queries and keys up to these norms."""
        scale, pairs = abs(self.scale), zip(queries, keys, strict=True)
        return [error_of(q * k * scale) if max(q, k, scale) < LARGE else math.inf for q, k in pairs]

    @staticmethod
    def limit(epsilon: float) -> float:
        """Scores up to which `error_of` may be at most epsilon."""
        return math.log1p(epsilon) / TWO_PLANES

    def whole(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """All heads of a call, in the layout of the spec."""
        return self._whole()(operands, sizes)

    def some(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """[h, N_q, d], [h, N_k, d], [h, N_k, d_v] to [h, N_q, d_v]. sizes: those of the call."""
        return self._some()([q, k, v], [*sizes, len(q)])
