"""Models whose weights are used elsewhere, on GPU kernels in Triton's interpreter."""

import pytest
import torch

from tests.numerics import assert_as_exact_as_eager
from tests.passes.test_aux_outputs import CASES, gradients, returned, run, tensors


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_results_are_eagers(function):
    inputs = tensors()
    ours, report = run(function, inputs)
    assert report.fused == len(report.sites) and not report.notes, [s.reason for s in report.sites]
    assert_as_exact_as_eager(ours, function(*inputs), function(*(x.double() for x in inputs)), check_strides=True)


def test_gradients_of_the_output_alone_are_the_kernels(monkeypatch):
    from fusion.codegen.triton.differentiable import Differentiable

    called = []
    real = Differentiable._gradients
    monkeypatch.setattr(Differentiable, "_gradients", lambda *args: called.append(1) or real(*args))
    inputs = tensors()
    torch._dynamo.reset()
    compiled = torch.compile(returned, backend="fusion", options={"inner": "aot_eager"})
    ours = gradients(lambda *args: (compiled(*args)[0],), inputs)
    eager = gradients(lambda *args: (returned(*args)[0],), inputs)
    exact = gradients(lambda *args: (returned(*args)[0],), [x.double() for x in inputs])
    assert_as_exact_as_eager(ours, eager, exact)
    assert called
