"""Heads of scores or weights that are mixed by a linear layer or a convolution ("talking heads")."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.passes.pullback.heads import MOST_HEADS
from fusion.refusals import Reason
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager

B, H, N, D = 2, 4, 37, 24
INF = math.inf
EAGER = {"inner": "eager"}


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def drawn(dtype=torch.float32, h=H, n_q=N, n_k=N, batch=(B,), d_v=D):
    """q, k, v, the matrices that mix scores and weights, and what is added to them."""
    torch.manual_seed(0)
    shapes = ((*batch, h, n_q, D), (*batch, h, n_k, D), (*batch, h, n_k, d_v), (h, h), (h,), (h, h), (h,))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def causal(s):
    live = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    return s.masked_fill(~live, -INF)


def layer(x, matrix, bias=None):
    return F.linear(x.permute(0, 2, 3, 1), matrix, bias).permute(0, 3, 1, 2)


def convolution(x, matrix, bias=None):
    return F.conv2d(x, matrix[:, :, None, None], bias)


def as_cait(q, k, v, pre, pre_bias, post, post_bias):
    w = layer((q * D**-0.5) @ k.mT, pre, pre_bias).softmax(-1)
    return layer(w, post, post_bias) @ v


def by_convolutions(q, k, v, pre, pre_bias, post, post_bias):
    w = causal(convolution(q @ k.mT * D**-0.5, pre)).softmax(-1)
    return convolution(w, post) @ v


def scores_alone(q, k, v, pre, pre_bias, post, post_bias):
    return (layer(q @ k.mT, pre, pre_bias) * D**-0.5).softmax(-1) @ v


def weights_alone(q, k, v, pre, pre_bias, post, post_bias):
    return layer(causal(q @ k.mT * D**-0.5).softmax(-1), post, post_bias) @ v


def with_a_bias_before(q, k, v, pre, pre_bias, post, post_bias):
    """As in EfficientFormerV2: a matrix for every head is added to the scores that are mixed."""
    bias = torch.sin(torch.arange(q.shape[1] * q.shape[2] * k.shape[2]).to(q.dtype)).view(-1, q.shape[2], k.shape[2])
    return convolution(convolution(q @ k.mT * D**-0.5 + bias, pre, pre_bias).softmax(-1), post, post_bias) @ v


def with_biases_behind(q, k, v, pre, pre_bias, post, post_bias):
    """By head and distance, by pair, by key; and a soft cap."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    pairs = torch.cos((i * k.shape[2] + j).to(q.dtype))
    s = 5 * torch.tanh(layer(q @ k.mT * D**-0.5, pre) / 5) - pre_bias[:, None, None] * (i - j).abs() + pairs
    return layer((s + v[:, :1, None, :, 0]).softmax(-1), post) @ v


def with_squares_mixed(q, k, v, pre, pre_bias, post, post_bias):
    return layer(torch.relu(q @ k.mT).square() * 0.1, pre, pre_bias).softmax(-1) @ v


def with_padding(q, k, v, pre, pre_bias, post, post_bias):
    keep = torch.arange(k.shape[2]) < k.shape[2] - 5
    s = layer(q @ k.mT * D**-0.5, pre).masked_fill(~keep, torch.finfo(q.dtype).min)
    return layer(s.softmax(-1).masked_fill(~keep, 0), post) @ v


def with_a_sink(q, k, v, pre, pre_bias, post, post_bias):
    s = layer(q @ k.mT * D**-0.5, pre)
    s = torch.cat([s, pre_bias[:, None, None].expand(*s.shape[:3], 1)], -1)
    return layer(s.softmax(-1)[..., :-1], post) @ v


def beside_the_mixed(q, k, v, pre, pre_bias, post, post_bias):
    """As x-transformers: heads are added to what is mixed of them."""
    s = q @ k.mT * D**-0.5
    s = s + convolution(s, pre) + pre_bias[:, None, None]
    w = causal(s).softmax(-1)
    return (layer(w, post, post_bias) + w) @ v


