"""Gradients that a model's own code turns: hooks on tensors, and operands that none flows to."""

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_over_draws


def attention(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


def hook_on_scores(q, k, v):
    s = q @ k.mT
    s.register_hook(lambda gradient: gradient * 3)
    return s.softmax(-1) @ v


def hook_on_queries(q, k, v):
    q = q * 2
    q.register_hook(lambda gradient: gradient * 3)
    return attention(q, k, v)


def hook_on_the_output(q, k, v):
    out = attention(q, k, v)
    out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return out.sin()


def product_without_gradients(q, k, v):
    with torch.no_grad():
        s = q @ k.mT
    return (s + v[..., 0][..., None, :]).softmax(-1) @ v


def compared_alone(q, k, v):
    return torch.where(q @ k.mT > 0, v[..., 0][..., None, :], -1.0).softmax(-1) @ v


def rounded_scores(q, k, v):
    return (q @ k.mT).floor().softmax(-1) @ v


def signs_of_scores(q, k, v):
    return torch.sign(q @ k.mT).softmax(-1) @ v


def signs_of_positions(q, k, v):
    return (v @ v.mT + torch.sgn(q[..., :1] - k[..., 0][..., None, :])).softmax(-1) @ v


def signs_and_steps(q, k, v):
    s = q @ k.mT
    return torch.where(s > 0, s.sign() * k[..., 0][..., None, :].sign(), s.trunc()).softmax(-1) @ v


def signs_returned(q, k, v):
    w = (v @ v.mT).softmax(-1)
    return torch.cat([w @ v, ((q @ k.mT).sign() * 0.1 + 1.0).sigmoid() @ v], -1)


def times_zero(q, k, v):
    return (v @ v.mT + q @ k.mT * 0.0).softmax(-1) @ v


def detached_bias(q, k, v):
    return (v @ v.mT + (q[..., :1] * k[..., 0][..., None, :]).detach()).softmax(-1) @ v


def detached_queries(q, k, v):
    return attention(q.detach(), k, v)


def mixed(x):
    return torch.einsum("hij,hg->gij", x, torch.tensor([[0.6, -0.4], [0.3, 0.9]], dtype=x.dtype))


def detached_scores_mixed(q, k, v):
    return mixed((q @ k.mT * 0.3).detach()).softmax(-1) @ v


def mixed_scores_detached(q, k, v):
    return mixed(mixed(q @ k.mT * 0.3).detach().softmax(-1)) @ v


def detached_weights_mixed(q, k, v):
    return mixed((q @ k.mT * 0.3).softmax(-1).detach()) @ v


def mixed_weights_detached(q, k, v):
    w = (q @ k.mT * 0.3).softmax(-1)
    return (w + mixed(w)).detach() @ v


def only_mixed_weights_detached(q, k, v):
    w = (q @ k.mT * 0.3).softmax(-1)
    return (w + mixed(w).detach()) @ v


DETACHED_BESIDE_MIXED_HEADS = (
    detached_scores_mixed, mixed_scores_detached, detached_weights_mixed, mixed_weights_detached,
)  # fmt: skip


def run(function):
    def results(call, given):
        out = call(*(x * 1 for x in given))
        gradients = torch.autograd.grad(out.square().sum(), given, allow_unused=True)
        return out.detach(), {n: g for n, g in zip("qkv", gradients, strict=True) if g is not None}

    def draw():
        inputs = [torch.randn(2, 13, 16) for _ in range(3)]
        single, double = ([x.to(d).requires_grad_() for x in inputs] for d in (torch.float32, torch.float64))
        return results(compiled, single), results(function, single), results(function, double)

    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})
    with fusion.collect_reports() as reports:
        assert_as_exact_over_draws(draw)
    return reports


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [13, 300])
def test_a_result_that_is_rounded_later_gives_gradients_no_error(n, dtype):
    """The gradient of the scores needs the result as the product made it."""

    def rounded(q, k, v):
        return attention(q, k, v).to(dtype)

    def draw():
        inputs, upstream = [torch.randn(2, n, 16) for _ in range(3)], torch.randn(2, n, 16).to(dtype)
        single, double = ([x.to(d).requires_grad_() for x in inputs] for d in (torch.float32, torch.float64))
        results = (
            torch.autograd.grad(call(*given), given, upstream.to(of_results))
            for call, given, of_results in (
                (compiled, single, dtype), (rounded, single, dtype), (attention, double, torch.float64),
            )
        )  # fmt: skip
        return tuple((torch.zeros(()), dict(zip("qkv", found, strict=True))) for found in results)

    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(rounded, backend="fusion", options={"inner": "aot_eager", "training": "always"})
    with fusion.collect_reports() as reports:
        assert_as_exact_over_draws(draw)
    assert reports[0].fused == 1


@pytest.mark.parametrize("function", [hook_on_scores, hook_on_queries, hook_on_the_output])
def test_hooks_are_called(function):
    (report,) = run(function)
    assert not report.fused and any("hook" in note for note in report.notes), report


@pytest.mark.parametrize(
    "function",
    [product_without_gradients, compared_alone, rounded_scores, detached_bias, detached_queries, attention,
     signs_of_scores, signs_of_positions, signs_and_steps],
)  # fmt: skip
def test_what_no_gradient_flows_to_has_none(function):
    """Not zeros, which optimizers take for a gradient. `run` compares which operands have one."""
    (report,) = run(function)
    assert report.fused == 1


@pytest.mark.parametrize("function", [signs_returned, times_zero])
def test_a_gradient_of_zero_is_one(function):
    (report,) = run(function)
    assert report.fused


@pytest.mark.parametrize("function", [*DETACHED_BESIDE_MIXED_HEADS, only_mixed_weights_detached])
def test_what_no_gradient_flows_to_has_none_where_heads_are_mixed(function):
    (report,) = run(function)
    assert report.fused == (function is not only_mixed_weights_detached), report


def test_heads_mixed_twice_and_added():
    def function(q, k, v):
        s = q @ k.mT * 0.3
        m = mixed(s)
        return (s + m + m).softmax(-1) @ v

    (report,) = run(function)
    assert "must be used pointwise" in report.sites[0].reason


def test_mixed_heads_normalised_by_hand_stay_in_training():
    """The gradient of a row without a live key is 0 in eager mode."""

    def function(q, k, v):
        s = (q @ k.mT * 0.3).masked_fill(torch.arange(13) > torch.arange(13)[:, None] - 1, -1e4)
        return mixed(torch.exp(s - torch.logsumexp(s, -1, keepdim=True))) @ v

    (report,) = run(function)
    assert not report.fused, report
