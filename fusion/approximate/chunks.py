"""Causal attention with polynomial features on a CPU, by chunks: the state of the chunks before, exact inside of one.

All chunks of all heads go together: one call of the exact kernel with every chunk as a head of its own, one of each
feature kernel, and a running sum over the chunks' states in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion.approximate.cost import CAUSAL_CHUNK as CHUNK
from fusion.errors import ApproximationError
from fusion.ir import integers
from fusion.ir.expr import SCORE, const
from fusion.ir.ops import where
from fusion.ir.spec import AttentionSpec, Normalizer, Operand
from fusion.machine import Machine


class Chunks:
    """Chunked causal attention of a spec over heads as plain tensors (of `ExactHeads`)."""

    def __init__(self, spec: AttentionSpec, machine: Machine):
        from fusion.codegen import mlir

        assert spec.mask is not None
        length = integers.integer(CHUNK)
        mask = dataclasses.replace(spec.mask, fill=-math.inf, full=SCORE)
        inside = dataclasses.replace(
            spec, n_q=length, n_k=length, dtype="float32", out_dtype="float32", normalizer=Normalizer.SOFTMAX,
            row_scale=None, score=where(mask.live, SCORE, const(-math.inf)), mask=mask,
            operands=tuple(Operand(dtype="float32", rank=3, name=o.name) for o in spec.operands),
        )  # fmt: skip
        kernel = mlir.compile_training(inside, machine)  # for the statistics of the rows
        if kernel is None:
            raise ApproximationError(f"there is no kernel with statistics for {inside}; ask for exact attention")
        self._kernel = kernel

    def inside(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Output of exact attention within chunks, [h, CHUNK, d_v], and its normaliser, [h, CHUNK], for [h, CHUNK, d]
        operands."""
        out, (_, shift, factor) = self._kernel.outputs([q, k, v], [*sizes, len(q)])
        return out, 1 / (torch.exp2(shift) * factor.abs())  # a weight is 2**(unit * score + shift) * |factor|

    def attend(
        self, run, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """[h, N, d_v], for queries [h, N, d] and the keys [u, N, d] and values [u, N, d_v] of their owners.

        run: the feature kernels.
        weights: [h, features].
        sizes: those of the call.
        """
        heads, n, _ = q.shape
        q, k, v = (_in_chunks(x) for x in (q, k, v))
        near_k, near_v = (x if len(x) == heads else x[owner] for x in (k, v))
        out, normaliser = self.inside(q.flatten(0, 1), near_k.flatten(0, 1), near_v.flatten(0, 1), sizes)
        out, normaliser = (x.view(heads, -1, CHUNK, x.shape[-1]) for x in (out, normaliser[..., None]))
        if out.shape[1] > 1:
            # Keys of zeros that fill the last chunk are in no state that is used.
            state = run.state(k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, k.shape[:2])
            before = state[:, :-1].cumsum(1)
            before = (before if len(k) == heads else before[owner]) * weights[:, None, :, None]
            far = run.readout(q[:, 1:].flatten(0, 1), before.flatten(0, 1)).unflatten(0, (heads, -1))
            later, near = out[:, 1:], normaliser[:, 1:]
            later.mul_(near).add_(far[..., :-1]).div_(near.add_(far[..., -1:]))
        return out.flatten(1, 2)[:, :n]


def _in_chunks(x: Tensor) -> Tensor:
    """[h, N, d] as [h, chunks, CHUNK, d], with rows of zeros at the end."""
    missing = -x.shape[1] % CHUNK
    return (F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()).unflatten(1, (-1, CHUNK))
