"""Levels of torch.func as fusion.torch_private.functorch knows them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule

from fusion.torch_private import autograd, functorch


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def _dual(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(x, x) * x).tangent
        assert tangent is not None
        return tangent


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def _targets(function: Callable[..., Any], **keywords: Any) -> list[Any]:
    """What Dynamo's graph calls."""
    found: list[Any] = []

    def backend(module: GraphModule, _: object):
        found.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(torch.tensor([1.0, 2.0], **keywords))
    return found


TRANSFORMS = {
    "grad": torch.func.grad(_square),
    "jvp": lambda x: torch.func.jvp(_square, (x,), (x,))[1],
    "vmap": torch.vmap(torch.sin),
    "dual": _dual,
}
OTHERS = {
    "hessian": (torch.func.hessian(_square), {"grad", "jvp", "vmap", "dual"}),
    "jacrev": (torch.func.jacrev(_square), {"grad"}),
    "vjp": (lambda x: torch.func.vjp(_square, x)[1](torch.ones(())), {"grad"}),
}


def _opened(targets: list[Any]) -> set[str]:
    """The kinds of levels, each of which is closed as often as it is opened."""
    kinds = {kind for kind in TRANSFORMS if any(functorch.enters(t, kind) for t in targets)}
    for kind in kinds:
        assert sum(functorch.enters(t, kind) for t in targets) == sum(functorch.leaves(t, kind) for t in targets)
    assert sum(map(functorch.enters, targets)) == sum(map(functorch.leaves, targets))
    return kinds


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_each_level_is_known(kind: str) -> None:
    targets = _targets(TRANSFORMS[kind])
    assert kind in _opened(targets) <= {kind, *(["dual"] if kind == "jvp" else [])}
    of_function = [t for t in targets if not functorch.is_of_levels(t)]
    assert len(of_function) in range(1, 5) and all(
        getattr(t, "__module__", "") in ("torch", "_operator", "torch._C._nn") for t in of_function
    )


@pytest.mark.parametrize("name", OTHERS)
def test_levels_of_combinations_are_known(name: str) -> None:
    function, kinds = OTHERS[name]
    found = _opened(_targets(function))
    assert kinds - {"vmap"} <= found <= kinds | {"vmap"}


def test_gradients_forbid_hooks_and_ask_autograd() -> None:
    targets = _targets(TRANSFORMS["grad"])
    assert any(t in functorch.FORBID_HOOKS for t in targets) and any(t in functorch.ALLOW_HOOKS for t in targets)
    assert any(t in functorch.ASK_AUTOGRAD for t in targets) and not any(t in functorch.UNPACK_DUAL for t in targets)
    assert any(t in functorch.UNPACK_DUAL for t in _targets(TRANSFORMS["jvp"]))


def test_functions_with_a_backward_of_their_own_are_known() -> None:
    assert functorch.AUTOGRAD_FUNCTION in _targets(_Cube.apply, requires_grad=True)
    assert functorch.AUTOGRAD_FUNCTION not in _targets(TRANSFORMS["grad"])


def test_names_alone_are_no_levels() -> None:
    def _grad_increment_nesting() -> None: ...

    assert not functorch.enters(_grad_increment_nesting) and not functorch.enters("_grad_increment_nesting")


def test_calls_of_vmap_have_functions_behind_them() -> None:
    behind = [found for t in _targets(TRANSFORMS["vmap"]) if (found := functorch.of_vmap(t)) is not None]
    enter, put, take, leave = (behind[k] for k in (0, 1, -2, -1))
    level = enter(2, "error")
    assert functorch.depth() == level
    result = take(put(torch.tensor([1.0, 2.0]), 0, level) * 3, level, 2, 0)
    assert leave() == level and functorch.depth() == -1 and result.tolist() == [3.0, 6.0]
    assert functorch.of_vmap(torch.sin) is None


def test_levels_that_were_left_open_are_closed() -> None:
    behind = [found for t in _targets(TRANSFORMS["vmap"]) if (found := functorch.of_vmap(t)) is not None]
    with pytest.raises(ZeroDivisionError), functorch.closed_on_error():
        behind[0](2, "error"), behind[0](3, "error"), 1 / 0
    assert functorch.depth() == -1


@pytest.mark.parametrize("outside", [False, True])
def test_a_level_of_tangents(outside: bool) -> None:
    with autograd.dual_level() if outside else torch.no_grad(), functorch.tangent_level() as level:
        dual = autograd.make_dual(torch.tensor([2.0]), torch.tensor([1.0]))
        value, tangent = (functorch.taken_off(t, level) for t in autograd.unpack_dual(dual**3))
    assert value.tolist() == [8.0] and tangent.tolist() == [12.0] and functorch.depth() == -1


def test_gradients_in_a_batch_are_taken_off_it_and_put_on_it() -> None:
    shared, sizes = torch.randn(4), []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (plain, others, number), size, on_batch = functorch.off_batch((grad, [shared], 2))
            assert plain.shape == others[0].shape == (3, 4) and torch.equal(others[0][1], shared)
            sizes.append(size)
            return on_batch([plain * number])[0]

    x, arriving = torch.randn(4, requires_grad=True), torch.randn(3, 4)
    (got,) = torch.autograd.grad(Doubled.apply(x), x, arriving, is_grads_batched=True)
    assert sizes == [3] and torch.equal(got, 2 * arriving)
