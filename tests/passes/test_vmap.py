"""vmap over positions, retraced as broadcasting; vmap of anything else is refused."""

from __future__ import annotations

import pytest
import torch

from fusion.passes.nodes import Unsupported
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


def doubled(x):
    return torch.vmap(lambda row: row * 2)(x)


def columns(x):
    return torch.vmap(lambda i: i * 2, in_dims=1)(x)


def along_the_end(x):
    return torch.vmap(torch.vmap(lambda i, j: i + j, (None, 0), out_dims=0), (0, None), out_dims=1)(x, x)


@pytest.mark.parametrize(
    ("function", "given", "reason"),
    [
        (doubled, torch.randn(3, 4), "vmap of a function of tensors"),
        (columns, torch.randn(3, 4), "vmap of a function of tensors"),
        (along_the_end, torch.arange(4), "vmap with an out_dim other than 0"),
    ],
)
def test_other_uses_are_refused(function, given, reason):
    module = captured(function, given)
    with pytest.raises(Unsupported, match=reason):
        normalize(module, [given])


def test_calls_of_other_modules_are_not_its_own():
    module = captured(keep, torch.arange(3), torch.arange(4))
    rule = VmapAsBroadcast(module)
    assert not rule.handles(torch.add) and not rule.handles("name")
