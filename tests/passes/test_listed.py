"""What is listed as an attention that was not fused, and what is none."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusion

GIVEN = torch.Generator().manual_seed(0)
W, U, E = (torch.randn(n, 8, generator=GIVEN) for n in (8, 3, 8))
LEARNED = nn.Parameter(torch.randn(5, 8, generator=GIVEN))


def greedy(x):
    log = (x @ x.mT).log_softmax(-1)
    return F.linear(x.gather(1, log.argmax(-1)[..., None].expand_as(x)), W)


def sampled(x):
    best = (x @ x.mT).softmax(-1).topk(2, -1).indices
    return F.embedding(best, E).mean(-2) @ W


def router(x):
    p = (x @ W).softmax(-1).topk(2, -1)
    return torch.einsum("bnk,bnkd->bnd", p.values, E[p.indices])


def trained_router(x):
    p = F.linear(x, LEARNED).softmax(-1).topk(2, -1)
    return torch.einsum("bnk,bnkd->bnd", p.values, LEARNED[p.indices])


def head(x):
    return F.linear((x @ W).softmax(-1), U)


def parameters_of_a_head(x):
    return F.linear((x @ LEARNED.mT).softmax(-1), torch.ones(3, 5))


def expectation(x):
    return (x @ W).softmax(-1) @ torch.arange(8.0)


def trace(x):
    w = (x @ x.mT).softmax(-1)
    return w @ x, torch.einsum("bii->b", w)


@pytest.mark.parametrize("function", [greedy, sampled, router, trained_router, head, parameters_of_a_head, expectation,
                                      trace])  # fmt: skip
def test_no_attention_is_not_listed(function):
    x = torch.randn(4, 6, 8)
    assert all(site.fused for site in fusion.explain(function, x).sites)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"strict": True, "inner": "eager"})
    for ours, theirs in zip(compiled(x), function(x), strict=True):
        assert ours.shape == theirs.shape


def squared_weights(x):
    return (x @ x.mT).softmax(-1).square() @ x


def of_one_key_at_a_time(x):
    return torch.mv((x[0] @ x[0].mT).softmax(-1), x[0, :, 0])


def learned_queries(x):
    return (LEARNED @ x.mT).softmax(-1).square() @ x


def learned_queries_on_the_right(x):
    return (x @ LEARNED.mT).softmax(-2).square().mT @ x


def nearest_keys(x):
    p = (x @ x.mT).softmax(-1).topk(2, -1)
    return torch.einsum("bnk,bnkd->bnd", p.values, x[torch.arange(4)[:, None, None], p.indices])


def values_by_a_linear_layer(x):
    return F.linear((x[0] @ x[0].mT).softmax(-1).square(), x[0].mT)


def one_query_of_linear_layers(x):
    q, k = x[:, :1] @ W, x @ W
    return ((q * k).sum(-1).softmax(-1).unsqueeze(-1) * x).sum(-2)


def heads_mixed_by_a_product(x):
    q = x.unflatten(-1, (4, 2)).transpose(1, 2)
    return ((q @ q.mT).permute(0, 2, 3, 1) @ W[:4, :4]).permute(0, 3, 1, 2).softmax(-1) @ q


def heads_mixed_by_an_einsum(x):
    q = x.unflatten(-1, (4, 2)).transpose(1, 2)
    return torch.einsum("bhij,hg->bgij", q @ q.mT, W[:4, :4]).softmax(-1).square() @ q


def layer_norm_of_scores(x):
    return F.layer_norm(x @ x.mT, (6,)).softmax(-1) @ x


STAYS = (squared_weights, of_one_key_at_a_time, learned_queries, learned_queries_on_the_right, nearest_keys,
         values_by_a_linear_layer, one_query_of_linear_layers, heads_mixed_by_a_product,
         heads_mixed_by_an_einsum, layer_norm_of_scores)  # fmt: skip


@pytest.mark.parametrize("function", STAYS)
def test_attention_that_stays_is_listed(function):
    sites = fusion.explain(function, torch.randn(4, 6, 8)).sites
    assert [site.fused for site in sites] == [False]
    assert sites[0].reason


def test_sums_over_features_are_no_reductions_of_scores():
    """The third product of invariant point attention: its rows are heads, and its scores are behind distances."""

    def function(q, k, v, pairs):
        of_q, of_k = (x.unflatten(-1, (4, 2)) for x in (q, k))
        square = (of_q[:, :, :, None] - of_k[:, :, None]).square().sum(-1)
        weights = (q @ k.mT - (square * torch.arange(4.0)).sum(-1)).softmax(-1)
        return weights @ v, weights.transpose(1, 2) @ pairs

    q, k, v = (torch.randn(1, 3, 18, 8) for _ in range(3))
    own, third = fusion.explain(function, q, k, v, torch.randn(1, 18, 18, 5)).sites
    assert own.fused and not third.fused
    assert "reduction" not in third.reason


def test_a_call_of_which_no_graph_is_made_is_said_to_be_one():
    assert "Dynamo made no graph" in str(fusion.explain(lambda x: x, torch.randn(3)))


def entmax(q, k, v):
    s = q @ k.mT / 2
    s = s - s.amax(-1, True)
    z, _ = s.sort(-1, descending=True)
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    mean = z.cumsum(-1) / rank
    tau = mean - ((1 - (z.square().cumsum(-1) - rank * mean.square())) / rank).clamp(min=0).sqrt()
    chosen = (tau <= z).sum(-1, True) - 1
    return (s - tau.gather(-1, chosen)).clamp(min=0) ** 2 @ v


def test_other_normalised_weights_are_listed():
    x = torch.randn(2, 6, 8)
    assert [site.fused for site in fusion.explain(entmax, x, x, x).sites] == [False]


BETWEEN = {
    "aten.sort": lambda s: s.sort(-1)[0],
    "aten.cumsum": lambda s: s.cumsum(-1),
    "aten.linalg_inv": torch.linalg.inv,
    "aten.argmax": lambda s: F.one_hot(s.argmax(-1), s.shape[-1]).float(),
    "no normaliser": lambda s: s,
}


@pytest.mark.parametrize("records_gradients", [False, True])
@pytest.mark.parametrize("obstacle", BETWEEN)
def test_two_products_that_are_no_attention_have_a_note_with_the_reason(obstacle, records_gradients):
    def function(q, k, v):
        return BETWEEN[obstacle](q @ k.mT) @ v

    x = torch.randn(2, 6, 8, requires_grad=records_gradients)
    report = fusion.explain(function, x, x + 1, x)
    (note,) = report.notes
    assert not report.sites and note.startswith("this graph holds no attention: ")
    assert obstacle in note and "test_listed.py:" in note


def test_a_graph_without_two_products_is_said_to_hold_no_attention():
    x = torch.randn(2, 6, 8)
    assert fusion.explain(lambda x: x @ x.mT, x).notes == ["this graph holds no attention"]
    assert fusion.explain(lambda x: (x @ LEARNED.mT).relu() @ LEARNED, x).notes == ["this graph holds no attention"]
