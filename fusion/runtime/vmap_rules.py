"""Rules of `torch.vmap`, and of batches of gradients (`torch.autograd.grad(is_grads_batched=True)`, vectorized
`torch.autograd.functional`), for the operators: one call with one more batch coordinate.

Every operand, and every result, gets one more dimension, its first, and the spec one more batch coordinate, also the
first. So an operand that is shared by the batch has to be expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.ir.expr import Expr, coord, load, rebuild, size
from fusion.ir.spec import AttentionSpec, Output
from fusion.ir.tile_map import MapSpec
from fusion.torch_private.functorch import off_batch
from fusion.torch_private.operators import schema
from fusion.torch_private.tensors import tree_map

_WITH_STATISTICS = ("attention_forward", "attention_outputs")
"""Operators whose second result are statistics of rows."""


def attention(text: str) -> str:
    """Spec of a batch of attentions. Each drops weights by its own seed."""
    return batched(AttentionSpec.from_json(text)).to_json()


def tile_map(text: str) -> str:
    """Spec of a batch of tile maps."""
    return batched_map(MapSpec.from_json(text)).to_json()


def register(library: torch.library.Library, name: str, describe: Callable[[str], str] = attention) -> None:
    """Register the rule of the operator `name`. describe: from its spec to that of the batch."""
    op = getattr(torch.ops.fusion, name).default
    names = [argument.name for argument in schema(op).arguments]
    sizes, spec = names.index("sizes"), names.index("spec")

    def call(count: int, dims: Sequence[Any], arguments: Sequence[Any]) -> Any:
        described = zip(names, arguments, dims, strict=True)
        given = [_moved(a, dim, count, _place(name, a)) for name, a, dim in described]
        given[sizes], given[spec] = [*arguments[sizes], count], describe(arguments[spec])
        return op(*given)

    def rule(info: Any, dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        result = call(info.batch_size, dims, arguments)
        if name not in _WITH_STATISTICS:
            return result, 0
        _, statistics, *aux_outputs = result
        every = 0, 1 if statistics.dim() > 1 else None, *(0 for _ in aux_outputs)
        return result, every if isinstance(result, tuple) else [*every]

    def rule_of_gradients(*given: Any) -> Any:
        arguments, count, on_batch = off_batch(given)
        return on_batch(call(count, tree_map(lambda _: 0, arguments), arguments))

    torch.library.register_vmap(f"fusion::{name}", rule, lib=library)
    if name not in _WITH_STATISTICS:  # which no gradient calls
        library.impl(name, rule_of_gradients, "Batched")


def register_table(library: torch.library.Library) -> None:
    """Register the rule of `fusion::table`, which works element by element."""

    def rule(info: Any, dims: Sequence[Any], positions: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        return torch.ops.fusion.table(positions, *arguments), dims[0]

    torch.library.register_vmap("fusion::table", rule, lib=library)


def _place(name: str, argument: Any) -> int | None:
    """Position of the new dimension of an argument; None for empty statistics, whose first dimension numbers them."""
    if name != "statistics":
        return 0
    return 1 if argument.dim() > 1 else None


def _moved(argument: Any, dim: Any, count: int, place: int | None) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_moved(a, d, count, place) for a, d in zip(argument, dim, strict=True)]
    if not isinstance(argument, Tensor) or place is None:
        return argument
    if dim is None:
        argument, dim = argument.unsqueeze(0).expand(count, *argument.shape), 0
    moved = argument.movedim(dim, place)
    return moved.contiguous() if place else moved  # kernels read statistics as they wrote them


Index = tuple[Expr, ...]
Names = tuple[str, ...]


def batched(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a batch of attentions; its last size is the number of them."""
    name = _new_size(spec.sizes)
    orders = [tuple(dim + 1 for dim in operand.order) for operand in spec.operands]
    described = zip(spec.operands, orders, strict=True)
    return spec.mapped(
        _shifted,
        sizes=(*spec.sizes, name),
        batch=(size(name), *spec.batch),
        operands=tuple(replace(o, rank=o.rank + 1, order=(0, *order) if order else ()) for o, order in described),
        q=_index(spec.q),
        k=_index(spec.k),
        v=_index(spec.v),
        output=Output(dims=_names(spec.output.dims), order=_names(spec.output.order)),
        aux_outputs=tuple(replace(f, value=_shifted(f.value), dims=_names(f.dims)) for f in spec.aux_outputs),
    )


def batched_map(spec: MapSpec) -> MapSpec:
    """Spec of a batch of tile maps; its last size is the number of them."""
    name = _new_size(spec.sizes)
    batch, sizes = (size(name), *spec.batch), (*spec.sizes, name)
    return replace(spec, sizes=sizes, batch=batch, live=_shifted(spec.live), full=_shifted(spec.full))


def _new_size(sizes: Names) -> str:
    return next(name for k in range(len(sizes) + 1) if (name := f"mapped{k}") not in sizes)


def _names(names: Names) -> Names:
    return "b0", *(f"b{int(name[1:]) + 1}" if name.startswith("b") else name for name in names)


def _index(index: Index) -> Index:
    return coord("b0"), *map(_shifted, index)


def _shifted(expr: Expr) -> Expr:
    """Expression over the moved coordinates, whose loads have one more dimension."""

    def leaf(part: Expr) -> Expr | None:
        if part.op == "coord" and part.name.startswith("b"):
            return coord(f"b{int(part.name[1:]) + 1}")
        return load(part.operand, _index(part.args), part.kind) if part.op == "load" else None

    return rebuild(expr, leaf)
