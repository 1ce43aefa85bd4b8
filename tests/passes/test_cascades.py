"""Scores or weights that are made of whole rows or columns of scores: an attention for each reduction."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.passes import marks
from fusion.passes.prepare import cascades, find_attention
from fusion.passes.trace.normalize import normalize
from fusion.planning.cpu_planner import WEIGHED
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_over_draws, assert_same


def scores(q, k):
    return q @ k.mT * 0.25


def of_a_softmax(q, k, v):
    return torch.softmax(torch.softmax(scores(q, k), -1) * 3, -1) @ v


def over_queries(q, k, v):
    return torch.softmax(scores(q, k), -2) @ v


def over_queries_transposed(q, k, v):
    return torch.softmax(k @ q.mT * 0.25, -1).transpose(-1, -2) @ v


def slots(q, k, v):
    """Slot attention (Locatello et al., 2020, algorithm 1)."""
    w = torch.softmax(scores(q, k), -2) + 1e-8
    return (w / w.sum(-1, keepdim=True)) @ v


def something_added(q, k, v):
    w = torch.softmax(scores(q, k), -1) + 1e-3
    return w / w.sum(-1, keepdim=True) @ v


def squares(q, k, v):
    w = torch.relu(scores(q, k)).square()
    return (w / (w.mean(-1, keepdim=True) + 1e-3)) @ v


def less_the_largest(q, k, v):
    """As in Grounding DINO."""
    s = scores(q, k)
    return torch.softmax((s - s.max()).clamp(min=-50000, max=50000), -1) @ v


def both_ways(q, k, v):
    s = scores(q, k)
    s = (s - s.max()).clamp(min=-50000)
    t = s.transpose(-1, -2)
    t = (t - t.amax(-1, keepdim=True)).clamp(min=-50000)
    return torch.softmax(s, -1) @ v, torch.softmax(t, -1) @ q


def causal(q, k, v):
    """Of later queries no key sees anything; the first key's column is whole."""
    s = scores(q, k)
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(later, float("-inf")), -2) @ v


def dead_rows(q, k, v):
    """Rows without a live key are NaN, and make the second softmax's NaN."""
    s = scores(q, k)
    dead = torch.arange(q.shape[-2])[:, None] < 3
    return torch.softmax(torch.softmax(s.masked_fill(dead, float("-inf")), -1), -1) @ v


def fills(q, k, v):
    s = scores(q, k)
    dead = torch.arange(k.shape[-2]) < 5
    return torch.softmax(torch.softmax(s.masked_fill(dead, torch.finfo(s.dtype).min), -1) * 4, -1) @ v


def fills_less_the_largest(q, k, v):
    """Rows of nothing but a fill of -1e30, of which the logarithm of the sum is lost: the sum is not."""
    s = scores(q, k)
    dead = torch.arange(q.shape[-2])[:, None] < 3
    s = s.masked_fill(dead, -1e30)
    return torch.softmax(torch.softmax(s - s.amax(-2, keepdim=True), -1) * 3, -1) @ v


