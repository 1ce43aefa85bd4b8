"""Weights that are used elsewhere, and statistics of them, are written by the kernel of the attention."""

import copy

import pytest
import torch
from torch import nn

import fusion
from fusion.ir.spec import Reduction
from fusion.report.report import collect_reports
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager

EMITTERS = ("auto", "reference")


def scores(q, k):
    return q @ k.mT * 0.25


def weights(q, k):
    return torch.softmax(scores(q, k), -1)


def causal(q, k):
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores(q, k).masked_fill(later, float("-inf"))


def returned(q, k, v):
    w = weights(q, k)
    return w @ v, w


def returned_masked(q, k, v):
    w = torch.softmax(causal(q, k), -1)
    return w @ v, w


def returned_dead_rows(q, k, v):
    """Every key of the first five rows is masked, by a large finite number: their weights are equal."""
    dead = torch.arange(q.shape[-2])[:, None] < 5
    w = torch.softmax(causal(q, k).masked_fill(dead, torch.finfo(q.dtype).min), -1)
    return w @ v, w


def returned_nothing_live(q, k, v):
    """Rows of NaN."""
    dead = torch.arange(q.shape[-2])[:, None] < 5
    w = torch.softmax(causal(q, k).masked_fill(dead, float("-inf")), -1)
    return w @ v, w.sum(-1), w


