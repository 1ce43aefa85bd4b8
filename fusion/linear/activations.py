"""GELU of a product, recognized in graphs below autograd, where it is written out as a polynomial with erf or tanh.
It is computed in the product, or, with tanh, in half of the time after it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion.passes import nodes

aten, prims = torch.ops.aten, torch.ops.prims

Polynomial = dict[tuple[str, ...], float]
"""Coefficients by the sorted names of the factors: y, and erf or tanh of what GELU takes it of."""

_ROOT = math.sqrt(2 / math.pi)
ARGUMENTS: dict[str, Polynomial] = {
    "erf": {("y",): math.sqrt(0.5)},
    "tanh": {("y",): _ROOT, ("y", "y", "y"): 0.044715 * _ROOT},
}
_FUNCTIONS = {aten.erf.default: "erf", aten.tanh.default: "tanh"}
APPROXIMATIONS = {"erf": "none", "tanh": "tanh"}
"""Names of the two in torch."""
_LONGEST = 20
"""Nodes of a graph that are read for one GELU."""
_DEGREE = 4
"""The most factors of a term, so that powers of powers stay small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gelu:
    """GELU of a product that nothing else reads. of: the product, or its reshape; inner: the nodes from there to
    `result`, in order; approximate: as torch names it."""

    of: Node
    inner: tuple[Node, ...]
    result: Node
    approximate: str

    def remove(self) -> None:
        """Let what reads the result read the product, once GELU is computed there."""
        self._replace(self.of)

    def shorten(self) -> None:
        """Compute GELU with tanh in half of the time: 0.5 y (1 + tanh u) = y sigmoid(2 u), also where u overflows. The
        sum of 1 and a tanh near -1 is the less exact of the two."""
        if self.approximate != "tanh":
            return
        value = nodes.fake(self.of)
        slope, cube = (2 * coefficient for coefficient in ARGUMENTS["tanh"].values())

        def call(target: Any, *arguments: Any, dtype: torch.dtype = torch.float32) -> Node:
            node = self.of.graph.call_function(target, arguments)
            node.meta = self.result.meta | {"val": value.to(dtype)}
            return node

        with self.of.graph.inserting_before(self.result):
            y = call(prims.convert_element_type.default, self.of, torch.float32)
            factor = call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.mul.Tensor, y, y), cube), slope)
            gate = call(aten.sigmoid.default, call(aten.mul.Tensor, y, factor))
            product = call(aten.mul.Tensor, y, gate)
            result = call(prims.convert_element_type.default, product, value.dtype, dtype=value.dtype)
        self._replace(result)

    def _replace(self, by: Node) -> None:
        self.result.replace_all_uses_with(by)
        for node in reversed((*self.inner, self.result)):
            node.graph.erase_node(node)

    @property
    def is_read_elementwise(self) -> bool:
        """Whether Inductor reads the result in a pass over its elements, with which it would fuse GELU."""
        readers = set(self.result.users)
        while views := {node for node in readers if node.target in _RESHAPES}:
            readers = readers - views | {user for view in views for user in view.users}
        return any(str(node.target) not in _PRODUCTS for node in readers)


_RESHAPES = (aten.reshape.default, aten.view.default)
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "fusion.linear.default")


def gelu_of(product: Node) -> Gelu | None:
    """GELU of a product, else None."""
    readers = list(product.users)
    of = readers[0] if len(readers) == 1 and readers[0].target in _RESHAPES else product
    values: dict[Node, Polynomial] = {of: {("y",): 1.0}}
    dtype, waiting = nodes.fake(product).dtype, deque(of.users)
    while waiting and len(values) < _LONGEST:
        node = waiting.popleft()
        if node in values or (value := _value(node, values, dtype)) is None or max(map(len, value)) > _DEGREE:
            continue
        values[node] = value
        waiting.extend(node.users)
        for function, approximate in APPROXIMATIONS.items():
            is_gelu = _are_close(value, {("y",): 0.5, (function, "y"): 0.5}) and nodes.fake(node).dtype is dtype
            if is_gelu and all(user in values for inner in values if inner is not node for user in inner.users):
                return Gelu(of=of, inner=tuple(values)[1:-1], result=node, approximate=approximate)
    return None


def _value(node: Node, values: dict[Node, Polynomial], dtype: torch.dtype) -> Polynomial | None:
    """The polynomial that a node computes of values that are known, else None. Terms that cancel are kept."""
    if node.kwargs or any(isinstance(x, Node) and x not in values for x in node.args):
        return None
    operands: list[Any] = [values[x] if isinstance(x, Node) else x for x in node.args]
    match node.target, operands:
        case prims.convert_element_type.default, [dict(x), to] if to in (torch.float32, dtype):
            return x
        case aten.mul.Tensor, [dict(x), y]:
            return _times(x, y if isinstance(y, dict) else {(): float(y)})
        case aten.div.Tensor, [dict(x), float() | int() as y] if y:
            return _times(x, {(): 1 / y})
        case aten.add.Tensor, [dict(x), y]:
            other = y if isinstance(y, dict) else {(): float(y)}
            return {factors: x.get(factors, 0.0) + other.get(factors, 0.0) for factors in x | other}
        case aten.pow.Tensor_Scalar, [dict(x), 2 | 3 as power]:
            return _times(x, x) if power == 2 else _times(_times(x, x), x)
        case (aten.erf.default | aten.tanh.default) as target, [dict(x)]:
            name = _FUNCTIONS[target]
            return {(name,): 1.0} if _are_close(x, ARGUMENTS[name]) else None
    return None


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = defaultdict(float)
    for left, x in a.items():
        for right, y in b.items():
            result[tuple(sorted(left + right))] += x * y
    return dict(result)


def _are_close(a: Polynomial, b: Polynomial) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[factors], b[factors], rel_tol=1e-6) for factors in a)
