"""Tangents of an attention by the kernels that compute it and its gradients.

With weights p = softmax(x) of scores x = a q k + (terms without tangent), and tangents written with a dot,

    out. = sum over j of p[j] v.[j]  +  sum over j of p[j] (x.[j] - mean of x.) v[j],    x.[j] = a (q. k[j] + q k.[j])

The second sum is the gradient of the queries of an attention with equal weights, whose factors stand side by side:

    queries [q | 0], keys [k | v], values [k | k.], and [q. | q] arrives at its output

of which the columns beside v are used. The columns beside 0 must be finite, and far from overflow. The values' forward,
which the backward needs, takes v. along. A row's gradients add up to 0, as the derivation needs, for the specs of
`adds_up_to_zero`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.codegen.reference.forward import Execution
from fusion.ir import AttentionSpec, Normalizer, Operand, Output
from fusion.ir.derivative import Tangents
from fusion.ir.expr import C, E, I, J, const, coord, loads
from fusion.ir.records import expressions
from fusion.ir.request import Request
from fusion.ir.results import result_names, size_of
from fusion.lowering.gradients import adds_up_to_zero
from fusion.runtime.executor import backward_of
from fusion.runtime.kernels import differentiable

_QKV = range(3)

LARGEST = 2.0**100
"""Magnitude of K, V and the tangent of K up to which sums of their products with weights stay finite."""


@functools.lru_cache(maxsize=1024)
def have_kernels(spec: AttentionSpec, moving: tuple[bool, ...], emitter: str, device: str) -> bool:
    """Whether kernels compute the tangent of an attention, for ordinary operands. moving: operands that have one."""
    read = {part.operand for part in loads(spec.score, *expressions(spec.mask))}
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
    """Tangent of the output where `have_kernels`; None where operands are very large or not finite. inputs: operands,
    and the tangents of those of Q, K and V that `step` marks."""
    count, given = len(spec.operands), iter(inputs[len(spec.operands) :])
    operands, rest = list(inputs[:count]), inputs[len(_QKV) : count]
    # bfloat16 as it is multiplied in gradients, too; float16 could overflow
    dtype = torch.bfloat16 if all(operands[n].dtype is torch.bfloat16 for n in _QKV) else torch.float32
    run = Execution(spec, operands, sizes, dtype)
    q, k, v = run.gathered()
    of_q, of_k, of_v = (_gathered(run, n, next(given)) if step.inputs[n] else None for n in _QKV)
    if not q.numel() or not k.numel() or not all(size_of(x) < LARGEST for x in _there(k, v, of_k)):
        return None
    exact = str(replace(Request.parse(emitter), approximation=None))
    arriving, values = _there(of_q, None if of_k is None else q), _there(None if of_q is None else k, of_k)
    width = run.d * len(values)
    wide = _between(spec, dtype, run.d, width + (0 if of_v is None else run.d_v))
    every = torch.cat([*values, *_there(of_v)], -1)
    out, statistics = differentiable(wide, q.device.type, exact).outputs([q, k, every, *rest], sizes)
    result = torch.zeros((), dtype=torch.float32) if of_v is None else out[..., width:]
    if values:
        paired = _between(spec, dtype, run.d + run.d_v, width)
        operands = [F.pad(q, (0, run.d_v)), torch.cat([k, v], -1), torch.cat(values, -1), *rest]
        given = torch.cat(arriving, -1).float(), out[..., :width], statistics, operands, sizes
        backward = backward_of(paired, q.device.type, exact)
        (of_queries,) = backward(*given, [n == 0 for n in range(count)])
        result = result + of_queries[..., run.d :]
    names = result_names(spec)
    return result.permute([names.index(name) for name in spec.output.dims])


def _there(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _gathered(run: Execution, number: int, tensor: Tensor) -> Tensor:
    """A tangent of Q, K or V as these are gathered."""
    operands = [*run.operands[:number], tensor, *run.operands[number + 1 :]]
    return Execution(run.spec, operands, tuple(run.sizes.values()), run.dtype).gather(number)


@functools.lru_cache(maxsize=1024)
def _between(spec: AttentionSpec, computed: torch.dtype, d: int, d_v: int) -> str:
    """Spec of an equal attention of Q [b.., i, c], K [b.., j, c] and V [b.., j, e] in this dtype, with a float32
    output."""
    batch = tuple(coord(f"b{axis}") for axis in range(len(spec.batch)))
    names, dtype = tuple(result_names(spec)), str(computed).removeprefix("torch.")
    plain = tuple(Operand(dtype=dtype, rank=len(names), name=name) for name in "qkv")
    return replace(
        spec, operands=(*plain, *spec.operands[3:]), q=(*batch, I, C), k=(*batch, J, C), v=(*batch, J, E),
        d=const(d), d_v=const(d_v), k_value=None, v_value=None, n_k_total=None,
        dtype=dtype, out_dtype="float32", output=Output(dims=names, order=names),
    ).to_json()  # fmt: skip
