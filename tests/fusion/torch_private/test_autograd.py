"""Autograd as fusion.torch_private.autograd uses it."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule

from fusion.torch_private import autograd


def _targets(function, *args) -> list[object]:
    """What Dynamo's graph calls."""
    found: list[object] = []

    def backend(module: GraphModule, _: object):
        found.extend(node.target for node in module.graph.nodes)
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found


def test_graphs_switch_gradients_by_this_call() -> None:
    def function(x):
        with torch.no_grad():
            y = x * 2
        return x + y

    assert autograd.SET_GRAD_ENABLED in _targets(function, torch.ones(2, requires_grad=True))
    with torch.enable_grad():
        autograd.SET_GRAD_ENABLED(False)
        assert not torch.is_grad_enabled()


def test_graphs_take_data_by_this_call() -> None:
    assert autograd.GET_DATA in _targets(lambda x: x.data + 1, torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    assert not autograd.GET_DATA(x).requires_grad


def test_an_operator_can_record() -> None:
    found = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            found.append((x.detach().requires_grad_() * 2).requires_grad)
        with torch.enable_grad(), autograd.recording():
            y = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((y**3).sum(), y)
            tangent = torch.func.jvp(lambda z: z**3, (x,), (torch.ones_like(x),))[1]
            found.append(autograd.carries_tangents())
        assert torch.equal(gradient, tangent)
        return gradient

    with torch.library._scoped_library("fusion_private_test", "FRAGMENT") as library:
        library.define("slope(Tensor x) -> Tensor")
        library.impl("slope", inside, "CPU")
        below = autograd.below
        library.impl("slope", lambda keys, x: below(slope, keys, (x,)), "Autograd", with_keyset=True)
        slope = torch.ops.fusion_private_test.slope.default
        x = torch.tensor([1.0, 2.0])
        assert torch.equal(torch.ops.fusion_private_test.slope(x), 3 * x**2)
    assert found == [False, False]  # nothing is recorded outside of it


def test_a_kernel_of_autograd_calls_what_is_below() -> None:
    ran = []

    def above(keys: object, x: torch.Tensor) -> torch.Tensor:
        ran.append("above")
        return autograd.below(torch.ops.fusion_private_test.twice.default, keys, (x,))

    def twice(x: torch.Tensor) -> torch.Tensor:
        ran.append("below")
        return 2 * x

    with torch.library._scoped_library("fusion_private_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", twice, "CPU")
        library.impl("twice", above, "Autograd", with_keyset=True)
        result = torch.ops.fusion_private_test.twice(torch.ones(2, requires_grad=True))
    assert ran == ["above", "below"] and result.tolist() == [2.0, 2.0] and not result.requires_grad


class _Cube(autograd.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, keys: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return autograd.below(torch.ops.fusion_private_test.cube.default, keys, (x,))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, 3 * ctx.saved_tensors[0] ** 2 * grad


def test_functions_are_recorded_on_the_level_of_the_call() -> None:
    with torch.library._scoped_library("fusion_private_test", "FRAGMENT") as library:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: x**3, "CPU")
        recorded = lambda keys, x: autograd.recorded_here(_Cube, keys, x)
        library.impl("cube", recorded, "Autograd", with_keyset=True)
        cube, x = torch.ops.fusion_private_test.cube, torch.tensor(2.0)
        slope = torch.func.grad(cube)
        assert (slope(x).item(), torch.func.grad(slope)(x).item()) == (12, 12)
        y = x.clone().requires_grad_()
        cube(y).backward()
        assert y.grad is not None and y.grad.item() == 12


def test_tangents_are_carried_or_not() -> None:
    assert autograd.carries_tangents()
    with autograd.carrying_tangents(False):
        assert not autograd.carries_tangents()
        with autograd.carrying_tangents(True):
            assert autograd.carries_tangents()
    assert autograd.carries_tangents()


def test_levels_of_forward_mode() -> None:
    assert not autograd.is_within_dual_level()
    with forward_ad.dual_level():
        assert autograd.is_within_dual_level()
    assert not autograd.is_within_dual_level()


@pytest.mark.parametrize("open_before", [False, True])
def test_duals(open_before: bool) -> None:
    def check() -> None:
        with autograd.dual_level():
            dual = autograd.make_dual(torch.tensor([2.0]), torch.tensor([1.0]))
            value, tangent = autograd.unpack_dual(dual * dual)
            assert value.tolist() == [4.0] and tangent is not None and tangent.tolist() == [4.0]
            assert autograd.unpack_dual(torch.ones(1))[1] is None

    if open_before:
        with forward_ad.dual_level():
            check()
            assert forward_ad.unpack_dual(forward_ad.make_dual(torch.ones(1), torch.ones(1)) * 3).tangent.item() == 3
    else:
        check()
    with forward_ad.dual_level():  # none is left open
        pass
    assert autograd.unpack_dual(torch.ones(1))[1] is None


def test_hooks_are_allowed_inside_alone() -> None:
    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    with autograd.hooks_allowed(), hooks():
        pass
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with autograd.hooks_allowed(), hooks():
            pass
        with pytest.raises(RuntimeError, match="not here"):
            hooks().__enter__()
    with hooks():
        pass
