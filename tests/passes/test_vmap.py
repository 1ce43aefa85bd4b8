"""vmap over positions, retraced as broadcasting; vmap of anything else is refused."""

from __future__ import annotations

import torch

from fusion.passes.normalize import normalize
from fusion.passes.vmap import VmapAsBroadcast
from tests.numerics import assert_same
from tests.passes.graphs import captured


def keep(rows, columns):
    """Nested, as models write masks."""
    one = torch.vmap(lambda i, j: (j <= i) & (i - j < 3), in_dims=(None, 0))
    return torch.vmap(one, in_dims=(0, None))(rows, columns)


def test_nested_positions_broadcast():
    positions = torch.arange(7), torch.arange(9)
    graph = normalize(captured(keep, *positions), positions)
    assert not any("functorch" in getattr(node.target, "__module__", "") for node in graph.graph.nodes)
    assert_same(graph(*positions)[0], keep(*positions))


def test_calls_of_other_modules_are_not_its_own():
    module = captured(keep, torch.arange(3), torch.arange(4))
    rule = VmapAsBroadcast(module)
    assert not rule.handles(torch.add) and not rule.handles("name")
