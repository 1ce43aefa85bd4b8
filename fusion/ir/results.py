"""Values of size expressions; shapes, dtypes and memory layouts of the results of an attention and of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.ir.expr import LOG_WEIGHT, ROW_MAX, ROW_SUM, Expr, walk
from fusion.ir.ops import evaluate
from fusion.ir.spec import AttentionSpec, AuxOutput, Normalizer, Operand, Reduction

REDUCE = {Reduction.SUM: torch.sum, Reduction.MAX: torch.amax, Reduction.MIN: torch.amin}
"""Reductions of auxiliary outputs over a dimension."""


def coordinate_extents(spec: AttentionSpec, sizes: Sequence[int]) -> dict[str, int | torch.SymInt]:
    """The extents of b.., i, j and e."""
    known = dict(zip(spec.sizes, sizes, strict=True))
    extents = {f"b{axis}": extent for axis, extent in enumerate(spec.batch)} | {"i": spec.n_q, "j": spec.n_k}
    return {name: size_value(extent, known) for name, extent in (extents | {"e": spec.d_v}).items()}


def statistics_shape(spec: AttentionSpec, sizes: Sequence[int]) -> list[int | torch.SymInt]:
    """[3, b.., i]: statistics of the rows for a backward; [5, b.., i] if it `keeps_ends`. [0] without a normaliser."""
    if spec.normalizer is Normalizer.NONE:
        return [0]
    known = dict(zip(spec.sizes, sizes, strict=True))
    return [5 if keeps_ends(spec) else 3, *(size_value(extent, known) for extent in (*spec.batch, spec.n_q))]


def keeps_ends(spec: AttentionSpec) -> bool:
    """Whether the program reads maximum or sum of rows beside their weights: where rows are scaled in another way, or
    in auxiliary outputs. Kernels then store both, and may not subtract another number than the maximum."""
    made_of = {ROW_MAX, ROW_SUM, LOG_WEIGHT}
    return spec.row_scale is not None or not made_of.isdisjoint(walk(*(f.value for f in spec.aux_outputs)))


def aux_shape(spec: AttentionSpec, aux: AuxOutput, sizes: Sequence[int]) -> list[int | torch.SymInt]:
    """Shape of an auxiliary output, in the order of its dimensions."""
    extents = coordinate_extents(spec, sizes)
    return [extents[name] for name in aux.dims]


def result_names(spec: AttentionSpec, aux: AuxOutput | None = None) -> list[str]:
    """Coordinates of the output in the order b.., i, e, or of an auxiliary output in the order b.., i, j."""
    names = [*(f"b{axis}" for axis in range(len(spec.batch))), "i"]
    return [*names, "e"] if aux is None else [name for name in (*names, "j") if name in aux.dims]


def statistics_dtype(operands: Sequence[Tensor]) -> torch.dtype:
    """float64 where anything is computed in it, else float32."""
    return torch.float64 if any(o.dtype is torch.float64 for o in operands) else torch.float32


def empty_result(spec: AttentionSpec, number: int, like: Tensor, sizes: Sequence[int]) -> Tensor:
    """Empty tensor for the output (number 0) or an auxiliary output of an attention."""
    if number:
        aux = spec.aux_outputs[number - 1]
        return like.new_empty(aux_shape(spec, aux, sizes), dtype=getattr(torch, aux.dtype))
    extents, order = coordinate_extents(spec, sizes), spec.output.order
    packed = like.new_empty([extents[d] for d in order], dtype=getattr(torch, spec.out_dtype))
    return packed.permute([order.index(d) for d in spec.output.dims])


def packed_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a packed tensor whose dimensions have this order in memory, the slowest first; by default their own
    order."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def output_layout(spec: AttentionSpec, extents: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output; extents: of b.., i and e."""
    names, dims = result_names(spec), spec.output.dims
    shape = tuple(extents[names.index(name)] for name in dims)
    return shape, packed_strides(shape, [dims.index(name) for name in spec.output.order])


def empty_gradient(tensor: Tensor, operand: Operand) -> Tensor:
    """Empty tensor for an operand's gradient: its shape and dtype, packed in the order that the spec states."""
    order = operand.order or tuple(range(operand.rank))
    packed = tensor.new_empty([tensor.shape[dim] for dim in order])
    return packed.permute([order.index(dim) for dim in range(operand.rank)])


def laid_out(gradient: Tensor, tensor: Tensor, operand: Operand) -> Tensor:
    """Gradient in the layout of `empty_gradient`; copied only if the layout differs: that of a dense bias is large."""
    strides = packed_strides(tensor.shape, operand.order or None)
    if gradient.dtype is tensor.dtype and gradient.stride() == strides:
        return gradient
    return empty_gradient(tensor, operand).copy_(gradient)


def no_statistics(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Statistics of a forward whose gradient needs none: zeros, in the shape that the op declares."""
    return operands[0].new_zeros(statistics_shape(spec, sizes), dtype=statistics_dtype(operands))


def size_of(tensor: Tensor) -> float:
    """Largest magnitude in a tensor, 0.0 where it is empty; expanded dimensions are read once."""
    if not tensor.numel():
        return 0.0
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(dim, 0, 1)
    return float(torch.linalg.vector_norm(tensor, torch.inf))


def is_zero(tensor: Tensor) -> bool:
    """Whether all elements are zero; a few are tested first, since one that is not decides it."""
    few = tensor
    for dim in range(tensor.dim() - 1):
        few = few.narrow(dim, 0, min(few.shape[dim], 1))
    return size_of(few) == 0 and size_of(tensor) == 0


_OPERATORS = {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}


def size_function(exprs: Sequence[Expr], names: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Function from values of `names` (sizes or coordinates) to those of the expressions; compiled, for speed."""
    texts = "".join(f"{_python(expr, list(names))}, " for expr in exprs)
    return eval(f"lambda s: ({texts})")  # the text holds integers and indices only


def extents_function(spec: AttentionSpec) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Function from values of `spec.sizes` to (batch sizes.., n_q, n_k, d, d_v)."""
    return size_function((*spec.batch, spec.n_q, spec.n_k, spec.d, spec.d_v), spec.sizes)


def _python(expr: Expr, names: list[str]) -> str:
    if expr.op == "const":
        return str(expr.integer)
    if expr.op in ("size", "coord"):
        return f"s[{names.index(expr.name)}]"
    args = [_python(arg, names) for arg in expr.args]
    if expr.op in ("imin", "imax"):
        return f"{expr.op[1:]}({', '.join(args)})"
    return f"({_OPERATORS[expr.op].join(args)})"


def size_value(expr: Expr, sizes: Mapping[str, Any]) -> Any:
    """Value of a size expression; that of a constant or of one of the sizes may be symbolic."""
    if expr.op in ("const", "size"):
        return expr.integer if expr.op == "const" else sizes[expr.name]
    return int(evaluate(expr, lambda leaf: torch.tensor(sizes[leaf.name])))


def leaves(
    sizes: Mapping[str, int],
    known: Mapping[Expr, Any],
    load: Callable[[Expr], Any] | None = None,
    device: torch.device | None = None,
) -> Callable[[Expr], Any]:
    """Leaves of `evaluate`: sizes by name, loads by a function of their own, and other known values."""

    def leaf(part: Expr) -> Any:
        if part.op == "size":
            return torch.tensor(sizes[part.name], device=device)
        return load(part) if load is not None and part.op == "load" else known[part]

    return leaf
