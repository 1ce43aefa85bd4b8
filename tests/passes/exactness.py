"""One function through the whole backend and in eager mode: outputs and gradients by the house rule."""

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager

EMITTERS = ("reference", "auto")
WAYS = [
    pytest.param(
        dtype,
        emitter,
        marks=[pytest.mark.long] if emitter == "reference" and dtype.itemsize == 2 else [],
        id=f"{dtype}-{emitter}",
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for emitter in EMITTERS
]
"""(dtype, emitter): the reference interpreter runs what kernels run, by default in float32 alone."""


def padded(dtype: torch.dtype, length: int, batch: int = 3) -> list[torch.Tensor]:
    """Q, K, V of two heads, and which keys are live: the first of the batch is padded on the left, the second on the
    right, the third everywhere."""
    live = torch.ones(batch, length, dtype=torch.bool)
    live[0, :11], live[1, length - 7 :], live[2] = False, False, False
    return [*(torch.randn(batch, 2, length, 8, dtype=dtype) for _ in range(3)), live]


def as_exact_as_eager(function, given, emitter: str = "auto", gradients: bool = False, dtype=None):
    """Assert that the compiled function is as exact as eager; returns the report's sites.

    given: floating-point inputs, and others that are passed on as they are. gradients: compared as well, of all inputs
    that are floating point.
    """

    def run(callable_, wide: bool):
        inputs = [x.detach().double() if wide and x.is_floating_point() else x.detach() for x in given]
        wanted = [x.requires_grad_() for x in inputs if gradients and x.is_floating_point()]
        with torch.set_grad_enabled(gradients):
            out = callable_(*inputs)
            if not gradients:
                return out, ()
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
            return out, torch.autograd.grad((out * weights).sum(), wanted)

    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})
        actual = run(compiled, False)
    assert_as_exact_as_eager(actual, run(function, False), run(function, True), dtype)
    return [site for report in reports for site in report.sites]
