"""Sets of keys that an indexer leaves to each row: read through a table, by every spelling of the mask."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager

B, H, N, K, D = 2, 4, 40, 7, 32
INF = float("inf")


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch):
    """These problems are smaller than any for which sets pay."""
    monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_: None)
    torch._dynamo.reset()


def drawn(dtype=torch.float32, heads=H, queries=N):
    """q, k, v, and scores of an indexer, with a bias in it that keeps future keys out where there are others."""
    torch.manual_seed(0)
    q = torch.randn(B, H, queries, D).to(dtype)
    k, v = (torch.randn(B, heads, N, D).to(dtype) for _ in range(2))
    return q, k, v, torch.randn(B, queries, N) + 100 * causal(queries)


def causal(queries=N):
    return torch.arange(N) <= torch.arange(N - queries, N)[:, None]


def outside(index, like):
    """True at keys that are not in the set."""
    return torch.ones_like(like, dtype=torch.bool).scatter(-1, index, False)


def softmax_over(scores, v):
    return scores.softmax(-1) @ v


def filled(q, k, v, index_scores):
    dead = outside(index_scores.topk(K, dim=-1).indices, index_scores).unsqueeze(1)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead, -INF), v)


def of_the_function(q, k, v, index_scores):
    """As transformers' DeepSeek-V3.2 does by default: positions as int32 on the way, causal besides."""
    index = index_scores.topk(min(K, index_scores.shape[-1]), dim=-1).indices.to(torch.int32)
    dead = index.new_ones(index_scores.shape, dtype=torch.bool).scatter(-1, index.long(), False).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[2])[None, None] & ~dead)


def written_in_place(q, k, v, index_scores):
    live = torch.zeros_like(index_scores, dtype=torch.bool)
    live.scatter_(-1, index_scores.topk(K, sorted=False)[1], True)
    return softmax_over(torch.where(live[:, None], (q @ k.mT) * D**-0.5, -INF), v)


def some_of_the_chosen(q, k, v, index_scores):
    index = index_scores.topk(2 * K).indices[..., 1 : K + 1].clone()
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def chosen_along_another_axis(q, k, v, index_scores):
    """Rows and columns of the indexer's scores swapped, and back."""
    index = index_scores.mT.contiguous().topk(K, dim=-2).indices.mT
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def sorted_whole(q, k, v, index_scores):
    index = torch.sort(index_scores, descending=True).indices[..., :K]
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def argsorted(q, k, v, index_scores):
    index = index_scores.argsort(-1, descending=True)[..., :K]
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def with_a_set_per_head(q, k, v, index_scores):
    index_scores = index_scores.unsqueeze(1) * torch.linspace(-1, 1, H)[:, None, None]
    dead = outside(index_scores.topk(K).indices, index_scores)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead, -INF), v)


def with_heads_of_one_key(q, k, v, index_scores):
    """Latent keys, the same for all heads."""
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    return softmax_over(((q @ k[:, :1].mT) * D**-0.5).masked_fill(dead, -INF), v[:, :1])


