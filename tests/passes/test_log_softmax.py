"""The logarithm of a softmax beside the attention: it is the score less the logarithm of a sum, and no logarithm of a
weight, which may be zero."""

import math

import pytest
import torch
from torch.nn import functional as F

import fusion
from fusion.ir.expr import LOG_WEIGHT, walk
from tests.numerics import assert_as_exact_as_eager, wide

FILLS = {"none": 0.0, "-inf": -math.inf, "-1e4": -1e4, "-1e9": -1e9, "finfo.min": torch.finfo(torch.float32).min}


def causal(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def entropy(log, v):
    w = log.exp()
    return w @ v, -(w * log).sum(-1)


def largest(log, v):
    return log.exp() @ v, log.amax(-1), log.amin(-1)


def first(log, v):
    return log.exp() @ v, log[..., 0]


def whole(log, v):
    return log.exp() @ v, log


def divergence(log, v):
    uniform = torch.full_like(log, 1 / log.shape[-1])
    return log.exp() @ v, F.kl_div(log, uniform, reduction="sum")


def over_queries(log, v):
    return log.exp() @ v, log.clamp(min=-50.0).sum(-2)


def likelihood(log, v):
    return log.exp() @ v, F.nll_loss(log.flatten(0, 2), torch.zeros(log.shape[:-1].numel(), dtype=torch.long))


USES = (entropy, largest, first, whole, divergence, over_queries, likelihood)
LOSSES = (entropy, first, whole, over_queries, likelihood)


def masked(use, fill, scale=1 / 3):
    def function(q, k, v):
        s = q @ k.mT * scale
        s = s.masked_fill(~causal(s.shape[-1]), fill) if fill else s
        return use(s.log_softmax(-1), v)

    return function


def drawn(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(2, 2, n, 8, generator=generator).to(dtype) for _ in range(3)]


def run(call, inputs, gradients):
    given = [t.clone().requires_grad_(gradients) for t in inputs]
    out = call(*given)
    if not gradients:
        return [o.detach() for o in out]
    loss = sum(
        (o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).nan_to_num(0, 0, 0).sum() for o in out
    )
    loss.backward()
    return [o.detach() for o in out], [t.grad for t in given]


def check(function, n, emitter="auto", gradients=False, dtype=torch.float32):
    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})
        inputs = drawn(n, dtype)
        actual = run(compiled, inputs, gradients)
    assert_as_exact_as_eager(actual, run(function, inputs, gradients), run(function, wide(inputs), gradients))
    (site,) = [site for report in reports for site in report.sites]
    return site


@pytest.mark.one_in(7)
@pytest.mark.parametrize("n", [18, 200])
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("use", USES)
def test_values(use, fill, emitter, n):
    site = check(masked(use, FILLS[fill]), n, emitter)
    assert site.fused, site.reason
    assert LOG_WEIGHT in walk(*(aux.value for aux in site.spec.aux_outputs))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("use", LOSSES)
def test_gradients(use, fill, emitter):
    if use is entropy and fill == "-inf":
        pytest.skip("0 * inf: eager's are NaN")
    assert check(masked(use, FILLS[fill]), 50, emitter, gradients=True).fused


@pytest.mark.parametrize("use", USES)
def test_weights_that_vanish(use):
    """Weights of exp(-200) are 0 in float32; their logarithms are numbers."""
    site = check(masked(use, 0.0, scale=60.0), 70)
    assert site.fused and LOG_WEIGHT in walk(*(aux.value for aux in site.spec.aux_outputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    assert check(masked(whole, -math.inf), 70, dtype=dtype).fused
    check(masked(first, -math.inf), 70, gradients=True, dtype=dtype)


def test_a_sink_is_part_of_the_sum():
    def function(q, k, v):
        s = torch.cat([q @ k.mT / 3, torch.zeros_like(q[..., :1])], -1)
        log = s.log_softmax(-1)[..., :-1]
        return log.exp() @ v, log.clamp(min=-20.0).sum(-1)

    assert check(function, 60).fused


def test_rows_of_nothing_but_fills_and_a_log_softmax_of_its_own():
    def function(q, k, v):
        s = (q @ k.mT / 3).masked_fill(torch.arange(40)[:, None] < 3, -1e9)
        return s.softmax(-1) @ v, s.log_softmax(-1)

    assert check(function, 40).fused


def test_no_weights():
    """Not linear in a softmax: no attention."""
    (site,) = fusion.explain(lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v, *drawn(18)).sites
    assert not site.fused and "not linear" in site.reason