def by_hand(q, k, v, pre, pre_bias, post, post_bias):
    s = layer(q @ k.mT * D**-0.5, pre)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return layer(e / e.sum(-1, keepdim=True), post, post_bias) @ v


def with_rows_without_a_key(q, k, v, pre, pre_bias, post, post_bias):
    live = torch.arange(k.shape[2]) < torch.arange(q.shape[2])[:, None]
    w = layer(q @ k.mT * D**-0.5, pre).masked_fill(~live, -INF).softmax(-1)
    return layer(w, post) @ v


def with_heads_last(q, k, v, pre, pre_bias, post, post_bias):
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    s = F.linear(torch.einsum("bihd,bjhd->bijh", q, k) * D**-0.5, pre, pre_bias)
    return torch.einsum("bijh,bjhe->bihe", F.linear(s.softmax(2), post), v)


def by_einsums(q, k, v, pre, pre_bias, post, post_bias):
    """As vit-pytorch's CaiT."""
    s = torch.einsum("b h i j, h g -> b g i j", torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5, pre)
    w = torch.einsum("b h i j, h g -> b g i j", s.softmax(-1), post)
    return torch.einsum("b h i j, b h j d -> b h i d", w, v)


def by_constants(q, k, v, pre, pre_bias, post, post_bias):
    """The mean of all heads is taken off."""
    others = torch.eye(q.shape[1], dtype=q.dtype) - 1 / q.shape[1]
    s = torch.einsum("bhij,gh->bgij", q @ k.mT * D**-0.5, others)
    return torch.einsum("bhij,gh->bgij", s.softmax(-1), torch.ones_like(others)) @ v


def by_einsums_in_other_orders(q, k, v, pre, pre_bias, post, post_bias):
    s = torch.einsum("gh,bhij->bijg", pre, causal(q @ k.mT * D**-0.5).clamp(-1e3))
    w = torch.einsum("bijh,hg->bgij", s.softmax(2), post)
    return torch.einsum("bhij,bhje->bihe", w, v)


SPELLINGS = (
    as_cait, by_convolutions, by_einsums, by_einsums_in_other_orders, by_constants, scores_alone, weights_alone,
    with_a_bias_before, with_biases_behind, with_squares_mixed, with_padding, with_a_sink,
    beside_the_mixed, by_hand,
    with_rows_without_a_key, with_heads_last,
)  # fmt: skip


def run(function, *inputs, dtype=None):
    """The report, after the compiled function was compared with eager."""
    with torch.no_grad(), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"strict": True} | EAGER)
        assert_runs_as_exact_as_eager(compiled, function, *inputs, dtype=dtype)
    (site,) = reports[0].sites
    assert site.fused and site.validated.startswith("values in"), str(site)
    return reports[0]


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(function):
    report = run(function, *drawn())
    (site,) = report.sites
    assert "sum over h of" in site.spec.formula() and "whole_rows" in site.sources[0]
    assert "schedule   whole_rows" in str(report)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [as_cait, with_a_bias_before, with_padding], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(function, dtype):
    run(function, *drawn(dtype), dtype=dtype)


@pytest.mark.parametrize("h", [1, 2, 3, 5, 16, 32])
def test_numbers_of_heads(h):
    run(as_cait, *drawn(h=h))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("n_q", "n_k", "d_v"), [(1, 70, D), (3, 1, D), (70, 33, 5), (16, 1100, 40), (48, 8, D), (49, 519, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes(n_q, n_k, d_v, dtype):
    run(with_biases_behind, *drawn(dtype, n_q=n_q, n_k=n_k, d_v=d_v), dtype=dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 37), (37, 1)])
@pytest.mark.parametrize("function", [by_einsums, by_convolutions, with_heads_last], ids=lambda f: f.__name__)
def test_sizes_of_one(function, n_q, n_k):
    run(function, *drawn(n_q=n_q, n_k=n_k))