def with_grouped_heads(q, k, v, index_scores):
    k, v = (x[:, :2].repeat_interleave(H // 2, 1) for x in (k, v))
    return filled(q, k, v, index_scores)


def with_biases(q, k, v, index_scores):
    """Loads by key, by distance, by head; and a soft cap."""
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    slopes = torch.arange(1, H + 1)[:, None, None] / H
    scores = 5 * torch.tanh((q @ k.mT) / 5) - slopes * (torch.arange(N)[:, None] - torch.arange(N)).abs()
    return softmax_over((scores + v[..., 0].unsqueeze(2)).masked_fill(dead, -INF), v)


def with_a_sink(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    scores = ((q @ k.mT) * D**-0.5).masked_fill(dead, -INF)
    scores = torch.cat([scores, q[..., :1]], -1)
    return scores.softmax(-1)[..., :-1] @ v


def without_a_softmax(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    return torch.sigmoid(q @ k.mT * D**-0.5).masked_fill(dead, 0.0) @ v


def with_heads_after_queries(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5).masked_fill(dead, -INF).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def without_a_batch(q, k, v, index_scores):
    dead = outside(index_scores[0].topk(K).indices, index_scores[0])
    return softmax_over(((q[0, 0] @ k[0, 0].mT) * D**-0.5).masked_fill(dead, -INF), v[0, 0])


def with_one_set_for_all_queries(q, k, v, index_scores):
    dead = outside(index_scores[:, :1].topk(K).indices, index_scores[:, :1]).unsqueeze(1)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead, -INF), v)


SPELLINGS = (
    filled, of_the_function, written_in_place, some_of_the_chosen, chosen_along_another_axis, sorted_whole, argsorted,
    with_a_set_per_head, with_heads_of_one_key, with_grouped_heads, with_biases, with_a_sink, without_a_softmax,
    with_heads_after_queries, without_a_batch, with_one_set_for_all_queries,
)  # fmt: skip


def site_of(function, *inputs):
    report = fusion.explain(function, *inputs)
    assert len(report.sites) == 1 and report.fused == 1, str(report)
    return report.sites[0]


def compiled_eagerly(function, **how):
    return torch.compile(function, backend="fusion", options={"inner": "eager"}, **how)


def check(function, *inputs, dtype=None):
    assert_runs_as_exact_as_eager(compiled_eagerly(function), function, *inputs, dtype=dtype)


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_sets_are_read_through_a_table(function):
    inputs = drawn()
    with torch.no_grad():
        found = site_of(function, *inputs).attentions[0]
        assert f"{K} of " in found.keys and "read through " in found.keys
        assert (found.spec.n_k_total is None) == (function is with_one_set_for_all_queries)
        assert not any(operand.dtype == "bool" for operand in found.spec.operands)
        check(function, *inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [of_the_function, with_heads_of_one_key], ids=lambda f: f.__name__)
def test_narrow_dtypes(function, dtype):
    with torch.no_grad():
        check(function, *drawn(dtype), dtype=dtype)


def test_heads_that_share_keys_are_rows():
    with torch.no_grad():
        assert "once for 4 heads" in site_of(with_heads_of_one_key, *drawn()).attentions[0].keys
        assert "once for 2 heads" in site_of(with_grouped_heads, *drawn()).attentions[0].keys
        assert "once for" not in site_of(with_a_set_per_head, *drawn()).attentions[0].keys


@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries(queries):
    inputs = drawn(queries=queries)
    with torch.no_grad():
        assert f"{K} of {N}" in site_of(of_the_function, *inputs).attentions[0].keys
        check(of_the_function, *inputs)


@pytest.mark.parametrize("function", [filled, of_the_function])
def test_rows_without_a_live_key(function):
    """NaN after a softmax, zero after scaled_dot_product_attention."""

    def padded(q, k, v, index_scores, keep):
        return function(q, k, torch.where(keep[:, None, :, None], v, 0.0), index_scores)

    def dead(q, k, v, index_scores, keep):
        index = outside(index_scores.topk(K, dim=-1).indices, index_scores)
        mask = (keep[:, None, None, :] & causal()) & ~index.unsqueeze(1)
        if function is of_the_function:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(~mask, -INF), v)

    keep = torch.arange(N) >= torch.tensor([[0], [N // 2]])
    inputs = (*drawn(), keep)
    with torch.no_grad():
        assert f"{K} of {N}" in site_of(dead, *inputs).attentions[0].keys
        assert dead(*inputs)[1, :, : N // 2].nan_to_num().abs().sum() == 0
        check(dead, *inputs)
        check(padded, *inputs)


def test_lengths_that_change():
    compiled = compiled_eagerly(of_the_lengths, dynamic=True)
    with torch.no_grad(), fusion.report.report.collect_reports() as reports:
        for length in (33, 40, 51):
            torch.manual_seed(length)
            q, k, v = (torch.randn(B, H, length, D) for _ in range(3))
            assert_runs_as_exact_as_eager(compiled, of_the_lengths, q, k, v, torch.randn(B, length, length))
    assert len(reports) == 1 and f"{K} of 33" in reports[0].sites[0].attentions[0].keys


def of_the_lengths(q, k, v, index_scores):
    dead = outside(index_scores.topk(K, dim=-1).indices, index_scores).unsqueeze(1)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead, -INF), v)


# --- what must see a mask of all keys ---------------------------------------------------------------------------


def of_any_positions(q, k, v, index_scores):
    """Positions may repeat, and a key would count twice."""
    index = index_scores[..., :K].abs().long() % 3
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def of_changed_positions(q, k, v, index_scores):
    index = index_scores.topk(K).indices // 2
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def of_positions_written_over(q, k, v, index_scores):
    index = index_scores.topk(K).indices
    index[..., :3] = 0
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def of_positions_repeated(q, k, v, index_scores):
    index = index_scores.topk(K).indices.repeat(1, 1, 2)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def of_positions_in_other_rows(q, k, v, index_scores):
    """Distinct down a column, not along a row."""
    index = index_scores.mT.contiguous().topk(K, dim=-2).indices[..., :K].mT.contiguous().mT
    index = index.expand(B, K, K).repeat(1, N // K + 1, 1)[:, :N]
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(outside(index, index_scores)[:, None], -INF), v)


def of_a_mask_changed_later(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores)
    dead[..., :4] = False
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead[:, None], -INF), v)


def of_a_set_or_a_window(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() < 3
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead & ~near, -INF), v)


