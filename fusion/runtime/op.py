"""`torch.ops.fusion.attention` and its gradient: one attention, fully described by its arguments. `_OPERATORS` has the
schemas.

`attention_forward` is used where gradients are needed: it also returns a few numbers per query row
(`fusion.ir.results.statistics_shape`), the only values that are saved for the backward. `attention` computes them in
its backward. `attention_outputs` adds the auxiliary outputs of its spec (weights, or functions of them); gradients that
arrive at these go through `attention_outputs_backward`. Backwards return one gradient per operand that `needs` marks.
`attention_derivative` covers all other derivatives of autograd and `torch.func` (`fusion.runtime.derivatives`).
`attention_below_autograd` is `attention` in graphs whose gradients were traced: it spends no time in torch's Python
code that looks for them (some 20 us).

`spec` is `AttentionSpec.to_json()`, so that graphs, caches and other processes have everything that a kernel is built
from; `emitter` is a `fusion.ir.request.Request` as text. Operands may have any strides (the op is tagged so that
Inductor copies nothing). `tile_map` reads the data of a mask once for all attentions that have it
(`fusion.ir.tile_map`), `table` checks the positions that K and V are read at (`fusion.runtime.op`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.errors import OperandError
from fusion.ir import AttentionSpec, results
from fusion.ir.tile_map import MapSpec
from fusion.runtime import derivatives, kernels, vmap_rules
from fusion.runtime.tile_map_op import tile_map
from fusion.torch_private.operators import assert_async, register_fake


def table(positions: Tensor, extent: int, dim: int, operation: str) -> Tensor:
    """A table of positions, checked and normalised for attentions that read through it: `positions`, within [0,
    extent), of which negative ones are counted from the end. operation: "index", which admits negative ones,
    "index_select" or "gather", which do not. Raises IndexError or RuntimeError, as it does.

    Kernels check no bounds. They read through a copy of the table in which all positions are known to lie within their
    dimension. A position outside of it raises the error of eager mode, because the operation that was replaced is run
    on a tensor of that extent without data. On a GPU eager mode's operations stop the device at such a position,
    without the host waiting for it, and so does this one.
    """
    least = -extent if operation == "index" else 0
    if positions.device.type != "cpu":
        assert_async(((positions >= least) & (positions < extent)).all(), "index out of bounds")
        return torch.where(positions < 0, positions + extent, positions)
    if not positions.numel():
        return positions.clone()
    low, high = (int(end) for end in positions.aminmax())
    if low < least or high >= extent:
        _run(positions, extent, dim, operation)
        raise IndexError(
            f"index {low if low < least else high} is out of bounds for dimension {dim} with size {extent}"
        )
    return positions.clone() if low >= 0 else torch.where(positions < 0, positions + extent, positions)


def _run(positions: Tensor, extent: int, dim: int, operation: str) -> None:
    """The operation on a tensor without data, along the same dimension."""
    nothing = torch.zeros((), dtype=torch.float32, device=positions.device)
    if operation == "index":
        nothing.expand(*[1] * dim, extent)[(*[slice(None)] * dim, positions)]
    elif operation == "index_select":
        nothing.expand(*[1] * dim, extent).index_select(dim, positions.flatten())
    else:
        rank = max(positions.dim(), dim + 1)
        at = positions.flatten().view([-1 if k == dim else 1 for k in range(rank)]).to(torch.int64)
        nothing.expand([extent if k == dim else 1 for k in range(rank)]).gather(dim, at)


VERSION = 18
"""To be raised with every change of what the ops return, or of their callers: Inductor's caches are keyed by it."""


def _fake_tile_map(operands: Sequence[Tensor], sizes: Sequence[int], spec: str) -> Tensor:
    parsed = MapSpec.from_json(spec)
    return operands[0].new_empty(parsed.shape(dict(zip(parsed.sizes, sizes, strict=True))), dtype=torch.int32)


