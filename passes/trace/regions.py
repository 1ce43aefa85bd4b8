"""Regions that are compiled once for all their calls (`torch.compiler.nested_compile_region`): inlined, as if the user
had marked nothing.

Equal calls are copied when the graph is traced again (`passes.trace.repeats`). Inductor compiles the layers one by one
then; a region that it compiles once has, in torch 2.13, wrong gradients of all calls but the first.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .outline import attributes


def without_regions(module: GraphModule) -> GraphModule:
    """Graph with all calls of regions inlined; the module itself where there are none."""
    if not regions(module):
        return module
    graph, copies = Graph(), dict[Node, Any]()
    attribute_values: dict[str, Any] = {}
    for node in module.graph.nodes:
        if (body := _region(module, node)) is not None:
            body = without_regions(body)
            inputs = body.graph.find_nodes(op="placeholder")
            inside = dict(zip(inputs, (copies.get(argument, argument) for argument in node.args[2:]), strict=True))
            copies[node] = _copied(body, graph, inside, attribute_values)
        elif node.target is operator.getitem and isinstance(items := map_arg(node.args[0], copies.get), tuple):
            copies[node] = items[node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    result = GraphModule(attributes(graph, attribute_values, module), graph)
    result.meta |= module.meta
    return result


def regions(module: GraphModule) -> list[GraphModule]:
    """The graphs of all calls."""
    return [body for node in module.graph.nodes if (body := _region(module, node)) is not None]


def _region(module: GraphModule, node: Node) -> GraphModule | None:
    """The graph that a node calls, if it is a region's."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    return operator.attrgetter(str(node.args[0].target))(module)  # type: ignore[union-attr]


def _copied(body: GraphModule, graph: Graph, made: dict[Node, Any], held: dict[str, Any]) -> tuple[Any, ...]:
    """Results of a graph whose operations are appended to `graph`. made: new nodes, its inputs included. held: the
    attributes of such graphs, to which new ones are added."""
    for node in body.graph.nodes:
        if node.op == "output":
            return tuple(made.get(result, result) for result in node.args[0])
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
        if node.op in ("get_attr", "call_module"):
            made[node].target = f"region_{len(held)}"
            held[made[node].target] = operator.attrgetter(str(node.target))(body)
    raise AssertionError("a graph ends with its results")