def layouts(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    w = torch.einsum("bihc,bjhc->bhij", q, k).mul(0.25).softmax(2)
    return torch.einsum("bhij,bjhe->bihe", w, v)


def grouped(q, k, v):
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return of_a_softmax(q, k, v)


def log_sums(q, k, v):
    s = scores(q, k)
    return torch.softmax(torch.tanh(s - s.logsumexp(-2, keepdim=True)), -1) @ v


def log_sum_of_all(q, k, v):
    s = scores(q, k)
    return torch.softmax(torch.tanh(s - s.logsumexp((-2, -1), keepdim=True)) * 3, -1) @ v


def larger_of_two(q, k, v):
    """`torch.max` of two tensors is no reduction."""
    s = torch.max(scores(q, k), torch.tensor(0.5))
    return torch.softmax(torch.softmax(s, -1) * 3, -1) @ v


FORMS = {of_a_softmax: 2, over_queries: 2, over_queries_transposed: 2, slots: 3, something_added: 3, squares: 2,
         less_the_largest: 2, both_ways: 4, causal: 2, dead_rows: 2, fills: 2, fills_less_the_largest: 3, layouts: 2,
         grouped: 2, log_sums: 2, log_sum_of_all: 2, larger_of_two: 2}  # fmt: skip
"""How many attentions each becomes."""


def tensors(n=45, m=37, dtype=torch.float32):
    return [torch.randn(2, 3, count, 16, dtype=dtype) for count in (n, m, m)]


def run(function, given=tensors, **options):
    """Assert the rule, over draws of the inputs; returns the report."""

    def draw():
        inputs = given()
        return compiled(*inputs), function(*inputs), function(*(x.double() for x in inputs))

    torch.manual_seed(3)
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "cascades": "always"} | options
    compiled = torch.compile(function, backend="fusion", options=options)
    with fusion.collect_reports() as reports:
        assert_as_exact_over_draws(draw)
    (report,) = reports
    return report


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["auto", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_is_fused(form, emitter):
    report = run(form, emitter=emitter, strict=True)
    assert report.fused == len(report.sites) == FORMS[form], str(report)
    assert all(site.validated.startswith("values") for site in report.sites)


@pytest.mark.parametrize("form", [of_a_softmax, slots, less_the_largest])
def test_in_bfloat16(form):
    assert run(form, lambda: tensors(dtype=torch.bfloat16)).fused == FORMS[form]


@pytest.mark.parametrize("form", [of_a_softmax, over_queries, both_ways])
def test_in_kernels_for_gpus(form):
    with interpreted():
        assert run(form, lambda: tensors(36, 33), strict=True).fused == FORMS[form]


@pytest.mark.parametrize("form", [of_a_softmax, over_queries, less_the_largest])
def test_lengths_that_vary_compile_once(form):
    lengths = iter((33, 47, 64))

    def given():
        n = next(lengths, 50)
        return tensors(n, n + 3)

    torch._dynamo.reset()
    options = {"inner": "aot_eager", "strict": True, "cascades": "always"}
    compiled = torch.compile(form, backend="fusion", dynamic=True, options=options)
    with fusion.collect_reports() as reports:
        for _ in range(3):
            inputs = given()
            wide = [x.double() for x in inputs]
            assert_as_exact_over_draws(lambda i=inputs, w=wide: (compiled(*i), form(*i), form(*w)))
    assert len(reports) == 1 and reports[0].fused == FORMS[form]


def test_no_table_of_scores_is_left():
    """Neither for the statistics nor for what is made of them."""
    torch._dynamo.reset()
    report = run(both_ways, strict=True)
    sizes = [node.meta["val"].numel() for node in report.graph_after.graph.nodes if "val" in node.meta]
    assert max(sizes, default=0) < 2 * 3 * 45 * 37


@pytest.mark.parametrize("wanted, pays", [("never", True), ("auto", False), ("auto", True)])
def test_where_it_pays(monkeypatch, wanted, pays):
    """By the size of the table; a softmax over the queries alone only for the memory."""
    scores = 4 * 2 * 3 * 45 * 37
    monkeypatch.setattr("fusion.planning.pays.CASCADE", scores if pays else scores + 1)
    for form in (of_a_softmax, over_queries):
        report = run(form, cascades=wanted)
        fused = FORMS[form] if wanted == "auto" and pays and form is of_a_softmax else 0
        assert report.fused == fused, str(report)


def test_training_is_left_as_it_is():
    given = [x.requires_grad_() for x in tensors()]
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        torch.compile(of_a_softmax, backend="fusion", options={"inner": "eager", "cascades": "always"})(*given)
    assert [site.fused for site in reports[0].sites] == [False]


@pytest.mark.parametrize("lengths", [(0, 40), (40, 32), (1, 300)])
def test_few_queries_or_keys_are_left_as_they_are(lengths):
    """Another kernel may have other last digits."""
    assert cascades.FEW == WEIGHED
    assert run(of_a_softmax, lambda: tensors(*lengths)).fused == 0


def test_changes_that_were_undone_leave_no_trace():
    """One softmax, whose sum might be an attention of its own for what follows; that it then ends at another node must
    not be known to validation."""

    def by_hand(q, k, v, projection):
        e = torch.exp2(scores(q, k))
        return (e @ v) / e.sum(-1, keepdim=True) @ projection

    given = [*tensors(), torch.randn(16, 3)]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in given]
    module = make_fx(by_hand, pre_dispatch=True)(*fakes)
    for node, fake in zip(module.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    graph = normalize(module, given, {})
    kept, sites, promised = find_attention(graph, changes=cascades.changes(lambda tables, column: True))
    fused = [site.root for site in sites if site.refusal is None]
    assert kept is graph and len(fused) == 1 and not promised
    assert [node for node in graph.graph.nodes if marks.attention_root(node)] == fused


def returned(q, k, v):
    """The weights are needed: what was changed for the product is undone."""
    s = scores(q, k)
    w = torch.softmax((s - s.max()).clamp(min=-5), -1)
    return w @ v, s.sigmoid()


def over_both(q, k, v):
    s = scores(q, k)
    return torch.softmax(s.flatten(-2), -1).view_as(s) @ v


def normalized(q, k, v):
    s = scores(q, k)
    return torch.softmax(F.layer_norm(s, s.shape[-1:]), -1) @ v


@pytest.mark.parametrize("form", [returned, over_both, normalized])
def test_others_are_left_as_they_are(form):
    """Bit for bit."""
    given = tensors()
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        ours = torch.compile(form, backend="fusion", options={"inner": "eager", "cascades": "always"})(*given)
    assert [site.fused for site in reports[0].sites] in ([False], []), str(reports[0])
    assert_same(ours, form(*given))