def of_the_others(q, k, v, index_scores):
    """The set is what is left out."""
    chosen = ~outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(chosen, -INF), v)


def of_a_part_of_the_keys(q, k, v, index_scores):
    """Positions beyond the keys that are left are chosen, too."""
    dead, n = outside(index_scores.topk(K).indices, index_scores), N - 9
    return softmax_over(((q @ k[:, :, :n].mT) * D**-0.5).masked_fill(dead[:, None, :, :n], -INF), v[:, :, :n])


def of_keys_further_on(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores)
    return softmax_over(((q @ k[:, :, 4:].mT) * D**-0.5).masked_fill(dead[:, None, :, 4:], -INF), v[:, :, 4:])


def of_no_keys(q, k, v, index_scores):
    dead = outside(index_scores.topk(0).indices, index_scores)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead[:, None], -INF), v)


def of_a_part_of_the_rows(q, k, v, index_scores):
    """The last rows keep all keys."""
    live = torch.zeros_like(index_scores, dtype=torch.bool)
    dead = ~(live | (torch.arange(N) > N - 5)[:, None]).scatter(-1, index_scores.topk(K).indices, True)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead[:, None], -INF), v)


UNLIKE = (
    of_any_positions, of_changed_positions, of_positions_written_over, of_positions_repeated,
    of_positions_in_other_rows, of_a_mask_changed_later, of_a_set_or_a_window, of_the_others, of_a_part_of_the_rows,
    of_a_part_of_the_keys, of_keys_further_on, of_no_keys,
)  # fmt: skip


@pytest.mark.parametrize("function", UNLIKE, ids=lambda f: f.__name__)
def test_other_masks_are_read(function):
    inputs = drawn()
    with torch.no_grad():
        report = fusion.explain(function, *inputs)
        assert not any(found.keys for site in report.sites for found in site.attentions)
        check(function, *inputs)


def with_a_finite_fill(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    return softmax_over(((q @ k.mT) * D**-0.5).masked_fill(dead, torch.finfo(torch.float32).min), v)


def with_weights(q, k, v, index_scores):
    dead = outside(index_scores.topk(K).indices, index_scores).unsqueeze(1)
    weights = ((q @ k.mT) * D**-0.5).masked_fill(dead, -INF).softmax(-1)
    return weights @ v, weights.sum(-2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(with_a_finite_fill, "are filled with -3.4"), (with_weights, "the weights of all keys are asked for")],
)
def test_reasons_to_keep_the_mask(function, reason):
    inputs = drawn()
    with torch.no_grad():
        site = site_of(function, *inputs)
        assert reason in site.attentions[0].keys and reason in str(fusion.explain(function, *inputs))
        check(function, *inputs)


def test_training_keeps_the_mask():
    q, k, v, index_scores = drawn()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert "gradients are asked for" in site_of(filled, *inputs, index_scores).attentions[0].keys

    def gradients(run, *tensors):
        return torch.autograd.grad(run(*tensors, index_scores.to(tensors[0].dtype)).square().sum(), tensors)

    compiled = compiled_eagerly(filled)
    exact = gradients(filled, *(x.detach().double().requires_grad_() for x in inputs))
    assert_as_exact_as_eager(gradients(compiled, *inputs), gradients(filled, *inputs), exact)


def test_where_sets_do_not_pay(monkeypatch):
    monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_: "1 ms predicted, 2 ms with sets of keys")
    with torch.no_grad():
        assert "2 ms with sets" in site_of(filled, *drawn()).attentions[0].keys
