"""Random graphs of products, with gradients: results and gradients are as exact as eager's."""

import contextlib
import random

import pytest
import torch

from tests.fusion.linear.graphs import Products, inputs, redirected
from tests.numerics import assert_as_exact_over_draws


def results(module: Products, call, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    out = call(x)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), [x, *module.parameters()], allow_unused=True)]


def update(module: Products) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.mul_(0.75).add_(0.01 * number)


def vary(module: Products) -> None:
    """Other weights for every draw: they decide as much as the input how a sum rounds."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))


def check(seed: int, backend) -> None:
    draw = random.Random(seed)
    module = Products(seed)
    autocast = draw.random() < 0.15
    run = torch.compile(module, backend=backend, dynamic=draw.choice([None, True]))
    with torch.autocast("cpu", enabled=autocast), deterministic(draw.random() < 0.2):
        for _ in range(2):
            exact, make = Products(seed).double(), inputs(draw, module.width)

            def drawn(exact=exact, make=make):
                x = make()
                vary(module)
                exact.load_state_dict(module.state_dict())
                every = results(module, run, x), results(module, module, x), results(exact, exact, x.double())
                return tuple([t for t in given if t is not None] for given in every)

            assert_as_exact_over_draws(drawn, torch.bfloat16 if autocast else None, check_strides=True)
            update(module)


@contextlib.contextmanager
def deterministic(wanted: bool):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("seed", range(40))
def test_random_products(seed: int) -> None:
    check(seed, redirected)


@pytest.mark.long
@pytest.mark.parametrize("first", range(40, 2040, 100))
def test_many_random_products(first: int) -> None:
    for seed in range(first, first + 100):
        torch._dynamo.reset()
        check(seed, redirected)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.long if n > 1 else ()) for n in range(10)])
def test_random_products_in_inductors_code(seed: int) -> None:
    def backend(module, example_inputs):
        from fusion.backend import fusion

        return fusion(module, example_inputs, options={"linear": "always"})

    check(seed, backend)