def test_heads_without_a_batch():
    def attention(q, k, v, pre, pre_bias, post, post_bias):
        s = F.linear((q @ k.mT).permute(1, 2, 0), pre, pre_bias).permute(2, 0, 1)
        return F.linear(s.softmax(-1).permute(1, 2, 0), post).permute(2, 0, 1) @ v

    run(attention, *drawn(batch=()))


def test_two_batches_and_strides():
    def attention(q, k, v, pre, pre_bias, post, post_bias):
        s = F.linear((q @ k.mT).movedim(-3, -1), pre, pre_bias).movedim(-1, -3)
        return (F.linear(s.softmax(-1).movedim(-3, -1), post).movedim(-1, -3) @ v).transpose(-2, -3)

    q, k, v, *rest = drawn(batch=(3, 2))
    k, v = (x[:1, :, :, :, ::2].contiguous()[..., None].expand(3, -1, -1, -1, -1, 2).flatten(-2) for x in (k, v))
    run(attention, q.transpose(-1, -2).contiguous().mT, k, v, *rest)


def test_keys_that_heads_share():
    def attention(q, k, v, *rest):
        return as_cait(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v)), *rest)

    run(attention, *drawn())


def test_infinite_and_large_values():
    """Rows that see NaN or an infinity are NaN, and no other; large scores do not overflow."""
    q, k, v, pre, pre_bias, post, post_bias = drawn()
    pre, post = pre.abs(), post.abs()
    q[0, 1, 3] = math.nan
    q[1, 2, 5] = 1e18
    with torch.no_grad():
        got = torch.compile(as_cait, backend="fusion", options=EAGER)(q, k, v, pre, pre_bias, post, post_bias)
        want = as_cait(q, k, v, pre, pre_bias, post, post_bias)
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any() and not want.isnan().all()
    finite = ~want.isnan()
    exact = as_cait(*(x.double() for x in (q, k, v, pre, pre_bias, post, post_bias)))
    assert_as_exact_as_eager(got[finite], want[finite], exact[finite])


