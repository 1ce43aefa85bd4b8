"""Comparison of an attention over sets of keys with the same attention under a mask of all keys, on small tensors.

The form with the mask has been compared with the graph. Both forms are executed by the reference interpreter, on the
operands that kernels are proved on: the mask is computed from positions, as in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from fusion.codegen import reference
from fusion.passes.specify.specify import AttentionCall
from fusion.process import outside_compilation
from fusion.proof.operands import Operands

_SMALL = {"Nq": 5, "Nk": 13, "Nset": 6}


def contradiction(call: AttentionCall, hints: Mapping[str, int]) -> str | None:
    """Difference between an attention over sets of keys and its original with a mask, or None."""
    assert call.gathered is not None
    with outside_compilation(), torch.no_grad():
        operands = _operands(call, hints)
        expected, result = (_result(part, operands, hints) for part in (call.gathered.dense, call))
    if call.spec.n_k_total is not None:
        place = call.spec.output.dims.index("i")
        result = result.flatten(place - 1, place)
    if expected.shape != result.shape:
        return f"the result has the shape {list(result.shape)} where it had {list(expected.shape)}"
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    apart = ~torch.isclose(result, expected, rtol=1e-9, atol=1e-9 * scale, equal_nan=True)
    if apart.any():
        return f"{int(apart.sum())} of {apart.numel()} elements differ with {_SMALL['Nset']} keys in each set"
    return None


def _small_sizes(part: AttentionCall, hints: Mapping[str, int]) -> dict[str, int]:
    """Few queries and keys; the last coordinate of the batch in full, because its heads may differ by number."""
    values = part.example_sizes(hints)
    last = f"B{len(part.spec.batch) - 1 - (part.spec.n_k_total is not None)}"
    few = {name: min(value, 2) for name, value in values.items() if name.startswith("B") and name != last}
    return values | few | {name: small for name, small in _SMALL.items() if name in values}


def _operands(call: AttentionCall, hints: Mapping[str, int]) -> dict[Node, Tensor]:
    """Operands of both forms, by node: positions that differ from each other, and masks computed from them."""
    assert call.gathered is not None
    dense, positions = call.gathered.dense, call.operands[call.gathered.table]
    drawn = Operands(dense.spec, _small_sizes(dense, hints), seed=7).tensors()
    values: dict[Node, Tensor] = {}
    for node, tensor in zip(dense.operands, drawn, strict=True):  # a tensor may be several operands
        values[node] = _as_large(tensor, values[node].shape) if node in values else tensor
    for number, keys in dense.key_sets:
        if keys.positions is positions:
            shape = values[dense.operands[number]].shape
            draw = torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
            values[positions] = draw.argsort(-1)[..., : _SMALL["Nset"]]
            mask = torch.full(shape, bool(keys.outside.attr))
            values[dense.operands[number]] = mask.scatter(-1, values[positions], bool(keys.inside.attr))
    return values


def _as_large(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor, repeated along dimensions in which it has fewer elements than `shape`."""
    for dim, (own, other) in enumerate(zip(tensor.shape, shape, strict=True)):
        tensor = tensor.index_select(dim, torch.arange(max(own, other)) % own)
    return tensor


def _result(part: AttentionCall, operands: Mapping[Node, Tensor], hints: Mapping[str, int]) -> Tensor:
    """The attention in float64."""
    sizes = _small_sizes(part, hints)
    spec = replace(part.spec, out_dtype="float64")
    return reference.run(spec, [operands[node] for node in part.operands], list(sizes.values()), torch.float64)
