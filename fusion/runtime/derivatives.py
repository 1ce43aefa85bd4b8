"""`fusion::attention_derivative`: tangents, and derivatives of gradients, none of which have an operator of their own.

    attention_derivative(Tensor[] inputs, SymInt[] sizes, str spec, str emitter, str steps) -> Tensor[]

`steps` names the derivative of the attention (`fusion.ir.derivative`). Kernels compute the tangents of most attentions
(`tangent_by_kernels`), the reference interpreter the rest, a block of rows at a time. Every differentiable operator of
fusion is itself such a derivative (the attention that of no steps, its backward that of one), so each derivative that
autograd asks for adds one step, to any order.

With weights p = softmax(x) of scores x = a q k + (terms without tangent), and tangents written with a dot,

    out. = sum over j of p[j] v.[j]  +  sum over j of p[j] (x.[j] - mean of x.) v[j],    x.[j] = a (q. k[j] + q k.[j])

The second sum is the gradient of the queries of an attention with equal weights, whose factors stand side by side:

    queries [q | 0], keys [k | v], values [k | k.], and [q. | q] arrives at its output

of which the columns beside v are used. The columns beside 0 must be finite, and far from overflow. The values' forward,
which the backward needs, takes v. along. A row's gradients add up to 0, as the derivation needs, for the specs of
`adds_up_to_zero`.

`register` gives operators their gradients. Functions of `torch.library.register_autograd` refuse to run inside of
torch.func.grad and similar transforms; these record themselves on the level at which they are called, as operators
written in C++ do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.codegen.reference.derivatives import derivative
from fusion.codegen.reference.forward import Execution
from fusion.ir import AttentionSpec, Normalizer, Operand, Output, results
from fusion.ir.derivative import Gradients, Step, Tangents, from_text, signature, to_text
from fusion.ir.expr import C, E, I, J, const, loads
from fusion.ir.records import expressions
from fusion.ir.request import Request
from fusion.ir.results import result_names, size_of
from fusion.lowering.gradients import adds_up_to_zero
from fusion.runtime.kernels import backward_of, differentiable
from fusion.torch_private import autograd
from fusion.torch_private.operators import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Function that a call of an operator computes, as a derivative. inputs: the positions of the derivative's inputs
    among the tensors of the call. results: likewise."""

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    sizes: Sequence[int]
    spec: str
    emitter: str
    steps: tuple[Step, ...]


def of_attention(arguments: Sequence[Any]) -> Function:
    """`fusion::attention`, `attention_forward` and `attention_outputs`, whose second result has no derivative."""
    operands, sizes, spec, emitter = arguments
    aux_outputs = range(2, 2 + len(AttentionSpec.from_json(spec).aux_outputs))
    inputs = tuple(range(len(operands)))
    return Function(inputs=inputs, results=(0, *aux_outputs), sizes=sizes, spec=spec, emitter=emitter, steps=())


