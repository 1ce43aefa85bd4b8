"""Weights that are divided by a sum of their own are an attention whose rows are divided by that sum."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_over_draws, assert_same


def weights(q, k):
    return torch.softmax(q @ k.mT * 0.25, -1)


def masked_softmax(q, k, v, mask):
    """As AllenNLP and its followers have it: masked scores are 0 in the softmax, and what is left is renormalised."""
    w = torch.softmax(q @ k.mT * 0.25 * mask, -1) * mask
    return (w / (w.sum(-1, keepdim=True) + 1e-13)) @ v


def nothing_added(q, k, v, mask):
    """The last of the batch has no live key: its rows are 0 / 0."""
    w = weights(q, k) * mask
    return w / w.sum(-1, keepdim=True) @ v


def clamped(q, k, v, mask):
    w = weights(q, k).masked_fill(mask == 0, 0.0)
    return torch.matmul(w / w.sum(dim=-1).clamp(min=1e-6).unsqueeze(-1), v)


def by_a_reciprocal(q, k, v, mask):
    w = weights(q, k) * mask
    return (1 / (w.sum(-1, keepdim=True) + 1e-9) * w) @ v


def masked_behind(q, k, v, mask):
    w = weights(q, k) * mask
    return (w / (w.sum(-1, keepdim=True) + 1e-9) * mask.flip(-1)) @ v


def of_relu(q, k, v, mask):
    w = torch.relu(q @ k.mT * 0.25) + 1e-3
    return (w / w.sum(-1, keepdim=True)) @ v


def of_sigmoid(q, k, v, mask):
    w = torch.sigmoid(q @ k.mT * 0.25) * mask
    return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


def in_float32(q, k, v, mask):
    w = torch.softmax(q @ k.mT * 0.25, -1, dtype=torch.promote_types(q.dtype, torch.float32)) * mask
    return (w / (w.sum(-1, keepdim=True) + 1e-9)).to(q.dtype) @ v


def merged_heads(q, k, v, mask):
    b, h = q.shape[:2]
    w = weights(q, k) * mask
    w = w / (w.sum(-1, keepdim=True) + 1e-9)
    return torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (b, h))


def other_layouts(q, k, v, mask):
    """[b, n, h, d] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    w = torch.einsum("bihc,bjhc->bhij", q, k).mul(0.25).softmax(-1) * mask
    w = w / (w.sum(-1, keepdim=True) + 1e-9)
    return torch.einsum("bhij,bjhe->bihe", w, v)


def transposed_product(q, k, v, mask):
    w = weights(q, k) * mask
    w = w / (w.sum(-1, keepdim=True) + 1e-9)
    return v.mT @ w.mT


def by_its_log_sum(q, k, v, mask):
    """With one score of +inf the others' weights are 0, and its own, and so their sum, is NaN."""
    s = q @ k.mT * 0.25
    w = torch.exp(s - s.logsumexp(-1, keepdim=True)) * mask
    return (w / w.sum(-1)[..., None]) @ v


FORMS = [masked_softmax, nothing_added, clamped, by_a_reciprocal, masked_behind, of_relu, of_sigmoid, in_float32,
         merged_heads, other_layouts, transposed_product, by_its_log_sum]  # fmt: skip


