"""Levels of torch.func that a graph opens are closed where the graph raises."""

import contextlib

import pytest
import torch
from torch.fx import Graph, GraphModule

from fusion.passes.trace import outline
from fusion.torch_private.functorch import closed_on_error

functorch = torch._C._functorch


def fails(x):
    functorch._grad_increment_nesting()
    functorch._jvp_increment_nesting()
    with contextlib.suppress(RuntimeError):  # it is open
        torch._C._enter_dual_level()
    torch._C._set_grad_enabled(False)
    torch._C._set_fwd_grad_enabled(False)
    raise ValueError("at run time")


def tangent(x):
    return torch.func.jvp(torch.func.grad(lambda y: (y * y).sum()), (x,), (torch.ones_like(x),))[1]


def assert_nothing_is_left():
    assert functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.is_grad_enabled() and torch._C._is_fwd_grad_enabled()
    assert tangent(torch.randn(3)).tolist() == [2.0, 2.0, 2.0]


def test_an_error_closes_what_was_opened():
    with pytest.raises(ValueError, match="at run time"), closed_on_error():
        fails(None)
    assert_nothing_is_left()


def test_levels_around_stay():
    def outer(x):
        with pytest.raises(ValueError, match="at run time"), closed_on_error():
            fails(x)
        assert functorch.get_dynamic_layer_stack_depth() == 2
        return (x * x).sum()

    x = torch.randn(3)
    assert torch.func.jvp(torch.func.grad(outer), (x,), (torch.ones_like(x),))[1].tolist() == [2.0, 2.0, 2.0]


def test_an_outlined_part_closes_its_levels():
    graph = Graph()
    graph.output((graph.call_function(fails, (graph.placeholder("x"),)),))
    with pytest.raises(ValueError, match="at run time"):
        outline._Sealed(GraphModule(torch.nn.Module(), graph))(torch.randn(3))
    assert_nothing_is_left()