def of_backward(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_backward`. Its output and statistics follow from the operands, and are no inputs."""
    grad, *rest = arguments
    return of_outputs_backward((grad, [], *rest))


def of_outputs_backward(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_outputs_backward`."""
    _, aux_outputs, _, _, operands, sizes, spec, emitter, needs = arguments
    first, count = 1 + len(aux_outputs) + 2, len(operands)
    given = [k <= len(aux_outputs) for k in range(1 + len(AttentionSpec.from_json(spec).aux_outputs))]
    return Function(
        inputs=(*range(first, first + count), *range(1 + len(aux_outputs))),
        results=tuple(range(sum(needs))),
        sizes=sizes,
        spec=spec,
        emitter=emitter,
        steps=(Gradients(tuple(map(bool, needs)), tuple(given)),),
    )


def of_derivative(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_derivative`."""
    inputs, sizes, spec, emitter, text = arguments
    steps = from_text(text)
    count = len(signature(AttentionSpec.from_json(spec), steps)[1])
    places = tuple(range(len(inputs))), tuple(range(count))
    return Function(inputs=places[0], results=places[1], sizes=sizes, spec=spec, emitter=emitter, steps=steps)


def tangents(function: Function, tensors: Sequence[Tensor], moving: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Tangent of each result of a call. tensors, moving: the tensors of the call, and their tangents."""
    inputs, given = [tensors[k] for k in function.inputs], [moving[k] for k in function.inputs]
    step = Tangents(tuple(t is not None for t in given))
    return dict(zip(function.results, _call(function, step, inputs, given), strict=True))


def gradients(
    function: Function, tensors: Sequence[Tensor], arriving: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradient of each tensor of a call that needs one. arriving: the gradients of its results."""
    inputs, given = [tensors[k] for k in function.inputs], [arriving[k] for k in function.results]
    marks = tuple(needs[k] and tensors[k].is_floating_point() for k in function.inputs)
    result: list[Tensor | None] = [None] * len(tensors)
    if any(marks) and any(g is not None for g in given):
        step = Gradients(marks, tuple(g is not None for g in given))
        places = [k for k, mark in zip(function.inputs, marks, strict=True) if mark]
        for place, gradient in zip(places, _call(function, step, inputs, given), strict=True):
            result[place] = gradient
    return result


def _call(function: Function, step: Step, inputs: list[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    every = [*inputs, *(t for t in given if t is not None)]
    steps = to_text((*function.steps, step))
    return torch.ops.fusion.attention_derivative(every, function.sizes, function.spec, function.emitter, steps)


def execute(inputs: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str, steps: str) -> list[Tensor]:
    """`fusion::attention_derivative`."""
    parsed, promised = AttentionSpec.from_json(spec), fake(inputs, sizes, spec, emitter, steps)
    (first, *aux_outputs), device, fast = from_text(steps), inputs[0].device.type, None
    if isinstance(first, Tangents) and not aux_outputs and have_tangent_kernels(parsed, first.inputs, emitter, device):
        fast = tangent_by_kernels(parsed, first, inputs, sizes, emitter)
    every = derivative(parsed, (first, *aux_outputs), inputs, sizes) if fast is None else [fast]
    return [memory.copy_(value) for memory, value in zip(promised, every, strict=True)]


def fake(inputs: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str, steps: str) -> list[Tensor]:
    """Empty results, each with the layout of the operand's gradient or of the result that it belongs to."""
    parsed = AttentionSpec.from_json(spec)
    return [
        results.empty_gradient(inputs[place.number], parsed.operands[place.number])
        if place.is_operand
        else results.empty_result(parsed, place.number, inputs[0], sizes)
        for place in signature(parsed, from_text(steps))[1]
    ]


_QKV = range(3)

LARGEST = 2.0**100
"""Magnitude of K, V and the tangent of K up to which sums of their products with weights stay finite."""


@functools.lru_cache(maxsize=1024)
def have_tangent_kernels(spec: AttentionSpec, moving: tuple[bool, ...], emitter: str, device: str) -> bool:
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


def tangent_by_kernels(
    spec: AttentionSpec, step: Tangents, inputs: Sequence[Tensor], sizes: Sequence[int], emitter: str
) -> Tensor | None:
    """Tangent of the output where `have_tangent_kernels`; None where operands are very large or not finite. inputs:
    operands, and the tangents of those of Q, K and V that `step` marks."""
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
    names, dtype = tuple(result_names(spec)), str(computed).removeprefix("torch.")
    plain = tuple(Operand(dtype=dtype, rank=len(names), name=name) for name in "qkv")
    return replace(
        spec, operands=(*plain, *spec.operands[3:]), q=(*spec.axes, I, C), k=(*spec.axes, J, C), v=(*spec.axes, J, E),
        d=const(d), d_v=const(d_v), k_value=None, v_value=None, n_k_total=None,
        dtype=dtype, out_dtype="float32", output=Output(dims=names, order=names),
    ).to_json()  # fmt: skip


Setup = Callable[[Any, Sequence[Any], Any], None]
"""(ctx, the operator's arguments, its result) -> None; saves what the backward needs."""

Backward = Callable[..., Sequence[Tensor | None]]
"""(ctx, *gradients of the results) -> the gradient of each tensor among the arguments, lists laid end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of an operator without its tensors. `counts`: the number of tensors in each argument, None for other
    arguments; `modes`: whether gradients are recorded, and whether tangents are propagated."""

    keys: Any
    modes: tuple[bool, bool]
    arguments: tuple[Any, ...]
    counts: tuple[int | None, ...]

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        left = iter(tensors)
        return [
            given if count is None else [next(left) for _ in range(count)] if isinstance(given, list) else next(left)
            for given, count in zip(self.arguments, self.counts, strict=True)
        ]

    @contextlib.contextmanager
    def in_modes(self) -> Iterator[None]:
        """Restore the modes of the call, which `apply` has ended, for levels of torch.func below its own as well."""
        recording, moving = self.modes
        with torch.set_grad_enabled(recording), autograd.carrying_tangents(moving):
            yield


def _count(argument: Any) -> int | None:
    if isinstance(argument, Tensor):
        return 1
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0 and isinstance(argument[0], Tensor)
    return len(argument) if is_list else None


def flat(arguments: Sequence[Any]) -> list[Tensor]:
    listed = [a if isinstance(a, (list, tuple)) else [a] for a in arguments if _count(a) is not None]
    return [tensor for part in listed for tensor in part]


Derivative = Callable[[Sequence[Any]], Function]
"""Choice of the derivative of an attention that a call with these arguments is."""


def register(
    library: torch.library.Library, name: str, backward: Backward, setup: Setup, derivative: Derivative | None = None
) -> None:
    """Register the gradient of the operator `name` of `library`; with `derivative` its tangents, too."""
    op = getattr(torch.ops.fusion, name).default
    recorded = _recorded(op, name, backward, setup, derivative)

    def kernel(keys: Any, *arguments: Any) -> Any:
        tensors = flat(arguments)
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        carrying = derivative is not None and autograd.carries_tangents()
        if not recording and not (carrying and any(autograd.unpack_dual(t)[1] is not None for t in tensors)):
            return autograd.below(op, keys, arguments)
        counts = tuple(_count(a) for a in arguments)
        described = zip(arguments, counts, strict=True)
        structure = (a if n is None else [] if isinstance(a, (list, tuple)) else None for a, n in described)
        modes = torch.is_grad_enabled(), autograd.carries_tangents()
        call = _Call(keys=keys, modes=modes, arguments=tuple(structure), counts=counts)
        result = autograd.recorded_here(recorded, call, *tensors)
        return list(result) if isinstance(schema(op).returns[0].type, torch.ListType) else result

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _recorded(op: Any, name: str, backward: Backward, setup: Setup, derivative: Derivative | None) -> Any:
    """Autograd node of an operator: a function on one level of torch.func, as torch itself creates one for each level
    of a `torch.autograd.Function`, which refuses to run there for want of a `setup_context`."""

    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        arguments = call.arguments_with(tensors)
        with call.in_modes():
            result = autograd.below(op, call.keys, arguments)
        setup(ctx, arguments, result)
        ctx.call, ctx.results = call, None if isinstance(result, Tensor) else len(result)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(result) if isinstance(result, list) else result

    def move(ctx: Any, _: None, *moving: Tensor | None) -> Any:
        assert derivative is not None
        with ctx.call.in_modes():
            tensors = [autograd.unpack_dual(x)[0] for x in ctx.saved_tensors]
            tangent_of = tangents(derivative(ctx.call.arguments_with(tensors)), tensors, moving)
        return tangent_of[0] if ctx.results is None else tuple(map(tangent_of.get, range(ctx.results)))

    parts = {"forward": forward, "backward": lambda ctx, *gradients: (None, *backward(ctx, *gradients))}
    parts |= {"jvp": move} if derivative else {}
    own = {key: staticmethod(part) for key, part in parts.items()}
    return type(f"{name}_gradient", (autograd.SingleLevelFunction,), own)
