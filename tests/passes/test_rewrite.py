"""Specifying what was found, and putting calls in its place; what cannot be keeps its graph and gets a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusion.ir import Normalizer
from fusion.passes.nodes import Unsupported, example_sizes
from fusion.passes.recognize.find import find_sites
from fusion.passes.replace import replace_sites
from fusion.passes.specify.calls import refuse, resolve_escaping, specify_sites
from fusion.passes.specify.specify import specify
from fusion.passes.trace.normalize import normalize
from fusion.refusals import Reason, Refusal
from fusion.runtime import op  # noqa: F401  (registers the operators)
from tests.numerics import assert_as_exact_as_eager, assert_same, wide
from tests.passes.graphs import captured, ordered


def found(function, *inputs):
    """(the graph as a function of the inputs, the normalized graph, its sites)"""
    module = captured(function, *inputs)
    graph = normalize(module, ordered(module, function, inputs))
    return lambda *given: graph(*ordered(module, function, given)), graph, find_sites(graph.graph)


def inputs(dtype=torch.float32):
    return [torch.randn(2, 3, n, 8).to(dtype) for n in (5, 6, 6)]


def attend(q, k, v):
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


def specified(function, *given):
    *_, (site,) = found(function, *given)
    (attention,) = site.attentions
    return specify(site, attention)


# --- specs


def test_a_spec_says_what_is_computed_and_on_what():
    result = specified(attend, *inputs())
    spec = result.spec
    assert spec.sizes == ("B0", "B1", "Nq", "Nk") and [extent.integer for extent in result.sizes] == [2, 3, 5, 6]
    assert [operand.name for operand in spec.operands] == ["q", "k", "v"] and not result.differentiable
    assert (spec.d.integer, spec.d_v.integer, spec.dtype, spec.out_dtype) == (8, 8, "float32", "float32")
    assert spec.normalizer is Normalizer.SOFTMAX and spec.mask is None and result.device == "cpu"


def test_a_spec_of_what_is_trained():
    q, k, v = inputs()
    assert specified(attend, q.requires_grad_(), k, v).differentiable


def test_scores_of_two_elements_of_a_product_are_refused():
    def function(q, k, v):
        s = q @ k.mT
        return torch.softmax(s + s.mT, -1) @ v

    with pytest.raises(Unsupported, match="two different elements of one product enter the same score"):
        specified(function, *(torch.randn(2, 3, 6, 8) for _ in range(3)))


# --- calls


def rewrite(graph, sites, reason=lambda site: None):
    """The positions of the sites that calls of the reference interpreter take the place of."""
    specify_sites(graph.graph, sites)
    refuse(sites, reason)
    resolve_escaping(graph.graph, sites)
    replace_sites(graph, sites, "reference", example_sizes(graph.graph))
    return [number for number, site in enumerate(sites) if site.calls]


def test_a_call_takes_the_place_of_an_attention():
    given = inputs()
    run, graph, sites = found(attend, *given)
    result = rewrite(graph, sites)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert result == [0] and names == ["fusion.attention.default"]
    assert_as_exact_as_eager(run(*given)[0], attend(*given), attend(*wide(given)))


def test_what_no_kernel_serves_keeps_its_graph():
    given = inputs()
    run, graph, sites = found(attend, *given)
    before = graph.code
    assert not rewrite(graph, sites, lambda _: Refusal(Reason.DTYPE, "no such kernel"))
    assert sites[0].refusal is not None and graph.code == before
    assert_same(run(*given)[0], attend(*given))


def both(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v, scores


def used(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v + scores.sum()


def changed(q, k, v):
    """K is changed between the scores and the product with V."""
    weights = torch.softmax(q @ k.mT, -1)
    k.mul_(2)
    return weights @ v


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (both, "the attention scores are needed elsewhere (they are returned"),
        (used, "the attention scores are needed elsewhere (by aten.sum"),
        (changed, "a tensor that the attention reads is changed in place before it ends"),
    ],
)
def test_what_cannot_be_replaced_says_why(function, reason):
    given = inputs()
    run, graph, sites = found(function, *[x.clone() for x in given])
    assert not rewrite(graph, sites)
    assert reason in sites[0].refusal.message
    ours, theirs = ([x.clone() for x in given] for _ in range(2))
    expected = function(*theirs)
    assert_same(list(run(*ours)), list(expected) if isinstance(expected, tuple) else [expected])
    assert_same(ours, theirs)


def test_one_of_two_is_replaced():
    def function(q, k, v):
        first, scores = both(q, k, v)
        return F.scaled_dot_product_attention(first, k, v), scores

    _, graph, sites = found(function, *inputs())
    result = rewrite(graph, sites)
    assert [site.refusal is None for site in sites] == [False, True] and result == [1]
