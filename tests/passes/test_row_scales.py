"""Training where rows are divided by something else than their sum: "+ eps", softmax1, quotients by log-sums."""

import contextlib
import functools
import math

import pytest
import torch

from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir.request import PLAIN
from fusion.runtime.guards import failures_raised
from fusion.runtime.kernels import kernel_of
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import as_exact_as_eager


def scores(q, k, bias):
    return q @ k.mT * 0.3 * bias


def live(q, k):
    """Causal, and of the first three rows nothing."""
    rows = torch.arange(q.shape[2])[:, None]
    return (torch.arange(k.shape[2]) <= rows) & (rows > 2)


def sum_and_epsilon(q, k, v, bias):
    e = scores(q, k, bias).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def one_more(q, k, v, bias):
    """softmax1, stably."""
    s = scores(q, k, bias)
    m = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - m).exp()
    return (e / (e.sum(-1, keepdim=True) + (-m).exp())) @ v


def one_more_than_the_detached(q, k, v, bias):
    s = scores(q, k, bias)
    m = s.amax(-1, keepdim=True).detach()
    e = (s - m).exp()
    return (e / (e.sum(-1, keepdim=True) + (-m).exp())) @ v


def detached_maximum_and_epsilon(q, k, v, bias):
    s = scores(q, k, bias)
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def clamped_and_detached_maximum_and_epsilon(q, k, v, bias):
    s = scores(q, k, bias)
    e = (s - s.amax(-1, keepdim=True).clamp(min=0).detach()).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def under_a_mask(q, k, v, bias):
    """0 / 0.5 in rows without a live key."""
    e = scores(q, k, bias).masked_fill(~live(q, k), -math.inf).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def times_a_mask(q, k, v, bias):
    e = scores(q, k, bias).exp() * live(q, k)
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def at_least(q, k, v, bias):
    """No gradient through the sum of rows of which it is small."""
    e = (scores(q, k, bias) - 3).masked_fill(~live(q, k), -math.inf).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=0.7)) @ v


def normalized(q, k, v, bias):
    """Nor in rows without a live key, where the sum is 0."""
    e = (q @ k.mT * 0.3 + torch.where(live(q, k), 0.0, -1e4)).exp()
    return torch.nn.functional.normalize(e, p=1, dim=-1).to(v.dtype) @ (v * bias[..., None])


def powers_of_the_sum(q, k, v, bias):
    e = scores(q, k, bias).exp()
    return (e / (e.sum(-1, keepdim=True).sqrt() + e.sum(-1, keepdim=True))) @ v


def nothing_but_tiny(q, k, v, bias):
    """Exponentials below float32's range: weights of 0."""
    e = (scores(q, k, bias) - 120).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def less_the_log_sum(q, k, v, bias):
    s = q @ k.mT + bias
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def less_the_log_sum_of_fills(q, k, v, bias):
    """The logarithm is lost beside the fill: every weight of a dead row is 1."""
    s = scores(q, k, bias) + (~live(q, k)).to(q.dtype) * torch.finfo(q.dtype).min
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def less_more_than_the_log_sum(q, k, v, bias):
    """softmax1 by its logarithms: 0 in rows without a live key."""
    s = scores(q, k, bias).masked_fill(~live(q, k), -math.inf)
    return (s - torch.nn.functional.softplus(s.logsumexp(-1, keepdim=True))).exp() @ v


def less_the_log_sum_and_a_sink(q, k, v, bias):
    s = scores(q, k, bias)
    log_sum = s.logsumexp(-1, keepdim=True)
    return (s - torch.logaddexp(log_sum, torch.full_like(log_sum, 0.5))).exp() @ v


def tiny_epsilon(q, k, v, bias):
    """The key of the maximum has a term that is less than rounding."""
    s = scores(q, k, bias)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@pytest.fixture(autouse=True)
def _no_silent_fallback():
    """A kernel that fails is left for the reference interpreter, whose numbers would pass."""
    with failures_raised():
        yield


def times_a_function_of_the_log_sum(q, k, v, bias):
    """A sink that is a tensor, by the logarithm of the sum."""
    s = q @ k.mT
    return (s.softmax(-1) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - bias[:, :, :1])) @ v


KERNELS = [
    sum_and_epsilon, one_more, one_more_than_the_detached, detached_maximum_and_epsilon,
    clamped_and_detached_maximum_and_epsilon, under_a_mask, times_a_mask, at_least, normalized, powers_of_the_sum,
    nothing_but_tiny, less_the_log_sum, less_the_log_sum_of_fills, less_more_than_the_log_sum,
    less_the_log_sum_and_a_sink, tiny_epsilon,
]  # fmt: skip


