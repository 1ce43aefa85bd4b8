"""What is not fused says which operation of the user's stood in the way, and what to do."""

import ast
import re
from pathlib import Path

import pytest
import torch

import fusion
from fusion.refusals import Reason
from tests.numerics import assert_as_exact_as_eager, assert_same

ROOT = Path(__file__).resolve().parents[2]


def tanh_of_weights(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = torch.tanh(w)  # here
    return w @ v


def other_axis(q, k, v):
    s = q @ k.mT
    w = torch.softmax(s, 1)  # here
    return w @ v


def running_sum(q, k, v):
    s = q @ k.mT
    s = s.cumsum(-1)  # here
    return torch.softmax(s, -1) @ v


def also_averaged(q, k, v):
    s = q @ k.mT
    out = torch.softmax(s, -1) @ v
    return out, s.mean(1)  # here


def returned(q, k, v):
    s = q @ k.mT  # here
    return torch.softmax(s, -1) @ v, s


def constant_added(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = w + 0.5  # here
    return w @ v


def constant_put_in(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = w.masked_fill(torch.arange(17) > 3, 0.5)  # here
    return w @ v


def softmax_twice(q, k, v):
    s = torch.softmax(q @ k.mT, -1)  # here
    return torch.softmax(s, -1) @ v


def written_to(q, k, v):
    s = q @ k.mT
    k.add_(1)  # here
    return torch.softmax(s, -1) @ v + k.sum()


def sorted_scores(q, k, v):
    s = (q @ k.mT).sort(-1).values  # here
    return torch.softmax(s, -1) @ v


def highest_scores(q, k, v):
    s = q @ k.mT
    least = s.topk(4, -1).values[..., -1:]  # here
    return torch.softmax(s.masked_fill(s < least, -torch.inf), -1) @ v


def contextual_positions(q, k, v):
    """As CoPE counts positions by gates."""
    s = q @ k.mT
    gates = torch.sigmoid(s).flip(-1)
    position = gates.cumsum(-1).flip(-1).clamp(max=15)  # here
    return torch.softmax(s + q.gather(-1, position.floor().long()) * (position - position.floor()), -1) @ v


def over_rows_and_keys(q, k, v):
    s = q @ k.mT
    over_rows = torch.softmax(s, -2)  # here
    return torch.softmax(s, -1) * over_rows @ v


def over_rows(q, k, v):
    w = torch.softmax(q @ k.mT, -2)  # here
    return w @ v


def mean_over_heads(q, k, v):
    s = (q @ k.mT).mean(1)  # here
    return torch.softmax(s, -1) @ v.mean(1)


CASES = {
    sorted_scores: (Reason.NOT_POINTWISE, "do not come from a product", "aten.sort"),
    highest_scores: (Reason.NOT_POINTWISE, "on its own scores", "aten.topk"),
    contextual_positions: (Reason.NOT_POINTWISE, "on its own scores", "aten.cumsum"),
    over_rows_and_keys: (Reason.OTHER_SOFTMAX, "on its own scores", "aten.softmax"),
    over_rows: (Reason.FURTHER_REDUCTION, "whole rows or columns of scores", "aten.softmax"),
    tanh_of_weights: (Reason.NOT_LINEAR, "not linear in it", "aten.tanh"),
    other_axis: (Reason.HEADS_COMBINED, "different heads are combined", "aten.softmax"),
    mean_over_heads: (Reason.HEADS_COMBINED, "different heads are combined", "aten.mean"),
    running_sum: (Reason.NOT_POINTWISE, "do not come from a product", "aten.cumsum"),
    also_averaged: (Reason.WEIGHTS_NEEDED, "attention scores are needed elsewhere .by aten.mean", "aten.mean"),
    returned: (Reason.WEIGHTS_NEEDED, "they are returned", "aten.matmul"),
    constant_added: (Reason.WEIGHTS_ADDED, "added to the weights", "aten.add"),
    constant_put_in: (Reason.WEIGHTS_REPLACED, "weights are replaced", "aten.masked_fill"),
    softmax_twice: (Reason.FURTHER_REDUCTION, "another reduction", "aten.softmax"),
    written_to: (Reason.CHANGED_IN_PLACE, "changed in place", "aten.add_"),
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_operation_and_its_line_are_named(function):
    kind, reason, operation = CASES[function]
    report = fusion.explain(function, *(torch.randn(2, 3, 17, 16) for _ in range(3)))
    (site,) = report.sites
    assert not site.fused and site.refusal.kind is kind
    assert re.search(reason, site.reason), site.reason
    assert site.stopped_by.startswith(operation)
    lines = Path(__file__).read_text().splitlines()
    number = int(site.stopped_at.split(":")[1].split()[0])
    assert lines[number - 1].endswith("# here"), site.stopped_at
    assert site.advice and site.advice in " ".join(str(report).split())
    assert f"stopped  by {site.stopped_by} at {site.stopped_at}" in str(report)


def mixed_heads_normalised(q, k, v):
    """As DeepViT."""
    w = torch.einsum("bhij,hg->bgij", torch.softmax(q @ k.mT, -1), torch.eye(3) + 0.1)
    w = torch.nn.functional.layer_norm(w.permute(0, 2, 3, 1), (3,)).permute(0, 3, 1, 2)
    return w @ v


def with_a_vector(q, k, v):
    w = torch.softmax(q[0, 0] @ k[0, 0].mT, -1)
    return w @ v[0, 0, :, 0]  # here


def with_a_vector_of_values(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v[0, 0, :, 0]  # here


def many_sinks(q, k, v):
    s = torch.cat([q @ k.mT, q.new_zeros(2, 3, 17, 5)], -1)
    return torch.softmax(s, -1)[..., :17] @ v


def far_away(q, k, v):
    s = q @ k.mT
    for step in range(80):
        s = s * (1 + step / 1000)
    return torch.softmax(s, -1) @ v


def normalised_squares(q, k, v):
    squares = torch.relu(q @ k.mT).square()
    return squares / squares.sum(-1, keepdim=True) @ v


def running_sum_less_its_logarithm(q, k, v):
    s = (q @ k.mT).cumsum(-1)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def running_sum_divided_late(q, k, v):
    s = (q @ k.mT).cumsum(-1)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (v.mT @ e.mT).mT / e.sum(-1, keepdim=True)


def block_by_block(q, k, v):
    """Keys a block at a time, as FlashAttention's paper writes it; the second block's product with V."""
    first, second = (q @ part.mT for part in k.split(9, -2))
    before, largest = first.amax(-1, keepdim=True), torch.maximum(*(s.amax(-1, keepdim=True) for s in (first, second)))
    total = (first - before).exp().sum(-1, keepdim=True) * (before - largest).exp()
    e = (second - largest).exp()
    return (torch.relu(q) * total + e @ v[..., 9:, :]) / (total + e.sum(-1, keepdim=True))


def without_columns(q, k, v):
    return torch.softmax(q[..., :0] @ k[..., :0].mT, -1) @ v


def renormalised_beside_a_sink(q, k, v):
    """With a single key, as the others: its weight may be a denormal number, whose reciprocal is infinite."""
    s = torch.cat([q @ k[..., :1, :].mT, q.new_zeros(2, 3, 17, 1)], -1)
    w = torch.softmax(s, -1)[..., :1]
    return w / w.sum(-1, keepdim=True) @ v[..., :1, :]


def one_value_for_all_keys(q, k, v):
    return torch.einsum("...ij,...je->...ie", torch.softmax(q @ k.mT, -1), v[..., :1, :])


def rolled_scores(q, k, v):
    return (q @ k.mT).roll(1, -1).softmax(-1) @ v


UNSEEN = {
    rolled_scores: (Reason.NOT_POINTWISE, r"this one is read at .*, \(j \+ 16\) % 17\]"),
    one_value_for_all_keys: (Reason.PRODUCT_FORM, "broadcasts the index that it sums over"),
    renormalised_beside_a_sink: (Reason.FURTHER_REDUCTION, "scaled by another reduction"),
    block_by_block: (Reason.OTHER_NORMALISER, "not a softmax over the keys"),
    without_columns: (Reason.LIMIT, "a head dimension of 0"),
    normalised_squares: (Reason.OTHER_NORMALISER, "not a softmax over the keys"),
    running_sum_less_its_logarithm: (Reason.NOT_POINTWISE, "do not come from a product"),
    running_sum_divided_late: (Reason.NOT_POINTWISE, "do not come from a product"),
    mixed_heads_normalised: (Reason.NOT_POINTWISE, "do not come from a product"),
    with_a_vector: (Reason.PRODUCT_FORM, "aten.mv|a product with a vector"),
    many_sinks: (Reason.LIMIT, "5 columns of the softmax beside the keys, more than 4"),
    far_away: (Reason.LIMIT, "more than 64 operations one after the other"),
}


@pytest.mark.parametrize("function", UNSEEN, ids=lambda f: f.__name__)
def test_what_has_a_softmax_between_two_products_is_listed(function):
    kind, reason = UNSEEN[function]
    (site,) = fusion.explain(function, *(torch.randn(2, 3, 17, 16) for _ in range(3))).sites
    assert not site.fused and site.refusal.kind is kind
    assert re.search(reason, site.reason), site.reason


class OwnSoftmax(torch.autograd.Function):
    """A softmax with a backward of its own, as SEW-D's."""

    @staticmethod
    def forward(ctx, scores):
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, weights, -1, grad.dtype)


@pytest.mark.parametrize("trained", [False, True])
def test_a_softmax_with_a_backward_of_its_own_is_noted(trained: bool):
    """In inference it is a softmax like others."""
    inputs = [torch.randn(2, 3, 17, 16, requires_grad=trained) for _ in range(3)]
    report = fusion.explain(lambda q, k, v: OwnSoftmax.apply(q @ k.mT) @ v, *inputs)
    assert report.fused == (not trained)
    assert [note for note in report.notes if "torch.autograd.Function" in note and "OwnSoftmax" in note] == (
        report.notes if trained else []
    )


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, scores):
        return scores.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("rounded", ["scores", "weights"])
def test_what_a_backward_of_its_own_hides_is_named(rounded: str):
    def function(q, k, v):
        s = q @ k.mT
        if rounded == "weights":
            s = torch.softmax(s, -1)
        s = Rounded.apply(s)  # here
        return (torch.softmax(s, -1) if rounded == "scores" else s) @ v

    (site,) = fusion.explain(function, *(torch.randn(2, 3, 17, 16, requires_grad=True) for _ in range(3))).sites
    assert site.refusal.kind is Reason.OPAQUE and site.stopped_by == "torch.autograd.Function"
    assert site.stopped_at.endswith("# here")


def test_an_attention_within_a_backward_of_its_own_is_noted():
    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return torch.softmax(q @ k.mT, -1) @ v

        @staticmethod
        def backward(ctx, grad):
            return grad, grad, grad

    inputs = [torch.randn(2, 17, 16, requires_grad=True) for _ in range(3)]
    (note,) = fusion.explain(lambda q, k, v: Whole.apply(q, k, v) + 1, *inputs).notes
    assert "torch.autograd.Function" in note and "Whole.apply" in note


def test_weights_that_end_at_a_graph_break_are_noted():
    def function(q, k, v):
        w = torch.softmax(q @ k.mT, -1)
        torch._dynamo.graph_break()
        return w @ v

    report = fusion.explain(function, *(torch.randn(2, 3, 17, 16) for _ in range(3)))
    assert not report.sites and report.graphs == 2
    (note,) = report.notes
    assert "attention weights leave this graph" in note and "softmax" in note and "a graph break follows" in note
    (found,) = report.graph_breaks
    line, reason = found.splitlines()
    assert line.endswith("in function: torch._dynamo.graph_break()") and "graph_break" in reason
    assert f"graph break at {line}" in str(report)


def test_a_product_with_a_vector_is_named():
    (site,) = fusion.explain(with_a_vector_of_values, *(torch.randn(2, 3, 17, 16) for _ in range(3))).sites
    assert not site.fused and "a product with a vector" in site.reason and "# here" in site.stopped_at


def test_weights_that_are_returned_are_noted():
    report = fusion.explain(lambda q, k: torch.softmax(q @ k.mT, -1), *(torch.randn(2, 17, 16) for _ in range(2)))
    (note,) = report.notes
    assert note.endswith("they are returned") and not report.graph_breaks


@pytest.mark.parametrize("loss", [lambda w: -w.diagonal(0, -2, -1).log().mean(), lambda w: (w / w.sum(-2, True)).sum()])
def test_a_loss_is_no_attention(loss):
    report = fusion.explain(lambda q, k: loss(torch.softmax(q @ k.mT, -1)), *(torch.randn(2, 17, 16) for _ in range(2)))
    assert not report.sites and report.notes == ["this graph holds no attention"]


def test_breaks_of_several_graphs_are_named():
    def function(q, k, v):
        s = q @ k.mT
        if s.sum() > 0:
            s = s * 2
        out = torch.softmax(s, -1) @ v
        torch._dynamo.graph_break()
        return torch.softmax(out @ k.mT, -1) @ v

    report = fusion.explain(function, *(torch.ones(2, 17, 16) for _ in range(3)))
    assert [site.fused for site in report.sites] == [True]  # the second
    assert ["if s.sum() > 0" in found for found in report.graph_breaks] == [True, False]


def test_an_attention_of_addmm_alone_is_fused():
    def function(q, k, v):
        scores = torch.addmm(torch.ones(17), q, k.mT, beta=0.5, alpha=0.25)
        return torch.addmm(torch.zeros(16), torch.softmax(scores, -1), v, beta=0)

    inputs = [torch.randn(17, 16) for _ in range(3)]
    report = fusion.explain(function, *inputs)
    assert [site.fused for site in report.sites] == [True], str(report)
    torch._dynamo.reset()
    actual = torch.compile(function, backend="fusion", options={"inner": "eager"})(*inputs)
    torch.set_default_dtype(torch.float64)  # for the tensors that the function makes
    try:
        reference = function(*(x.double() for x in inputs))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_as_exact_as_eager([actual], [function(*inputs)], [reference], torch.float32)


def test_a_fused_site_has_no_advice():
    (site,) = fusion.explain(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *[torch.randn(1, 1, 5, 4)] * 3).sites
    assert site.fused and site.advice is None and site.stopped_by is None


def reasons_of(file: Path) -> list[ast.expr]:
    """The reason of every refusal that a file makes."""
    made = []
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) in NAMES:
            made.append(call.args[0] if call.args else call)
    return made


NAMES = ("Unsupported", "Refusal")
PASSED_ON = {("nodes.py", "kind"), ("pullback.py", "refusal.kind")}


def test_every_refusal_has_a_ground_and_every_ground_advice():
    used = set()
    for top in ("passes", "codegen", "fusion"):
        for file in sorted((ROOT / top).rglob("*.py")):
            for reason in reasons_of(file):
                text = ast.unparse(reason)
                assert text.startswith("Reason.") or (file.name, text) in PASSED_ON, f"{file}: {text}"
                used.add(text.removeprefix("Reason."))
    assert {reason.name for reason in Reason} <= used
    assert len({reason.value for reason in Reason}) == len(Reason)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_float64_that_are_rounded_on_the_way(narrow):
    """Sums with -1e9 differ in float64, and are equal in what the softmax is taken of."""

    def function(q, k, v):
        s = ((q @ k.mT).masked_fill(torch.arange(5) > 2, -1e9) - 1e9) * -0.5
        return torch.softmax(s, -1, dtype=narrow).to(v.dtype) @ v

    inputs = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(3)]
    options = {"inner": "eager", "emitter": "reference"}
    with fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options=options)(*inputs)
    (site,) = reports[0].sites
    assert site.refusal.kind is Reason.DTYPE and "rounded" in site.reason
    assert_same(actual, function(*inputs))
