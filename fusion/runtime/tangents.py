"""Tangents of an attention by the kernels that compute it and its gradients.

With weights p = softmax(x) of scores x = a q k + (what has no tangent), and tangents written with a dot,

    out. = sum over j of p[j] v.[j]  +  sum over j of p[j] (x.[j] - mean of x.) v[j],    x.[j] = a (q. k[j] + q k.[j])

The second sum is the gradient of the queries of an attention of the same weights, whose factors stand side by side:

    queries [q | 0], keys [k | v], values [k | k.], and [q. | q] arrives at its output

of which the columns beside v are kept. What is beside 0 must be finite. The values' forward, which the backward needs,
takes v. along. A row's gradients add up to 0, as the derivation needs, for the specs of `adds_up_to_zero`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.codegen.reference.forward import Execution
from fusion.ir import AttentionSpec, Normalizer, Operand, Output
from fusion.ir.expr import C, E, I, J, const, coord, loads
from fusion.ir.request import Request
from fusion.ir.results import result_names
from fusion.ir.steps import Tangents
from fusion.lowering.gradients import adds_up_to_zero
from fusion.runtime import executor

_QKV = range(3)


def have_kernels(spec: AttentionSpec, moving: Sequence[bool], emitter: str, device: str) -> bool:
    """Whether kernels compute the tangent of an attention, for finite operands. moving: operands that have one."""
    masked = () if spec.mask is None else spec.mask.expressions()
    read = {part.operand for part in loads(spec.score, *masked)}
    return (
        device == "cpu"  # GPUs would wait for whether operands are finite
        and Request.parse(emitter).emitter != "reference"
        and spec.normalizer in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX)
        and spec.weight is const(1.0)
        and adds_up_to_zero(spec)
        and not spec.tables
        and read.isdisjoint(_QKV)
        and not any(moving[len(_QKV) :])
        and not any(operand.dtype == "float64" for operand in spec.operands)
    )


def tangent(
    spec: AttentionSpec, step: Tangents, inputs: Sequence[Tensor], sizes: Sequence[int], emitter: str
) -> Tensor | None:
    """The tangent of the output, in float32, where `have_kernels`; None where operands are not finite.

    inputs: operands, and the tangents of those of Q, K and V that `step` marks.
    """
    count = len(spec.operands)
    operands, given = list(inputs[:count]), iter(inputs[count:])
    run = Execution(spec, operands, sizes)
    q, k, v = run.gathered()
    of_q, of_k, of_v = (_gathered(spec, n, next(given), run) if step.inputs[n] else None for n in _QKV)
    factors = [(arriving, value) for arriving, value in ((of_q, k), (q, of_k)) if None not in (arriving, value)]
    if not q.numel() or not k.numel() or not all(x.isfinite().all() for x in (k, v, of_k) if x is not None):
        return None
    exact, rest = str(replace(Request.parse(emitter), approximation=None)), operands[3:]
    values = [value for _, value in factors]
    every = torch.cat([*values, *(() if of_v is None else (of_v,))], -1)
    wide = _between(spec, (run.d, every.shape[-1])).to_json()
    out, statistics = executor.attention_forward([q, k, every, *rest], sizes, wide, exact)
    moved = out[..., out.shape[-1] - run.d_v :] if of_v is not None else torch.zeros(())
    names = result_names(spec)
    order = [names.index(name) for name in spec.output.dims]
    if not factors:
        return moved.permute(order)
    arriving, values = torch.cat([x for x, _ in factors], -1), torch.cat(values, -1)
    paired = _between(spec, (run.d + run.d_v, values.shape[-1])).to_json()
    operands = [F.pad(q, (0, run.d_v)), torch.cat([k, v], -1), values, *rest]
    needs, means = [n == 0 for n in range(count)], out[..., : values.shape[-1]]
    (found,) = executor.attention_backward(arriving, means, statistics, operands, sizes, paired, exact, needs)
    return (moved + found[..., run.d :]).permute(order)


def _gathered(spec: AttentionSpec, number: int, tensor: Tensor, run: Execution) -> Tensor:
    """A tangent of Q, K or V as these are gathered."""
    operands = [*run.operands[:number], tensor, *run.operands[number + 1 :]]
    return Execution(spec, operands, tuple(run.sizes.values())).gather(number)


def _between(spec: AttentionSpec, columns: tuple[int, int]) -> AttentionSpec:
    """The same attention of Q [b.., i, c], K [b.., j, c] and V [b.., j, e] in float32 with so many columns."""
    batch = tuple(coord(f"b{axis}") for axis in range(len(spec.batch)))
    names = tuple(result_names(spec))
    plain = tuple(Operand(dtype="float32", rank=len(names), name=name) for name in "qkv")
    return replace(
        spec, operands=(*plain, *spec.operands[3:]), q=(*batch, I, C), k=(*batch, J, C), v=(*batch, J, E),
        d=const(columns[0]), d_v=const(columns[1]), k_value=None, v_value=None, among=None,
        dtype="float32", out_dtype="float32", output=Output(dims=names, order=names),
    )  # fmt: skip
