"""An attention over sets of keys against the same attention under a mask of all keys, on small tensors.

That with the mask has been compared with the graph. Both forms are executed by the reference interpreter on made-up
operands: the mask is made of made-up positions, as the graph makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from fusion.codegen import reference
from fusion.codegen.reference.extents import shapes_read
from fusion.passes import nodes
from fusion.passes.specify.key_sets import KeySet
from fusion.passes.specify.specify import Specified
from fusion.undisturbed import by_compilation

_SMALL = {"Nq": 5, "Nk": 13, "Nset": 6}
_INTEGERS = 3
"""Values of made-up integers are below this."""


def contradiction(found: Specified, hints: Mapping[str, int]) -> str | None:
    """How an attention over sets of keys differs from that with a mask that it was made of, or None."""
    assert found.by_rows is not None
    dense = found.by_rows.dense
    with by_compilation(), torch.no_grad():
        forms = [(part, _small_sizes(part, hints)) for part in (dense, found)]
        made = _Operands(found, dense, dict(forms[0][1]) | dict(forms[1][1]))
        masked, gathered = (_result(part, made, sizes) for part, sizes in forms)
    if found.spec.among is not None:
        place = found.spec.output.dims.index("i")
        gathered = gathered.flatten(place - 1, place)
    if masked.shape != gathered.shape:
        return f"the result has the shape {list(gathered.shape)} where it had {list(masked.shape)}"
    finite = masked[masked.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    apart = ~torch.isclose(gathered, masked, rtol=1e-9, atol=1e-9 * scale, equal_nan=True)
    if apart.any():
        return f"{int(apart.sum())} of {apart.numel()} elements differ with {_SMALL['Nset']} keys in each set"
    return None


def _small_sizes(part: Specified, hints: Mapping[str, int]) -> dict[str, int]:
    """Few queries and keys; of the batch, its last coordinate whole, because heads may be told apart by number."""
    values = part.example_sizes(hints)
    last = f"B{len(part.spec.batch) - 1 - (part.spec.among is not None)}"
    few = {name: min(value, 2) for name, value in values.items() if name.startswith("B") and name != last}
    return values | few | {name: small for name, small in _SMALL.items() if name in values}


def _result(part: Specified, made: _Operands, sizes: Mapping[str, int]) -> Tensor:
    """The attention in float64."""
    spec = replace(part.spec, out_dtype="float64")
    operands = [made.tensor(node) for node in part.operands]
    return reference.run(spec, operands, [sizes[name] for name in spec.sizes], torch.float64)


class _Operands:
    """Made-up operands of both forms, as large as their indices ask for."""

    def __init__(self, found: Specified, dense: Specified, sizes: Mapping[str, int]):
        assert found.by_rows is not None
        self.positions = found.operands[found.by_rows.table]
        self.sets: dict[Node, KeySet] = {dense.operands[n]: keys for n, keys in dense.key_sets}
        self.sizes, self.made, self.random = sizes, dict[Node, Tensor](), torch.Generator().manual_seed(7)
        self.shapes: dict[Node, list[int]] = {}
        for part in (found, dense):
            for node, shape in zip(part.operands, self._shapes(part), strict=True):
                self.shapes[node] = [max(pair) for pair in zip(shape, self.shapes.get(node, shape), strict=True)]

    def _shapes(self, part: Specified) -> list[list[int]]:
        """Of a form's operands: what is read at the positions, or at other integers, must be there."""

        def largest(operand: int) -> int:
            return (self.sizes["Nk"] if part.operands[operand] is self.positions else _INTEGERS) - 1

        return shapes_read(part.spec, self.sizes, largest)

    def tensor(self, node: Node) -> Tensor:
        if node not in self.made:
            self.made[node] = self._make(node)
        return self.made[node]

    def _make(self, node: Node) -> Tensor:
        shape, dtype = self.shapes.get(node, [1] * len(nodes.shape(node))), nodes.dtype(node)
        if node is self.positions:
            every = torch.rand(*shape[:-1], self.sizes["Nk"], generator=self.random, dtype=torch.float32).argsort(-1)
            return every[..., : self.sizes["Nset"]].to(dtype)
        if (keys := self.sets.get(node)) is not None and keys.positions is self.positions:
            blank = torch.full(shape, bool(keys.outside.attr))
            return blank.scatter(-1, self.tensor(self.positions).to(torch.int64), bool(keys.inside.attr))
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.random, dtype=torch.float32).to(dtype)
        values = torch.randint(0, _INTEGERS, shape, generator=self.random)
        return values > 0 if dtype is torch.bool else values.to(dtype)