@pytest.mark.parametrize("interpreter", [False, True])
def test_logarithms_that_float32_loses_and_float64_keeps(interpreter):
    """Beside a fill of -1e9 every weight of a dead row is 1 in float32, as it is in float64 beside one of -1e30."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 17, 16) for _ in range(3)]

    def function(q, k, v, fill=1e9):
        s = (q @ k.mT * 0.2).add((live(q, k)).to(q.dtype) - 1, alpha=fill)
        return (s - s.logsumexp(-1, keepdim=True)).exp() @ v

    def results(call, dtype=torch.float32):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        out = call(*given)
        return out, *torch.autograd.grad(out.square().sum(), given)

    torch._dynamo.reset()
    with interpreted() if interpreter else contextlib.nullcontext():
        ours = results(torch.compile(function, backend="fusion", options={"inner": "eager"}))
    assert_as_exact_as_eager(ours, results(function), results(functools.partial(function, fill=1e30), torch.float64))


def maximum_and_epsilon(q, k, v, bias):
    s = scores(q, k, bias)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def ties_of_the_maximum(q, k, v, bias):
    """amax divides its gradient among the largest."""
    s = scores(q, k, bias).clamp(max=0.25)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


def shifted_by_the_maximum_but_not_in_the_sum(q, k, v, bias):
    s = scores(q, k, bias)
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e / (e.sum(-1, keepdim=True) + (-s.amax(-1, keepdim=True)).exp())) @ v


BY_THE_REFERENCE = [
    maximum_and_epsilon,
    ties_of_the_maximum,
    shifted_by_the_maximum_but_not_in_the_sum,
    times_a_function_of_the_log_sum,
]


def given(dtype=torch.float32, n=21, m=21):
    return [
        *(torch.randn(2, 2, rows, 8, dtype=dtype) for rows in (n, m)), torch.randn(2, 2, m, 12, dtype=dtype),
        torch.randn(2, 1, m, dtype=dtype),
    ]  # fmt: skip


@contextlib.contextmanager
def kernels(emitter):
    """With the emitter's name as the option has it."""
    if emitter != "triton":
        yield emitter
        return
    pytest.importorskip("triton", reason="kernels need triton")
    with interpreted():
        yield "auto"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("emitter", ["reference", "auto", "triton"])
@pytest.mark.parametrize("function", [*KERNELS, *BY_THE_REFERENCE], ids=lambda f: f.__name__)
def test_is_as_exact_as_eager(function, emitter):
    with kernels(emitter) as name:
        # In float32 softmaxes in Triton's interpreter are near the rule's bound anyway.
        dtype = torch.bfloat16 if emitter == "triton" else torch.float32
        (site,) = as_exact_as_eager(function, given(dtype), name, gradients=True)
        assert site.fused, site.reason
        if emitter == "auto":
            spec = site.attentions[0].spec
            has_kernels = isinstance(kernel_of(spec, "cpu", PLAIN, True), TrainingKernel)
            assert has_kernels == (function in KERNELS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [sum_and_epsilon, one_more, maximum_and_epsilon], ids=lambda f: f.__name__)
def test_in_half_precision(function, dtype, emitter):
    as_exact_as_eager(function, given(dtype), emitter, gradients=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("function", [sum_and_epsilon, one_more, at_least], ids=lambda f: f.__name__)
def test_of_many_keys_and_peaked_rows(function, emitter):
    """With products of float32 in Triton's interpreter a softmax is over the rule there as well."""
    q, *others = given(n=40, m=40 if function is at_least else 150)
    as_exact_as_eager(function, [q * 3, *others], emitter, gradients=True)


@pytest.mark.parametrize("emitter", ["reference", "auto", "triton"])
def test_what_overflows_in_eager_is_finite(emitter):
    """As for a softmax that is written as exp(x) / exp(x).sum()."""
    q, k, v, bias = given()
    inputs = [(x * 40 if x is q else x).requires_grad_() for x in (q, k, v, bias)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with kernels(emitter) as name:
        run = torch.compile(
            sum_and_epsilon, backend="fusion", options={"inner": "eager", "emitter": name, "strict": True}
        )
        found = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    assert not sum_and_epsilon(*inputs).isfinite().all()
    for ours, theirs in zip(found, torch.autograd.grad(sum_and_epsilon(*exact).square().sum(), exact), strict=True):
        assert ours.isfinite().all() and theirs.isfinite().all()