def _fake(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> Tensor:
    """Empty result. Raises if operands have other dtypes than the spec: kernels do not check dtypes, and would read
    beyond the operands' memory."""
    parsed = AttentionSpec.from_json(spec)
    for tensor, operand in zip(operands, parsed.operands, strict=True):
        if tensor.dtype is not operand.torch_dtype:
            raise OperandError(
                f"{operand.name} of {parsed} is {str(tensor.dtype).removeprefix('torch.')}, and its kernel reads "
                f"{operand.dtype}: another part of the compiler has changed the graph since it was found"
            )
    return results.empty_result(parsed, 0, operands[0], sizes)


def _fake_forward(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> tuple[Tensor, Tensor]:
    out = _fake(operands, sizes, spec, emitter)
    parsed = AttentionSpec.from_json(spec)
    return out, operands[0].new_empty(results.statistics_shape(parsed, sizes), dtype=results.statistics_dtype(operands))


def _fake_outputs(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> list[Tensor]:
    parsed = AttentionSpec.from_json(spec)
    aux_outputs = (results.empty_result(parsed, 1 + k, operands[0], sizes) for k in range(len(parsed.aux_outputs)))
    return [*_fake_forward(operands, sizes, spec, emitter), *aux_outputs]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    *_, operands, _, spec, _, needs = arguments
    places = zip(operands, AttentionSpec.from_json(spec).operands, strict=True)
    return [results.empty_gradient(*place) for place in itertools.compress(places, needs)]


def _save_outputs(ctx: Any, arguments: Sequence[Any], result: Sequence[Tensor]) -> None:
    operands, *ctx.described = arguments
    out, statistics, *aux_outputs = result
    ctx.aux_outputs = [(f.shape, f.dtype) for f in aux_outputs]
    ctx.save_for_backward(out, statistics, *operands)
    ctx.mark_non_differentiable(statistics)


def _differentiate_outputs(ctx: Any, grad: Tensor | None, _: Tensor | None, *aux_outputs: Tensor | None) -> list[Any]:
    out, statistics, *operands = ctx.saved_tensors
    if all(g is None for g in aux_outputs):
        return _gradients(ctx, grad, out, statistics, operands)
    grad = torch.zeros_like(out) if grad is None else grad
    filled = [
        out.new_zeros((), dtype=dtype).expand(shape) if g is None else g
        for g, (shape, dtype) in zip(aux_outputs, ctx.aux_outputs, strict=True)
    ]
    needs = _needs(ctx, operands)
    given = grad, filled, out, statistics, operands, *ctx.described, needs
    result = iter(torch.ops.fusion.attention_outputs_backward(*given))
    return [next(result) if needed else None for needed in needs]


def _needs(ctx: Any, operands: Sequence[Tensor]) -> list[bool]:
    asked = ctx.needs_input_grad[1:]  # the first says how the operator was called
    return [bool(n) and o.is_floating_point() for n, o in zip(asked, operands, strict=True)]


def _save_operands(ctx: Any, arguments: Sequence[Any], result: Tensor) -> None:
    operands, *ctx.described = arguments
    ctx.save_for_backward(*operands)


def _recompute_and_differentiate(ctx: Any, grad: Tensor | None) -> list[Tensor | None]:
    operands = list(ctx.saved_tensors)
    with torch.no_grad():
        out, statistics = torch.ops.fusion.attention_forward(operands, *ctx.described)
    return _gradients(ctx, grad, out, statistics, operands)


def _gradients(
    ctx: Any, grad: Tensor | None, out: Tensor, statistics: Tensor, operands: list[Tensor]
) -> list[Tensor | None]:
    """One gradient or None per operand."""
    if grad is None:
        return [None] * len(operands)
    needs = _needs(ctx, operands)
    result = iter(torch.ops.fusion.attention_backward(grad, out, statistics, operands, *ctx.described, needs))
    return [next(result) if needed else None for needed in needs]


def _save_count(ctx: Any, arguments: Sequence[Any], result: Tensor) -> None:
    ctx.count = len(arguments[0])
    ctx.mark_non_differentiable(result)


def _differentiate_derivative(describe: Callable[[Sequence[Any]], derivatives.Function], ctx: Any, *arriving: Any):
    """Gradient formula of an operator that is a derivative itself."""
    tensors = ctx.saved_tensors
    return derivatives.gradients(
        describe(ctx.call.arguments_with(tensors)), tensors, arriving, ctx.needs_input_grad[1:]
    )


_ATTENTION = "(Tensor[] operands, SymInt[] sizes, str spec, str emitter)"
_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "attention": (f"{_ATTENTION} -> Tensor", _fake),
    "attention_below_autograd": (f"{_ATTENTION} -> Tensor", _fake),
    "attention_forward": (f"{_ATTENTION} -> (Tensor, Tensor)", _fake_forward),
    "attention_backward": (
        "(Tensor grad, Tensor out, Tensor statistics, Tensor[] operands, SymInt[] sizes, str spec, str emitter, "
        "bool[] needs) -> Tensor[]",
        _fake_backward,
    ),
    "attention_outputs": (f"{_ATTENTION} -> Tensor[]", _fake_outputs),
    "attention_outputs_backward": (
        "(Tensor grad, Tensor[] aux_outputs, Tensor out, Tensor statistics, Tensor[] operands, SymInt[] sizes, "
        "str spec, str emitter, bool[] needs) -> Tensor[]",
        _fake_backward,
    ),
    "attention_derivative": (
        "(Tensor[] inputs, SymInt[] sizes, str spec, str emitter, str steps) -> Tensor[]",
        derivatives.fake,
    ),
    "tile_map": ("(Tensor[] operands, SymInt[] sizes, str spec) -> Tensor", _fake_tile_map),
    "table": (
        "(Tensor positions, SymInt extent, int dim, str operation) -> Tensor",
        lambda positions, extent, dim, operation: positions.new_empty(positions.shape),
    ),
}
"""By name: the schema, and the shapes of what it returns."""
_RUN = {
    **{name: kernels.implementation(name) for name in kernels.OF_OPERATORS},
    "attention_derivative": derivatives.execute,
    "tile_map": tile_map,
    "table": table,
}

_library = torch.library.Library("fusion", "DEF")
for _name, (_schema, _shapes) in _OPERATORS.items():
    _waits = (torch.Tag.cudagraph_unsafe,) if _name == "attention_outputs_backward" else ()  # `kernels`: are they zero
    _library.define(_name + _schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag, *_waits))
    register_fake(_library, f"fusion::{_name}", _shapes, __file__)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _RUN[_name], _key)
_library.impl("attention_below_autograd", torch.library.fallthrough_kernel, "Autograd")
derivatives.register(_library, "attention", _recompute_and_differentiate, _save_operands, derivatives.of_attention)
for _name in ("attention_forward", "attention_outputs"):
    derivatives.register(_library, _name, _differentiate_outputs, _save_outputs, derivatives.of_attention)
for _name, _describe in (
    ("attention_backward", derivatives.of_backward),
    ("attention_outputs_backward", derivatives.of_outputs_backward),
    ("attention_derivative", derivatives.of_derivative),
):
    _again = functools.partial(_differentiate_derivative, _describe)
    derivatives.register(
        _library, _name, _again, lambda ctx, given, _: ctx.save_for_backward(*derivatives.flat(given)), _describe
    )
derivatives.register(_library, "tile_map", lambda ctx, grad: [None] * ctx.count, _save_count)
for _name in _OPERATORS:
    if _name.startswith("attention") and _name != "attention_below_autograd":
        vmap_rules.register(_library, _name)
vmap_rules.register(_library, "tile_map", vmap_rules.tile_map)
vmap_rules.register_table(_library)