def merged_heads(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    w = torch.softmax(torch.bmm(q, k.mT) * 0.25, -1)
    return torch.bmm(w, v), w.view(2, 3, *w.shape[1:]).mean(1)


def transposed(q, k, v):
    w = weights(q, k)
    return w @ v, w.transpose(1, 2)[:, 3:].contiguous(), w.mT


def weighed(q, k, v):
    """Used again with a mask after the softmax, and a second product."""
    w = weights(q, k) * torch.linspace(0, 1, k.shape[-2])
    return w @ v, w, (w @ v[..., :4]).sum()


def sigmoid(q, k, v):
    w = torch.sigmoid(scores(q, k))
    return w @ v, w, w.sum(-2)


def entropy(q, k, v):
    w = weights(q, k)
    return w @ v, -(w * torch.log(w + 1e-9)).sum(-1)


def key_sums(q, k, v):
    w = weights(q, k)
    return w @ v, w.sum(-2), w.mean(dim=2, keepdim=True)


def masked_statistics(q, k, v):
    w = torch.softmax(causal(q, k), -1)
    return w @ v, w.sum(-2), w.amax(-1), w.square().sum(-1)


def extremes(q, k, v):
    w = weights(q, k)
    return w @ v, w.amax(-1), w.amin(-1), w.amax(-2), w.amin(2)


def logits(q, k, v):
    s = causal(q, k)
    return torch.softmax(s, -1) @ v, s.amax(-1), s.logsumexp(-1, keepdim=True)


def picked_logits(q, k, v):
    s = causal(q, k)
    w = torch.softmax(s, -1)
    return w @ v, s.max(-1).values, w.min(-1, keepdim=True)[0]


def over_all_heads(q, k, v):
    """QK-clip, and what is left of several dimensions."""
    s = causal(q, k)
    w = torch.softmax(s, -1)
    with torch.no_grad():
        clip = s.amax((0, 2, 3)), s.max(), s.detach().amax((-2, -1), keepdim=True)
    return w @ v, *clip, w.square().sum((1, 3))


def averaged_over_layers(q, k, v):
    w = weights(q, k)
    x = w @ v
    later = weights(x + q, k)
    return later @ v, (w + later) / 2, torch.stack([w, later]).mean((0, 2))


def merged_parts(q, k, v):
    """Attention over two parts of the keys, put together by their log-sum-exps."""
    (k1, k2), (v1, v2) = (x.split((x.shape[2] // 2, x.shape[2] - x.shape[2] // 2), 2) for x in (k, v))
    s1, s2 = scores(q, k1), scores(q, k2)
    l1, l2 = s1.logsumexp(-1, True), s2.logsumexp(-1, True)
    o1, o2 = torch.softmax(s1, -1) @ v1, torch.softmax(s2, -1) @ v2
    top = torch.maximum(l1, l2)
    f1, f2 = (l1 - top).exp(), (l2 - top).exp()
    return (o1 * f1 + o2 * f2) / (f1 + f2)


def log_sum_of_which_weights_are_made(q, k, v):
    s = causal(q, k)
    total = s.logsumexp(-1)
    return torch.exp(s - total[..., None]) @ v, total


def divided_late_beside_its_log_sum(q, k, v):
    """As FlashAttention's paper has it."""
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    return e @ v / total, m + total.log()


def two_products(q, k, v):
    w = weights(q, k)
    return w @ v, w @ (v * 2)[..., :4], w


def used_before(q, k, v):
    w = weights(q, k)
    importance = w.sum(-2)
    return torch.tanh(importance), w @ v


CASES = {
    returned: ["none"],
    returned_masked: ["none"],
    returned_dead_rows: ["none"],
    returned_nothing_live: ["none"],
    merged_heads: ["none"],
    transposed: ["none"],
    weighed: ["none"],
    sigmoid: ["none"],
    entropy: ["sum j"],
    key_sums: ["sum i", "sum i"],
    masked_statistics: ["max j", "sum i", "sum j"],
    extremes: ["max i", "max j", "min i", "min j"],
    logits: ["none", "none"],
    picked_logits: ["min j", "none"],
    over_all_heads: ["none", "none", "none", "none"],
    averaged_over_layers: ["none", "none"],
    merged_parts: ["none", "none"],
    log_sum_of_which_weights_are_made: ["none"],
    divided_late_beside_its_log_sum: ["none"],
    two_products: ["none"],
    used_before: ["sum i"],
}


def tensors(n=37, m=29, dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(2, 3, count, 16, dtype=dtype) for count in (n, m, m)]


def run(function, inputs, emitter="auto", inner="eager"):
    """The result of the compiled function, and its report."""
    torch._dynamo.reset()
    with collect_reports() as reports, failures_raised():
        out = torch.compile(function, backend="fusion", options={"emitter": emitter, "inner": inner})(*inputs)
    return out, reports[0]


def gradients(function, inputs):
    """Of the results' sum, each element times a number of its own; in the inputs' dtype."""
    given = [x.clone().requires_grad_() for x in inputs]
    results = [r for r in function(*given) if r.requires_grad]
    draw = torch.Generator().manual_seed(5)
    factors = [torch.randn(r.shape, generator=draw, dtype=torch.float64).to(r) for r in results]
    torch.autograd.backward(results, factors)
    return [x.grad for x in given]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_results_are_eagers(function, emitter):
    inputs = tensors()
    ours, report = run(function, inputs, emitter)
    assert report.fused == len(report.sites) and not report.notes, [s.reason for s in report.sites]
    assert_as_exact_as_eager(ours, function(*inputs), function(*(x.double() for x in inputs)), check_strides=True)
    found = [aux for site in report.sites for spec in site.specs for aux in spec.aux_outputs]
    told = sorted(f"{aux.reduction.value} {aux.over}".strip() for aux in found)
    assert told == CASES[function]
    assert all(site.validated.startswith("values") for site in report.sites)


@pytest.mark.parametrize("function", [entropy, key_sums, masked_statistics, logits, used_before])
def test_statistics_write_no_weights(function):
    _, report = run(function, tensors(), "reference")
    for aux in (f for site in report.sites for spec in site.specs for f in spec.aux_outputs):
        assert not {"i", "j"} <= {*aux.dims}


@pytest.mark.parametrize(
    "function", [returned, returned_masked, sigmoid, entropy, key_sums, extremes, logits, weighed, picked_logits]
)
def test_gradients_are_eagers(function):
    inputs = tensors(19, 23 if function is not logits else 19)
    torch._dynamo.reset()
    with failures_raised():
        compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})
        ours = gradients(compiled, inputs)
    assert_as_exact_as_eager(ours, gradients(function, inputs), gradients(function, [x.double() for x in inputs]))


IN_KERNELS = [returned_masked, sigmoid, entropy, key_sums, weighed, merged_parts, divided_late_beside_its_log_sum]


@pytest.mark.parametrize("function", IN_KERNELS)
def test_gradients_are_the_kernels(function, monkeypatch):
    def unused(*arguments, **aux_outputs):
        raise AssertionError("the reference interpreter has the gradient")

    monkeypatch.setattr("fusion.codegen.reference.backward", unused)
    inputs = tensors()
    torch._dynamo.reset()
    with failures_raised():
        compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager", "strict": True})
        ours = gradients(compiled, inputs)
    assert_as_exact_as_eager(ours, gradients(function, inputs), gradients(function, [x.double() for x in inputs]))


def test_the_report_says_which_gradients_kernels_do_not_have():
    inputs = [x.requires_grad_() for x in tensors()]
    _, report = run(logits, inputs)
    assert "gradient through m per row: the reference interpreter, as the key with the largest logit" in str(report)
    _, report = run(entropy, inputs)
    assert "gradient through" not in str(report)


def test_a_gradient_that_is_not_asked_for_takes_the_kernels(monkeypatch):
    from fusion.codegen.emitter import Backward
    from fusion.runtime.guards import GuardedTraining

    run = GuardedTraining.backward

    def without(self, *arguments):
        assert not Backward(*arguments).aux_outputs, "no gradient arrives at the weights"
        return run(self, *arguments)

    monkeypatch.setattr(GuardedTraining, "backward", without)
    inputs = tensors()
    torch._dynamo.reset()
    with failures_raised():
        compiled = torch.compile(returned, backend="fusion", options={"inner": "aot_eager"})
        ours = gradients(lambda *args: (compiled(*args)[0],), inputs)
    eager = gradients(lambda *args: (returned(*args)[0],), inputs)
    exact = gradients(lambda *args: (returned(*args)[0],), [x.double() for x in inputs])
    assert_as_exact_as_eager(ours, eager, exact)


def test_statistics_without_a_gradient_have_none():
    def watched(q, k, v):
        w = weights(q, k)
        with torch.no_grad():
            importance = w.sum(-2)
        return w @ v, importance, w.detach().amax(-1)

    given = [x.requires_grad_() for x in tensors()]
    out, importance, peak = torch.compile(watched, backend="fusion", options={"inner": "aot_eager"})(*given)
    assert out.requires_grad and not importance.requires_grad and not peak.requires_grad


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [returned, returned_masked, key_sums, entropy])
def test_half_precision(function, dtype):
    inputs = tensors(dtype=dtype)
    ours, report = run(function, inputs)
    assert report.fused == 1
    assert_as_exact_as_eager(ours, function(*inputs), function(*(x.double() for x in inputs)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (64, 64), (130, 257), (0, 5)])
@pytest.mark.parametrize("function", [returned_masked, key_sums, masked_statistics])
def test_lengths(function, lengths):
    inputs = tensors(*lengths)
    ours, _ = run(function, inputs)
    assert_as_exact_as_eager(ours, function(*inputs), function(*(x.double() for x in inputs)))


def test_rising_scores_scale_what_was_kept():
    """Each key's score is far above those before: the running maximum rises with every block."""
    q, k, v = tensors(40, 700)
    q, k = q.abs() + 0.5, (k.abs() + 0.5) * torch.linspace(0, 20, 700)[:, None]
    ours, _ = run(returned, [q, k, v])
    assert_as_exact_as_eager(ours, returned(q, k, v), returned(q.double(), k.double(), v.double()))


def test_gradients_of_log_sums_whose_logarithm_is_lost():
    """Beside a fill of -1e9 the exponential of a score less the log-sum-exp is 1 in float32, not 1/n; in float64 it is
    beside one of -1e30."""
    keep = torch.ones(17, 17)
    keep[3], keep[9, :12] = 0, 0
    inputs = tensors(17, 17)

    def logits(q, k, v, fill=1e9):
        s = scores(q, k).add(keep.to(q.dtype) - 1, alpha=fill)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    def results(call, dtype=torch.float32, **given):
        x = [y.detach().to(dtype).requires_grad_() for y in inputs]
        out, total = call(*x, **given)
        return torch.autograd.grad(out.square().sum() + (total * torch.linspace(1, 2, 17).to(dtype)).sum(), x)

    torch._dynamo.reset()
    with failures_raised():
        ours = results(torch.compile(logits, backend="fusion", options={"inner": "eager"}))
    assert_as_exact_as_eager(ours, results(logits), results(logits, torch.float64, fill=1e30))


@pytest.mark.parametrize("order", [1, -1])
def test_weights_below_the_smallest_normal_number_are_kept(order):
    """Scores up to 100 below the row's largest, which comes first or last."""

    def logarithms(q, k, v):
        w = torch.softmax(q @ k.mT, -1)
        return w @ v, w.log(), w

    q, k, v = (
        torch.ones(1, 1, 20, 1),
        order * torch.linspace(0, 100, 700)[None, None, :, None],
        torch.randn(1, 1, 700, 8),
    )
    ours, report = run(logarithms, [q, k, v])
    assert report.fused == 1
    eager = logarithms(q, k, v)
    assert (eager[2].isfinite() & (eager[2] < torch.finfo(torch.float32).tiny)).any() and eager[1].isfinite().all()
    assert_as_exact_as_eager(ours, eager, logarithms(q.double(), k.double(), v.double()))


def test_lengths_that_vary_compile_once():
    compiled = torch.compile(returned, backend="fusion", dynamic=True, options={"inner": "eager"})
    torch._dynamo.reset()
    with failures_raised():
        for n in (33, 47, 64):
            inputs = tensors(n, n + 3)
            ours, eager = compiled(*inputs), returned(*inputs)
            assert_as_exact_as_eager(ours, eager, returned(*(x.double() for x in inputs)))


def test_dropped_weights_are_those_that_are_multiplied():
    def dropped(q, k, v):
        w = torch.nn.functional.dropout(weights(q, k), 0.5)
        return w @ v, w

    q, k, v = tensors()
    (out, w), report = run(dropped, [q, k, v], inner="inductor")
    assert report.fused == 1
    eager = (w.double() @ v.double()).float()
    assert_as_exact_as_eager(out, w @ v, w.double() @ v.double(), name="the product with what was returned")
    assert 0.3 < float((w == 0).float().mean()) < 0.7 and eager.shape == out.shape


@pytest.mark.parametrize("averaged", [True, False])
def test_multihead_attention_with_its_default_arguments(averaged):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(48, 3, batch_first=True)
    x = torch.randn(2, 21, 48)

    def attend(module, x):
        return module(x, x, x, average_attn_weights=averaged)

    for used in (True, False):
        torch._dynamo.reset()

        def function(module, x, used=used):
            out, w = attend(module, x)
            return (out, w) if used else (out,)

        ours, report = run(lambda x, f=function: f(layer, x), [x])
        assert report.fused == len(report.sites) == 1
        exact = function(copy.deepcopy(layer).double(), x.double())
        assert_as_exact_as_eager(ours, function(layer, x), exact)


def test_reused_scores_are_no_weights():
    def function(q, k, v):
        s = scores(q, k)
        return torch.softmax(s, -1) @ v, s

    report = fusion.explain(function, *tensors())
    (site,) = report.sites
    assert not site.fused and "the attention scores are needed elsewhere" in site.reason


def test_an_operand_made_from_the_weights_is_refused():
    def function(q, k, v):
        w = weights(q, k)
        return w @ (v * w.sum(-2)[..., None])

    q, k, v = tensors()
    report = fusion.explain(function, q, k, v)
    assert not report.fused
    assert_as_exact_as_eager(
        *run(function, [q, k, v])[:1], function(q, k, v), function(*(x.double() for x in (q, k, v)))
    )


def test_the_spec_says_what_is_written():
    _, report = run(masked_statistics, tensors(), "reference")
    spec = report.sites[0].specs[0]
    assert {f.reduction for f in spec.aux_outputs} == {Reduction.SUM, Reduction.MAX}
    assert type(spec).from_json(spec.to_json()) == spec
