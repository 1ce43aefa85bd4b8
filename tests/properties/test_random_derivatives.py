"""Second derivatives and tangents of random score programs, by numerical differences and against eager in float64."""

import hypothesis
import torch
from torch.func import grad, jvp

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_same_in_float64
from tests.properties import programs
from tests.properties.test_random_gradients import compiled, function_of, tensors_of, trained

SMALL = trained(queries=(1, 6), keys=(1, 7), widths=(1, 3, 5), dtypes=(torch.float64,))


def drawn(case):
    """The function of what is trained, and its tensors; rows without a live key, of which there are no differences, are
    left out with `safe_rows`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    named, mask = tensors_of(case)
    order = [name for name, tensor in named.items() if tensor is not None and name in case["needs"]]
    plain = function_of(case)

    def function_like(function):
        return lambda *given: function(*(named | dict(zip(order, given, strict=True))).values(), mask)

    return plain, function_like, [named[name] for name in order], named


def tangents_of(function):
    """The value and the tangent of it."""
    return lambda *given: jvp(function, given, tuple(x.cos() for x in given))


def in_float64(case):
    plain, function_like, given, named = drawn(case)
    for name, tensor in named.items():
        named[name] = None if tensor is None else tensor.double()
    return plain, function_like, [tensor.double() for tensor in given]


@hypothesis.given(SMALL)
@hypothesis.settings(max_examples=6)
def test_gradgradcheck(case):
    """Also of the gradient's tangents."""
    plain, function_like, given = in_float64(case | {"safe_rows": True})
    function = function_like(compiled(plain, "reference"))
    given = [tensor.requires_grad_() for tensor in given]
    checks = {"fast_mode": True, "nondet_tol": 1e-12}
    assert torch.autograd.gradgradcheck(function, given, **checks)


@hypothesis.given(SMALL)
@hypothesis.settings(max_examples=4)
def test_tangents_and_penalties_in_float64(case):
    """Inside of a compiled function, with a gradient of all of it."""
    plain, function_like, given = in_float64(case)
    given = [tensor.requires_grad_() for tensor in given]
    function, places = function_like(plain), tuple(range(len(given)))

    def loss(*given):
        return function(*given).sin().sum()

    def both(*given):
        return *tangents_of(function)(*given), *grad(loss, places)(*given)

    def run(call):
        results = call(*given)
        return *results, *torch.autograd.grad(sum(x.sin().sum() for x in results), given)

    with fusion.collect_reports() as reports:
        actual = run(compiled(both, "reference"))
    assert sum(report.fused for report in reports) == 2
    for ours, theirs in zip(actual, run(both), strict=True):
        assert_same_in_float64(ours, theirs, terms=torch.ones(()))


@hypothesis.given(trained())
@hypothesis.settings(max_examples=5)
def test_tangents_of_kernels(case):
    """The value is a kernel's."""

    def run(dtype, compile=False):
        found = []
        for _ in range(programs.draws(case)):
            plain, function_like, given, named = drawn(case)
            for name, tensor in named.items():
                named[name] = None if tensor is None else tensor.to(dtype or tensor.dtype)
            given = [tensor.to(dtype or tensor.dtype) for tensor in given]

            moved = tangents_of(function_like(plain))
            found.append((compiled(moved, "auto") if compile else moved)(*given))
        return [torch.stack(each) for each in zip(*found, strict=True)]

    with fusion.collect_reports() as reports:
        actual = run(None, compile=True)
    assert all(report.fused == 1 for report in reports)
    assert_as_exact_as_eager(actual, run(None), run(torch.float64), case["dtype"])
