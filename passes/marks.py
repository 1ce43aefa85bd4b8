"""Annotations of graph nodes: everything that the passes write into `node.meta`, with one accessor each.

`marks.mutations(node)` reads an annotation, `marks.mutations.set(node, value)` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch.fx import Node
from torch.fx.node import map_arg

T = TypeVar("T")


class Mark(Generic[T]):
    """One annotation: its key in `node.meta`, and its default where it was not written."""

    def __init__(self, key: str, default: T):
        self.key, self.default = key, default

    def __call__(self, node: Node) -> T:
        return node.meta.get(self.key, self.default)

    def set(self, node: Node, value: T) -> None:
        node.meta[self.key] = value

    def on(self, node: Node) -> bool:
        return self.key in node.meta

    def drop(self, node: Node) -> None:
        node.meta.pop(self.key, None)


requires_grad = Mark[bool]("requires_grad", False)
"""Whether autograd follows the node: the trace itself records values detached from it."""

stop_gradient = Mark[bool]("stop_gradient", False)
"""Whether a gradient ends here on its way up (detach, no_grad): the analysis must stop there too."""

mutations = Mark[tuple[Node, ...]]("mutations", ())
"""The nodes that change this node's memory in place."""

aliases = Mark[tuple[Node, ...]]("aliases", ())
"""Arguments that a checkpointed part returns, or returns views of."""

attention_root = Mark[bool]("attention_root", False)
"""Whether a fused attention will take this node's place."""

of_float = Mark[bool]("of_float", False)
"""Whether the node is the tensor of a float that is known at run time only (`trace.rewrites.read_floats`)."""

stored = Mark[bool]("stored", False)
"""Whether attentions may read the tensor in its narrow dtype."""

seed = Mark[Node | None]("seed", None)
"""Node of a dropout's random seed."""

is_seed = Mark[bool]("is_seed", False)
"""Whether the node is such a seed."""

dtensor = Mark[bool]("dtensor", False)
"""Whether the node stands for a DTensor; its value is the global tensor."""

folded = Mark[Any]("folded", None)
"""The value of a tensor that is the same at every call (`fusion.passes.pullback.loads`)."""

affine = Mark[Any]("affine", None)
"""That value as an affine function of the index, where it is one."""


def carry_nodes(copy: Node, copies: Mapping[Node, Node]) -> None:
    """Replace the nodes in a copied node's annotations by their copies."""
    for mark in (mutations, aliases, seed):
        if mark.on(copy):
            copy.meta[mark.key] = map_arg(copy.meta[mark.key], copies.__getitem__)
