"""Measured errors never exceed what is certified, whatever the data; what is not certified is exact."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fusion
from fusion.approximate.blocks import Summaries
from fusion.approximate.eligible import plain
from fusion.approximate.sparse import SparseAttention
from fusion.codegen.mlir.approximate import polynomial as kernels
from fusion.machine import machine
from tests.fusion.approximate.cases import ADVERSARIES, cached_spec, check, executor, inputs, sizes_of
from tests.numerics import allowance, assert_as_exact_as_eager, assert_within, wide


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31), kind=st.sampled_from(["polynomial", "certified_sparse"]),
    heads=st.sampled_from([(2, 2), (4, 2)]), n=st.sampled_from([1, 33, 130, 515]), d=st.just((7, 20)),
    scales=st.sampled_from([(0.3,), (0.05, 1.0, 30.0)]), adversary=st.sampled_from(ADVERSARIES),
    causal=st.booleans(), epsilon=st.sampled_from([1e-1, 1e-2, 1e-3]), amx=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_errors_stay_within_certificates(
    seed, kind, heads, n, d, scales, adversary, causal, epsilon, amx, dtype
):  # fmt: skip
    q, k, v = inputs(seed, *heads, n, *d, scales, adversary, dtype)
    check(kind, q, k, v, causal, epsilon, amx)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polynomial_runs_where_scores_are_bounded_and_exact_elsewhere_in_one_call(causal, dtype):
    q, k, v = inputs(0, 4, 2, 2300 if causal else 704, 8, 8, (0.1, 100.0), "none", dtype)  # three chunks
    found = check("polynomial", q, k, v, causal, 1e-2)
    ran = {head[1]: certificate.ran for certificate in found for head in certificate.heads}
    assert ran == {0: "polynomial", 1: "exact", 2: "polynomial", 3: "exact"}
    bound = next(c for c in found if c.ran == "exact").bound
    assert bound is None or bound > 10  # None: given up before it was known


def test_equal_keys_have_no_bound_and_shifted_keys_a_small_one():
    for adversary in ("equal keys", "shifted keys"):
        q, k, v = inputs(0, 2, 2, 300, 8, 8, (0.3,), adversary, torch.float32)
        found = check("polynomial", q, k, v, False, 1e-2)
        assert all(c.ran == "polynomial" for c in found)
        assert all(c.bound < (1e-3 if adversary == "equal keys" else 1) for c in found)


@pytest.mark.parametrize("causal", [False, True])
def test_spread_scores_need_fewer_features_than_scores_at_the_limit(causal):
    """The mean square of the scores is certified: 1/d of the limit where keys lie in all directions."""
    q, k, v = (F.normalize(x, dim=-1) for x in torch.randn(3, 1, 2, 1200, 24))
    k[:, 1] = k[:, 1, :1] * torch.randn(1200, 1).sign()  # the same limit, all of them at it
    q[:, 1] = k[:, 1]
    found = check("polynomial", q * 24**0.5, k, v, causal, 1e-2)
    spread, far = sorted(found, key=lambda c: c.heads)
    assert (spread.degree, far.degree) == (2, 3) and spread.moment < 0.3 < far.moment
    assert 0.8 < spread.bound / far.bound < 1.25


def test_far_keys_that_are_few_come_close_to_the_certificate():
    q, k, v = inputs(0, 2, 2, 1000, 16, 4, (1.0,), "few far keys", torch.float32)
    (certificate,) = check("polynomial", q * 4, k, v, False, 5e-2)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q * 4, k, v)))
    spec = cached_spec(q, k, v, False)
    error = (executor("polynomial", spec, 5e-2)([q * 4, k, v], sizes_of(spec, q, k)) - exact).norm(dim=-1).max()
    assert certificate.ran == "polynomial" and error > 0.02 * certificate.output_error


def test_bounds_hold_where_products_of_lower_precision_are_allowed():
    q, k, v = inputs(0, 2, 2, 600, 16, 16, (0.3,), "none", torch.float32)
    expected = check("polynomial", q, k, v, False, 1e-2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        setting = torch.backends.mkldnn.matmul.fp32_precision
        assert [c.moment for c in check("polynomial", q, k, v, False, 1e-2)] == [c.moment for c in expected]
        assert torch.backends.mkldnn.matmul.fp32_precision == setting
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(kernels.supports(machine()) is not None, reason="no AMX")
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_two_planes_hold_are_rounded_and_others_are_not(causal):
    """Every number is as far from two planes as one can be, all to the same side, so that nothing cancels."""
    worst = 1 + 2.0**-8 - 2.0**-17
    q, k, v = inputs(0, 3, 3, 704, 16, 8, (1.0,), "none", torch.float32)
    k = k.sign() * worst
    q = k * torch.tensor([0.25, 2.0, 40.0]).view(1, 3, 1, 1)
    v = v.sign() * worst
    spec, epsilon = cached_spec(q, k, v, causal), 1e-3
    run = SparseAttention(spec, plain(spec), None, None, machine(), epsilon)  # type: ignore[arg-type]
    assert run.rounding is not None
    figures = run.look.whole([q, k, v], sizes_of(spec, q, k), second=False)
    errors = run.rounding.errors(figures.queries, figures.raw)
    assert errors[0] < epsilon < errors[2]
    out = run.rounding.whole([q, k, v], sizes_of(spec, q, k))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    error, eager = (out - exact).norm(dim=-1)[0], F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    largest = v.norm(dim=-1).max()
    for head in (0, 1):
        slack = math.sqrt(v.shape[-1]) * allowance(eager[0, head], exact[0, head])
        assert_within(error[head], 2 * errors[head] / (1 - errors[head]) * largest + slack)
    found = check("certified_sparse", q[:, :1], k[:, :1], v[:, :1], causal, epsilon)
    assert [c.ran for c in found] == ["certified_sparse"]


@pytest.mark.skipif(kernels.supports(machine()) is not None, reason="no AMX")
def test_numbers_whose_second_plane_vanishes_are_not_rounded():
    q, k, v = inputs(0, 2, 2, 64, 16, 8, (1.0,), "none", torch.float32)
    spec = cached_spec(q, k, v, False)
    run = SparseAttention(spec, plain(spec), None, None, machine(), 1e-3)  # type: ignore[arg-type]
    assert run.rounding is not None
    for (left, right), expected in (((2.0**-118, 2.0**110), [float("inf")] * 2), ((1, 1), None)):
        found = run.look.whole([q * left, k * right, v], sizes_of(spec, q, k), second=False)
        errors = run.rounding.errors(found.queries, found.raw)
        assert errors == expected if expected else max(errors) < 1e-2


@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)])
def test_sparse_leaves_out_most_tiles_of_documents(causal, dtype):
    q, k, v = inputs(0, 2, 2, 2048, 16, 16, (1.0,), "documents", dtype)
    found, epsilon = check("certified_sparse", q, k, v, causal, 1e-3), 1e-3
    tile = executor("certified_sparse", cached_spec(q, k, v, causal), epsilon).kernel
    most = max(0.3, 4 * share_needed(q, k, causal, tile.rows, tile.keys, epsilon))  # large tiles hold more documents
    assert all(c.ran == "certified_sparse" and c.live < most and c.weight_error > 0 for c in found)


def share_needed(q, k, causal, rows, keys, epsilon):
    """Of the tiles that a mask leaves: those that hold more than epsilon of the weights of a row."""
    n, scores = q.shape[-2], q.double() @ k.double().mT * q.shape[-1] ** -0.5
    live = torch.ones(n, n, dtype=torch.bool).tril(0 if causal else n)
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1)

    def tiled(x):
        return F.pad(x, (0, -n % keys, 0, -n % rows)).unflatten(-1, (-1, keys)).unflatten(-3, (-1, rows))

    needed = tiled(weights).sum(-1).amax(-2) > epsilon
    return float(needed.sum(dtype=torch.float) / tiled(live).any(-1).any(-2).sum() / needed.shape[:-2].numel())


@pytest.mark.parametrize("causal", [False, True])
def test_bounds_of_tiles_are_above_those_of_rows_and_both_above_what_blocks_add(causal):
    n = 3000
    q, k, v = inputs(0, 1, 1, n, 16, 8, (1.0,), "documents", torch.float32)
    epsilon = 1e-2
    run = executor("certified_sparse", cached_spec(q, k, v, causal), epsilon)
    q, k = q[0, 0] * run.plain.scale, k[0, 0]
    q[64:96] += torch.randn(32, 16)  # a tile of rows that differ
    scores = q.double() @ k.double().T
    if causal:
        scores.masked_fill_(torch.arange(n)[:, None] < torch.arange(n), -torch.inf)
    weights = torch.softmax(scores, -1)
    live = []
    for coarse in (False, True):
        marks, dropped = run.selection.select(q[None], Summaries(k[None], run.kernel.keys), coarse=coarse)
        seen = marks[0].repeat_interleave(run.kernel.rows, 0)[:n].repeat_interleave(run.kernel.keys, 1)[:, :n]
        assert float((weights * (seen == 0)).sum(-1).max()) <= float(dropped) <= epsilon / 2
        live.append(float(marks[0, : n // run.kernel.rows].float().mean()))
    assert live[0] <= live[1] < 1  # how much is left out depends on the rows of a tile, and these on the processor


@pytest.mark.parametrize("kind", ["polynomial", "certified_sparse"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", range(3))
def test_nan_and_infinity_are_as_in_eager(operand, value, kind):
    """A head with such a query, key or value is left to the exact kernel. Of `documents` tiles would be left out."""
    from fusion.approximate import certificates

    q, k, v = given = inputs(0, 2, 2, 512, 16, 16, (1.0,), "documents", torch.float32)
    given[operand][0, 0, 3, 0] = value
    spec = cached_spec(q, k, v, False)
    certificates.begin()
    out = executor(kind, spec, 1e-2)([q, k, v], sizes_of(spec, q, k))
    (found,) = (c for c in fusion.last_certificates() if (0, 0) in c.heads)
    assert found.ran == "exact"
    eager, exact = (F.scaled_dot_product_attention(*given) for given in ((q, k, v), wide((q, k, v))))
    assert_as_exact_as_eager(out[:, 0], eager[:, 0], exact[:, 0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s, n: s + torch.arange(n), "not a constant times the score"),
        (lambda s, n: torch.tanh(s), "not a constant times the score"),
        (lambda s, n: s.masked_fill(torch.arange(n) > n // 2, float("-inf")), "not causal from the first key"),
    ],
)
def test_other_programs_are_refused_with_a_reason(change, reason):
    x = torch.randn(1, 2, 64, 8)

    def attention(x):
        return torch.softmax(change(x @ x.mT, x.shape[2]), -1) @ x

    options = {"inner": "eager", "approximate": "polynomial"}
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        out = torch.compile(attention, backend="fusion", options=options)(x)
    assert_as_exact_as_eager(out, attention(x), attention(x.double()))
    assert reason in reports[0].sites[0].attentions[0].approximation
    assert reason in str(reports[0])
    (certificate,) = fusion.last_certificates()
    assert certificate.ran == "exact" and reason in certificate.reason


def test_sparse_leaves_out_tiles_of_peaked_heads_and_rounds_or_runs_exact_the_others():
    peaked = inputs(0, 2, 2, 4096, 16, 16, (1.0,), "documents", torch.float32)
    diffuse = inputs(0, 2, 2, 4096, 16, 16, (0.1, 10.0), "none", torch.float32)
    q, k, v = (torch.cat([x, y], 1) for x, y in zip(peaked, diffuse, strict=True))
    options = {"inner": "eager", "approximate": "certified_sparse", "epsilon": 1e-3}
    torch._dynamo.reset()
    out = torch.compile(F.scaled_dot_product_attention, backend="fusion", options=options)(q, k, v)
    ran = {head[1]: (c.ran, c.planes) for c in fusion.last_certificates() for head in c.heads}
    sparse = ("certified_sparse", None)
    # Where products do not run on tiles, the planner may find that exact attention is faster.
    assert {ran[0], ran[1]} <= ({sparse} if "amx_bf16" in machine().isa else {sparse, ("exact", None)})
    if machine().kind == "cpu" and kernels.supports(machine()) is None:
        assert ran[2] == ("certified_sparse", 2)
    eager, exact = F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(*wide((q, k, v)))
    slack = math.sqrt(v.shape[-1]) * allowance(eager, exact)
    certified = max(c.output_error or 0.0 for c in fusion.last_certificates())
    assert_within((out - exact).norm(dim=-1), certified + slack)
