"""Sums of exponentials below the maximum of their row, used beside the attention: they belong to the true maximum, also
where keys are more than a block and scores rise, so that a kernel meets its maxima late."""

import pytest
import torch

from fusion.runtime.guards import failures_raised
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_over_draws
from tests.passes.test_aux_outputs import gradients


def parts(q, k):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e, e.sum(-1, keepdim=True)


def multiplied(q, k, v):
    e, total = parts(q, k)
    return ((e / total) @ v) * total


def divided_twice(q, k, v):
    e, total = parts(q, k)
    return ((e / total) @ v) / total


def returned(q, k, v):
    e, total = parts(q, k)
    return (e / total) @ v, total


def its_logarithm(q, k, v):
    e, total = parts(q, k)
    return (e / total) @ v, total.log()


def one_more(q, k, v):
    e, total = parts(q, k)
    return e @ v / (total + 1)


def beside_the_weights(q, k, v):
    e, total = parts(q, k)
    w = e / total
    return w @ v, w.sum(-2), total.squeeze(-1)


FUNCTIONS = [multiplied, divided_twice, returned, its_logarithm, one_more, beside_the_weights]


def rising(n, m, dtype=torch.float32):
    """Inputs whose scores rise from key to key, by less than the smallest step that kernels rescale for."""
    q, k, v = (torch.randn(2, 2, count, 16) for count in (n, m, m))
    q[..., 0] = 1.0
    k[..., 0] = torch.linspace(0.0, 6.0, m)
    return [x.to(dtype) for x in (q, k, v)]


def check(function, trained, *of_inputs):
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = gradients if trained else lambda f, given: f(*given)
    compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager", "strict": True})

    def draw():
        inputs = rising(*of_inputs)
        return run(compiled, inputs), run(function, inputs), run(function, [x.double() for x in inputs])

    with failures_raised():
        assert_as_exact_over_draws(draw)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("n", "trained"), [(2, False), (70, False), (9, True), (70, True)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_on_cpus(function, n, trained):
    check(function, trained, n, 300)


@pytest.mark.parametrize("function", [multiplied, its_logarithm], ids=lambda f: f.__name__)
def test_in_half_precision(function):
    check(function, False, 70, 300, torch.bfloat16)


@pytest.mark.parametrize("function", [multiplied, returned, one_more], ids=lambda f: f.__name__)
def test_on_gpus(function):
    with interpreted():
        check(function, True, 3, 150)