def tensors(n=37, m=29, dtype=torch.float32):
    mask = torch.arange(m) < torch.tensor([m, m // 2, 0])[:, None, None, None]
    return [*(torch.randn(3, 2, count, 16, dtype=dtype) for count in (n, m, m)), mask.to(dtype)]


def fused(function, *, given=tensors, gradients=False, dtype=None, **options):
    """Assert the rule, over draws of the inputs; returns the attentions of the report."""

    def results(call, inputs):
        wanted = [x.requires_grad_() for x in inputs[:3] if gradients]
        out = call(*inputs)
        factors = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
        return out.detach(), *(torch.autograd.grad((out * factors).sum(), wanted) if gradients else ())

    def draw():
        inputs = given()
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        return results(compiled, inputs), results(function, [x.detach() for x in inputs]), results(function, wide)

    torch.manual_seed(3)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager", "strict": True} | options)
    with fusion.collect_reports() as reports:
        assert_as_exact_over_draws(draw, dtype)
    (report,) = reports
    return report.sites


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["auto", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_is_fused(form, emitter):
    (site,) = fused(form, emitter=emitter)
    assert site.fused and [(f.reduction.value, f.over) for f in site.specs[0].aux_outputs] == [("sum", "j")], (
        site.reason
    )
    assert site.validated.startswith("values")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_trains(form):
    (site,) = fused(form, gradients=True)
    assert site.fused, site.reason


@pytest.mark.parametrize("form", [masked_softmax, of_relu, in_float32, other_layouts])
def test_in_bfloat16(form):
    (site,) = fused(form, given=lambda: tensors(dtype=torch.bfloat16))
    assert site.fused, site.reason


@pytest.mark.parametrize("form", [masked_softmax, of_sigmoid])
def test_in_kernels_for_gpus(form):
    with interpreted():
        (site,) = fused(form, gradients=True)
    assert site.fused, site.reason


@pytest.mark.parametrize("form", [masked_softmax, merged_heads, other_layouts])
def test_lengths_that_vary_compile_once(form):
    torch._dynamo.reset()
    compiled = torch.compile(form, backend="fusion", dynamic=True, options={"inner": "aot_eager", "strict": True})
    with fusion.collect_reports() as reports:
        for n in (33, 47, 64):
            inputs = tensors(n, n + 3)
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            assert_as_exact_over_draws(lambda i=inputs, w=wide: (compiled(*i), form(*i), form(*w)))
    assert len(reports) == 1 and reports[0].fused == 1


def test_weights_that_are_returned_are_divided_in_the_graph():
    def returned(q, k, v, mask):
        w = weights(q, k) * mask
        w = w / (w.sum(-1, keepdim=True) + 1e-9)
        return w @ v, w

    torch._dynamo.reset()
    report = fusion.explain(returned, *(given := tensors()))
    compiled = torch.compile(returned, backend="fusion", options={"inner": "aot_eager"})
    assert_as_exact_over_draws(
        lambda: (compiled(*given), returned(*given), returned(*(x.double() for x in given))),
    )
    assert report.fused == 1


def of_squares(q, k, v, mask):
    """Squares may overflow where their quotients do not."""
    w = torch.relu(q @ k.mT) ** 2
    return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


def divided_by_another(q, k, v, mask):
    """Also divided by a sum over the queries."""
    w = weights(q, k) * mask
    return (w / w.sum(-1, keepdim=True) / w.sum(-2, keepdim=True)) @ v


def written_to(q, k, v, mask):
    w = weights(q, k) * mask
    total = w.sum(-1, keepdim=True)
    kept = total[..., 0]
    out = (w / total) @ v
    total.add_(1)
    return out, kept


@pytest.mark.parametrize("form", [of_squares, divided_by_another, written_to])
def test_others_are_left_as_they_are(form):
    """Bit for bit: a division that did no good is where it was."""
    given = [x[:2] for x in tensors()]
    torch._dynamo.reset()
    with fusion.collect_reports() as (reports):
        ours = torch.compile(form, backend="fusion", options={"inner": "eager"})(*given)
    assert [site.fused for site in reports[0].sites] == [False], str(reports[0])
    assert_same(ours, form(*given))


@pytest.mark.parametrize("scores", ["multiplied", "selected"])
def test_the_gradient_of_rows_of_which_a_selection_leaves_nothing(scores):
    """It is NaN behind the selection, and 0 before it."""

    def nothing_left(q, k, v, live):
        s = q @ k.mT
        s = s.masked_fill(~live, -1e9) if scores == "selected" else s * live - 1e9 * (~live)
        w = torch.where(live, torch.softmax(s, -1), 0.0)
        return (w / w.sum(-1)[..., None]) @ v

    def given():
        *others, mask = tensors()
        return [*others, mask > 0]

    (site,) = fused(nothing_left, given=given)
    assert site.fused
    (site,) = fused(nothing_left, given=given, gradients=True, strict=False)
    assert site.fused == (scores == "selected"), site.reason


def test_float16_is_left_as_it_is():
    given = tensors(dtype=torch.float16)
    torch._dynamo.reset()
    report = fusion.explain(masked_softmax, *given)
    assert report.fused == 0 and len(report.sites) == 1


def test_normalized_by_magnitudes_is_listed():
    """The sum of magnitudes is not written beside an output."""

    def normalized(q, k, v):
        return F.normalize(torch.relu(q @ k.mT) + 0.1, p=1, dim=-1) @ v

    torch._dynamo.reset()
    report = fusion.explain(normalized, *tensors()[:3])
    assert report.fused == 0 and len(report.sites) == 1
