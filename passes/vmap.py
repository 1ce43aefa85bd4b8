"""`vmap` in Dynamo's graphs, retraced as broadcasting.

Models build masks by nested `vmap` over (batch, head, query, key) of a function of four integers. Every value inside
is logically a scalar, so the batch dimensions can be ordinary broadcast dimensions: level l of K nested levels is
dimension l - 1 of K. Other uses of vmap stay as they are (`fusion.passes.outline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion.passes import nodes

_ENTER, _LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_ADD, _REMOVE = "_add_batch_dim", "_remove_batch_dim"
_IGNORED = "lazy_load_decompositions"


class VmapAsBroadcast:
    """Runs the functorch calls of one graph, in order."""

    def __init__(self, module: GraphModule):
        self.depths = iter(_depths(module))
        self.level = 0
        self.depth = 0

    def handles(self, target: Any) -> bool:
        """Whether a call is one of vmap's own."""
        name = getattr(target, "__name__", "")
        return "functorch" in getattr(target, "__module__", "") and name in (_ENTER, _LEAVE, _ADD, _REMOVE, _IGNORED)

    def call(self, target: Any, args: tuple[Any, ...]) -> Any:
        """The result of such a call, in terms of broadcast dimensions."""
        name = target.__name__
        if name == _ENTER:
            if self.level == 0:
                self.depth = next(self.depths)
            self.level += 1
            return self.level
        if name == _LEAVE:
            self.level -= 1
            return self.level
        if name == _ADD:
            return self._add(*args)
        return self._remove(*args) if name == _REMOVE else None

    def _add(self, x: torch.Tensor, dim: int, level: int) -> torch.Tensor:
        return x.view(-1, *[1] * (self.depth - level))

    def _remove(self, x: torch.Tensor, level: int, size: int, dim: int) -> torch.Tensor:
        rank = self.depth - level + 1
        x = x.reshape([*[1] * (rank - x.dim()), *x.shape])
        at = x.dim() - rank
        return x.expand([size if k == at else -1 for k in range(x.dim())])


def _depths(module: GraphModule) -> list[int]:
    """The nesting depth of each outermost vmap."""
    depths, level = [], 0
    for node in module.graph.nodes:
        name = _name(node)
        if name == _ENTER:
            level += 1
            depths = depths if level > 1 else [*depths, 1]
            depths[-1] = max(depths[-1], level)
        elif name == _LEAVE:
            level -= 1
    return depths


def is_broadcast(part: Sequence[Node]) -> bool:
    """Whether a part of Dynamo's graph is nested `vmap`s over vectors of positions, of functions of scalars."""
    removed = False
    for node in part:
        name = _name(node)
        if name == _ADD:
            if nodes.value(node.args[0]).dim() != 1 or node.args[1] != 0:  # type: ignore[arg-type]
                return False
        elif name == _REMOVE:
            removed = True
            if node.args[3] != 0:
                return False
        elif name not in (_ENTER, _LEAVE, _IGNORED) and not _is_scalar(node, removed):
            return False
    return _name(part[0]) in (_ENTER, _IGNORED)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_scalar(node: Node, removed: bool) -> bool:
    held = nodes.value(node)
    return not removed and (not isinstance(held, torch.Tensor) or held.dim() == 0)