def differentiated(run, inputs):
    """The output and the gradients of all inputs that have one."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    gradients = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
    return out, *(torch.zeros(()) if g is None else g for g in gradients)


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_gradients(function):
    inputs = drawn()
    with fusion.collect_reports() as reports:
        got = differentiated(torch.compile(function, backend="fusion", options={"strict": True} | EAGER), inputs)
    exact = differentiated(function, [x.double() for x in inputs])
    assert_as_exact_as_eager(got, differentiated(function, inputs), exact)
    assert reports[0].sites[0].validated.endswith("and their gradients")


def test_gradients_in_half_precision_where_they_are_asked_for():
    inputs = drawn(torch.bfloat16)
    compiled = torch.compile(as_cait, backend="fusion", options={"strict": True} | EAGER)
    exact = differentiated(as_cait, [x.double() for x in inputs])
    assert_as_exact_as_eager(differentiated(compiled, inputs), differentiated(as_cait, inputs), exact, torch.bfloat16)


@pytest.mark.parametrize("place", ["weights", "mixed"])
def test_dropout(place):
    """Kernel and reference leave out the same weights, forward and backward."""

    def attention(q, k, v, pre, pre_bias, post, post_bias):
        w = F.dropout(layer(q @ k.mT * D**-0.5, pre).softmax(-1), 0.4 if place == "weights" else 0.0)
        return F.dropout(layer(w, post, post_bias), 0.4 if place == "mixed" else 0.0) @ v

    inputs, results = drawn(), []
    for emitter in ("auto", "reference"):
        torch._dynamo.reset()
        compiled = torch.compile(attention, backend="fusion", options={"strict": True, "emitter": emitter} | EAGER)
        for dtype in (torch.float32, torch.float64) if emitter == "reference" else (torch.float32,):
            torch.manual_seed(3)
            results.append(differentiated(compiled, [x.to(dtype) for x in inputs]))
    assert_as_exact_as_eager(*results)


def test_tangents():
    """Kernels for the tangents of plain attention would not mix them."""

    def tangent(q, k, v, of_q, of_v, *rest):
        return torch.func.jvp(lambda q, v: as_cait(q, k, v, *rest), (q, v), (of_q, of_v))

    q, k, v, *rest = drawn()
    inputs = [q, k, v, torch.randn_like(q), torch.randn_like(v), *rest]
    options = {"strict": True, "transforms": "always"} | EAGER
    with fusion.collect_reports() as reports:
        assert_runs_as_exact_as_eager(torch.compile(tangent, backend="fusion", options=options), tangent, *inputs)
    assert reports[0].fused == 1


def test_lengths_that_change():
    compiled = torch.compile(as_cait, backend="fusion", dynamic=True, options=EAGER)
    with torch.no_grad(), fusion.collect_reports() as reports:
        for n in (33, 40, 51):
            assert_runs_as_exact_as_eager(compiled, as_cait, *drawn(n_q=n, n_k=n))
    assert len(reports) == 1 and reports[0].fused == 1


def test_numbers_of_heads_that_change():
    """Dynamo makes them dynamic at the second, and kernels need each of them."""
    compiled = torch.compile(as_cait, backend="fusion", options={"strict": True} | EAGER)
    with torch.no_grad():
        for h in (4, 6, 8):
            assert_runs_as_exact_as_eager(compiled, as_cait, *drawn(h=h))


def test_the_reference_and_other_emitters():
    inputs = drawn()
    with torch.no_grad():
        reference = torch.compile(as_cait, backend="fusion", options={"emitter": "reference", "strict": True} | EAGER)
        assert_runs_as_exact_as_eager(reference, as_cait, *inputs)
        with interpreted():
            torch._dynamo.reset()
            (site,) = fusion.explain(as_cait, *inputs).sites
    assert site.refusal.kind is Reason.HEADS_MIXED and "kernels for GPUs compute them one by one" in site.reason


# --- what is another computation ----------------------------------------------------------------------------------


def more_heads_than_before(q, k, v, pre, pre_bias, post, post_bias):
    more = torch.cat([pre, post], 0)
    return layer(q @ k.mT, more).softmax(-1) @ torch.cat([v, v], 1)


def heads_twice(q, k, v, pre, pre_bias, post, post_bias):
    return layer(torch.relu(layer(q @ k.mT, pre)), post).softmax(-1) @ v


def with_unmixed_weights(q, k, v, pre, pre_bias, post, post_bias):
    w = (q @ k.mT).softmax(-1)
    return (w - layer(w, post)) @ v


def with_unmixed_scores(q, k, v, pre, pre_bias, post, post_bias):
    s = q @ k.mT
    return (s * layer(s, pre)).softmax(-1) @ v


def beside_masked_scores(q, k, v, pre, pre_bias, post, post_bias):
    """-inf and half of it with the other sign are NaN."""
    s = (q @ k.mT * D**-0.5).masked_fill((torch.arange(H)[:, None, None] == 1) & (torch.arange(N) > 9), -INF)
    return (s + layer(s, post.abs() - 1.5 * torch.eye(H, dtype=q.dtype))).softmax(-1) @ v


def of_two_softmaxes(q, k, v, pre, pre_bias, post, post_bias):
    """What follows is linear in neither."""
    w = (q @ k.mT * 0.2).softmax(-1) - 0.3 * (k @ q.mT * 0.2).softmax(-1)
    return layer(w, 5 * post).clamp(-1, 1) @ v


def weights_twice(q, k, v, pre, pre_bias, post, post_bias):
    return layer(layer((q @ k.mT).softmax(-1), pre, pre_bias), post) @ v


def over_two_dimensions(q, k, v, pre, pre_bias, post, post_bias):
    """Scores over heads, weights over batches, of which there are as many."""
    q, k, v = (x.repeat(H // B, 1, 1, 1) for x in (q, k, v))
    s = F.linear((q @ k.mT).movedim(1, -1), pre).movedim(-1, 1)
    return F.linear(s.softmax(-1).movedim(0, -1), post).movedim(-1, 0) @ v


def gates_twice(q, k, v, pre, pre_bias, post, post_bias):
    return layer(torch.relu(layer(torch.relu(q @ k.mT), pre)), post) @ v


def gated_weights(q, k, v, pre, pre_bias, post, post_bias):
    return layer(torch.sigmoid(q @ k.mT), post, post_bias) @ v


def normalised_behind(q, k, v, pre, pre_bias, post, post_bias):
    w = layer((q @ k.mT).softmax(-1), post.abs())
    return w / w.sum(-1, keepdim=True) @ v


def scaled_by_mixed_scores(q, k, v, pre, pre_bias, post, post_bias):
    s = q @ k.mT * D**-0.5
    return s.softmax(-1) * layer(s, pre) @ v


def with_neighbours(q, k, v, pre, pre_bias, post, post_bias):
    return F.conv2d(q @ k.mT, pre[:, :, None, None].expand(-1, -1, 3, 3), padding=1).softmax(-1) @ v


def moved_and_thinned(q, k, v, pre, pre_bias, post, post_bias):
    """A border of zeros, then every second: as many, but others."""
    s = F.conv2d((q @ k.mT)[:, :, :3, :3], pre[:, :, None, None], padding=1, stride=2)
    return s.softmax(-1) @ v[:, :, :3]


def in_two_groups(q, k, v, pre, pre_bias, post, post_bias):
    return F.conv2d(q @ k.mT, pre[:, : H // 2, None, None], groups=2).softmax(-1) @ v


def without_a_softmax(q, k, v, pre, pre_bias, post, post_bias):
    return torch.sigmoid(layer(q @ k.mT, pre)) @ v


def weights_that_are_returned(q, k, v, pre, pre_bias, post, post_bias):
    w = layer((q @ k.mT).softmax(-1), post)
    return w @ v, w


def over_keys(q, k, v, pre, pre_bias, post, post_bias):
    matrix = torch.outer(pre_bias.sum() + torch.arange(N), torch.arange(N).to(q.dtype)) / N**2
    return F.linear((q @ k.mT).softmax(-1), matrix) @ v


OTHERS = (
    more_heads_than_before, heads_twice, with_unmixed_weights, with_unmixed_scores, with_neighbours, moved_and_thinned,
    in_two_groups, without_a_softmax, weights_that_are_returned, over_keys, beside_masked_scores, of_two_softmaxes,
    weights_twice, over_two_dimensions, gates_twice, gated_weights, normalised_behind, scaled_by_mixed_scores,
)  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_others_stay(function):
    inputs = drawn()
    with torch.no_grad(), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options=EAGER)
        assert_runs_as_exact_as_eager(compiled, function, *inputs)
    assert not any(site.spec and site.spec.mixing for site in reports[0].sites if site.fused), str(reports[0])


def test_too_many_heads():
    (site,) = fusion.explain(as_cait, *drawn(h=MOST_HEADS + 1, n_q=5, n_k=5)).sites
    assert site.refusal.kind is Reason.HEADS_MIXED and "33 heads are mixed; kernels mix up to 32" in site.reason


def test_few_rows_stay():
    with torch.no_grad():
        report = fusion.explain(as_cait, *drawn(n_q=3))
        assert not report.fused and "pay from 12 rows on, and there are 3" in report.sites[0].reason, str(report)
        assert fusion.explain(as_cait, *drawn(n_q=12)).fused


def test_training_in_half_precision_stays():
    q, *rest = drawn(torch.bfloat16)
    report = fusion.explain(as_cait, q.requires_grad_(), *rest)
    assert not report.fused and re.search("come from the reference interpreter", report.sites[0].reason), str(report)
