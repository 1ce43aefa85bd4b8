"""Small FX graphs of ATen calls on real tensors, and expressions evaluated at every element: for tests of single
passes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir import integers
from fusion.ir.expr import Expr, coord
from fusion.ir.ops import evaluate


class Calls:
    """A graph under construction; every node knows its value."""

    def __init__(self) -> None:
        self.graph = Graph()

    def given(self, tensor: torch.Tensor, name: str = "x") -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = tensor
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda held: held.meta["val"])  # type: ignore[assignment]
        node.meta["val"] = target(*args, **kwargs)
        return node


def captured(function: Any, *inputs: Any) -> GraphModule:
    """Dynamo's graph of a function."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


def ordered(module: GraphModule, function: Any, inputs: Sequence[Any]) -> list[Any]:
    """A function's inputs in the order in which its graph takes them."""
    given = dict(zip(inspect.signature(function).parameters, inputs, strict=True))
    places = (str(node.target) for node in module.graph.nodes if node.op == "placeholder")
    return [given[place.removeprefix("L_").removesuffix("_")] for place in places]


def element(node: Node, first: int = 0) -> tuple[tuple[Expr, ...], dict[Expr, Expr]]:
    """(symbolic index, bounds) of an element of a node."""
    index = tuple(coord(f"x{first + k}") for k in range(node.meta["val"].dim()))
    return index, {x: integers.integer(n) for x, n in zip(index, node.meta["val"].shape, strict=True)}


def grids(bounds: dict[Expr, Expr]) -> dict[Expr, torch.Tensor]:
    """All values of each coordinate, each along an axis of its own."""
    return {
        x: torch.arange(extent.integer).reshape([-1 if k == axis else 1 for k in range(len(bounds))])
        for axis, (x, extent) in enumerate(bounds.items())
    }


def at_every_place(expr: Expr, bounds: dict[Expr, Expr], loaded: Sequence[Node] = ()) -> torch.Tensor:
    """An expression of coordinates and of loads from nodes, one axis per coordinate, in float64."""
    places = grids(bounds)

    def leaf(part: Expr) -> Any:
        if part.op == "load":
            tensor = loaded[part.operand].meta["val"]
            return lambda *at: tensor[at] if at else tensor
        return places[part]

    shape = [extent.integer for extent in bounds.values()]
    return evaluate(expr, leaf, torch.float64).expand(shape)
