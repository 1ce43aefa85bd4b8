"""Where kernels do not pay on CPUs attention is left to Inductor, and the report says so."""

import pytest
import torch

import fusion
from fusion.planning import pays
from fusion.refusals import Reason

TRAINING, ONE_QUERY = pays.TRAINING, pays.ONE_QUERY


def biased(q, k, v, bias):
    return torch.softmax(q @ k.mT / 4 + bias, -1) @ v


def causal(q, k, v, bias):
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return torch.softmax((q @ k.mT / 4).masked_fill(later, float("-inf")), -1) @ v


def plain(q, k, v, bias):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def by_distance(q, k, v, bias):
    i = torch.arange(q.shape[-2])
    table = bias.flatten()[: 2 * len(i) - 1]
    return torch.softmax(q @ k.mT / 4 + table[i - i[:, None] + len(i) - 1], -1) @ v


def trained(function, n, dtype=torch.float32, *, bias=True, dynamic=False, **options):
    """The one site of a training step with n queries and keys."""
    q, k, v = (torch.randn(1, 2, n, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    further = torch.randn(1, 2, n, n, dtype=dtype, requires_grad=bias)
    with fusion.collect_reports() as reports:
        run = torch.compile(function, backend="fusion", dynamic=dynamic, options=options)
        run(q, k, v, further).sum().backward()
    ((site,),) = [report.sites for report in reports]
    return site


@pytest.fixture(autouse=True)
def _rule(monkeypatch):
    monkeypatch.setattr(pays, "TRAINING", dict.fromkeys(TRAINING, (20, 40)))
    monkeypatch.setattr(pays, "TRAINING_BY_DISTANCE", 30)
    monkeypatch.setattr("fusion.inner_compiler.compile_rest", lambda module, *_: module)  # for speed


@pytest.mark.parametrize(("function", "least"), [(plain, 20), (causal, 20), (biased, 40), (by_distance, 30)])
def test_few_scores_are_left_and_more_are_fused(function, least):
    site = trained(function, least - 1)
    assert not site.fused and site.refusal.kind is Reason.SHORT_TRAINING
    assert f"{least - 1} x {least - 1} scores" in site.reason and f"from about {least} x {least}" in site.reason
    assert trained(function, least).fused


@pytest.mark.parametrize(
    "given",
    [{"bias": False, "n": 25}, {"dtype": torch.bfloat16}, {"dynamic": True, "n": 17}, {"training": "always"},
     {"strict": True}, {"inner": "aot_eager"}, {"emitter": "reference"}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_is_fused_all_the_same(given):
    """A bias that is not trained, half precision, lengths that may grow, what the user asks for."""
    assert trained(biased, **({"n": 16} | given)).fused


def test_inference_is_fused():
    with fusion.collect_reports() as reports, torch.no_grad():
        torch.compile(plain, backend="fusion")(*(torch.randn(1, 2, 8, 16) for _ in range(4)))
    assert [report.fused for report in reports] == [1]


def test_limits_are_larger_without_tiles_and_with_a_trained_bias():
    (few, biased_few), (more, biased_more) = TRAINING[True], TRAINING[False]
    assert 0 < few < biased_few < biased_more and few < more < biased_more


def inferred(function=plain, queries=1, keys=24, heads=8, dtype=torch.float32, dynamic=False, **options):
    """The one site of a call without gradients."""
    q, k, v = (torch.randn(1, heads, n, 64, dtype=dtype) for n in (queries, keys, keys))
    with fusion.collect_reports() as reports, torch.no_grad():
        torch.compile(function, backend="fusion", dynamic=dynamic, options=options)(q, k, v, None)
    ((site,),) = [report.sites for report in reports]
    return site


def sdpa(q, k, v, _):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.fixture
def _one_query(monkeypatch):
    monkeypatch.setattr(pays, "ONE_QUERY", ONE_QUERY)


@pytest.mark.usefixtures("_one_query")
def test_one_query_over_few_keys_is_left():
    site = inferred()
    assert not site.fused and site.refusal.kind is Reason.ONE_QUERY
    assert "one query over 24 keys, 24576 elements" in site.reason and "emitter" in site.advice
    assert inferred(keys=ONE_QUERY // (8 * 128)).fused


@pytest.mark.usefixtures("_one_query")
@pytest.mark.parametrize(
    "given",
    [{"queries": 2}, {"function": sdpa}, {"dtype": torch.bfloat16}, {"dynamic": True}, {"emitter": "mlir"},
     {"strict": True}, {"inner": "aot_eager"}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_where_one_query_is_fused_all_the_same(given):
    assert inferred(**given).fused
