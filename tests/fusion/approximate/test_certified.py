"""Measured errors never exceed what is certified, whatever the data; what is not certified is exact.

One file over the usual length: both methods go through the same cases.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fusion
from fusion.approximate import dispatch
from fusion.approximate.blocks import Summaries
from fusion.approximate.eligible import plain
from fusion.approximate.head_batches import HeadPacker
from fusion.approximate.polynomial import PolynomialAttention
from fusion.approximate.score_bounds import MOMENT_MARGIN, Inspection
from fusion.approximate.sparse import SparseAttention
from fusion.codegen import mlir
from fusion.codegen.mlir import polynomial as kernels
from fusion.machine import machine
from fusion.runtime import kernels as built
from tests.numerics import (
    allowance,
    assert_as_exact_as_eager,
    assert_runs_as_exact_as_eager,
    assert_within,
    wide,
)


def spec_of(q, k, v, causal):
    """The spec that the backend finds."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    torch._dynamo.reset()
    (site,) = fusion.explain(attention, q, k, v).sites
    return site.spec


_specs = {}


def cached_spec(q, k, v, causal):
    key = (q.dtype, q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1], causal)
    if key not in _specs:  # from a length of its own: one of 1 would be specialised
        _specs[key] = spec_of(*(x[:, :, :1].repeat(1, 1, 40, 1) for x in (q, k, v)), causal)
    return _specs[key]


def executor(kind, spec, epsilon, amx=True):
    emitter = "auto" if mlir.unavailable() is None else "reference"
    exact = built.executor(spec.to_json(), "cpu", emitter)

    def build(other):
        return built.executor(other.to_json(), "cpu", emitter)

    if kind == "certified_sparse":
        if mlir.unavailable() is not None:
            pytest.skip(mlir.unavailable())
        return SparseAttention(spec, plain(spec), exact, build, machine(), epsilon, always=True)
    if amx is True:
        amx = "amx" if kernels.supports(machine()) is None else None
    return PolynomialAttention(spec, plain(spec), exact, build, machine(), epsilon, kernels=amx or None, always=True)


def sizes_of(spec, q, k):
    known = {"B0": q.shape[0], "B1": q.shape[1], "Nq": q.shape[2], "Nk": k.shape[2]}
    return [known[name] for name in spec.sizes]


def check(kind, q, k, v, causal, epsilon, amx=True):
    """One call: every head within its certificate. Returns the certificates."""
    from fusion.approximate import certificates

    spec = cached_spec(q, k, v, causal)
    run = executor(kind, spec, epsilon, amx)
    certificates.begin()
    out = run([q, k, v], sizes_of(spec, q, k))
    found = fusion.last_certificates()
    groups = q.shape[1] // k.shape[1]
    repeated = [q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)]
    exact = F.scaled_dot_product_attention(*wide(repeated), is_causal=causal)
    eager = F.scaled_dot_product_attention(*repeated, is_causal=causal)
    error = (out.double() - exact).norm(dim=-1).amax(-1)
    heads = [head for certificate in found for head in certificate.heads]
    assert sorted(heads) == [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
    for certificate in found:
        assert certificate.weight_error <= epsilon
        for b, h in certificate.heads:
            slack = math.sqrt(v.shape[-1]) * allowance(eager[b, h], exact[b, h])  # in the norm of a row
            assert_within(error[b, h], certificate.output_error + slack)
    return found


def inputs(seed, heads, kv_heads, n, d, d_v, scales, adversary, dtype):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, h, n, width, generator=generator) for h, width in ((heads, d), (kv_heads, d), (kv_heads, d_v))
    )
    q = q * torch.tensor([scales[h % len(scales)] for h in range(heads)]).view(1, heads, 1, 1)
    if adversary == "one huge key":
        k[:, :, n // 3] *= 50.0
    if adversary == "one huge query":
        q[:, :, n // 3] *= 50.0
    if adversary == "equal keys":
        k[:] = k[:, :, :1] * 7
    if adversary == "shifted keys":
        k = k * 0.1 + 3
    if adversary == "few far keys":  # what moments allow for: most scores near 0, a few at the limit, with other values
        far = torch.arange(n) % 31 == 0
        line = F.normalize(torch.ones(d), dim=-1)
        k = torch.where(far[:, None], line * 2, k * 0.02)
        q = line * q[..., :1].sign() * 0.45 + 0.01 * q
        v = torch.where(far[:, None], v.abs() + 1, -v.abs())
    if adversary == "peaked":
        k = F.normalize(k, dim=-1) * 12
        q = torch.repeat_interleave(k[:, :, :: max(1, n // 4)], 5, 2)[:, :, :n].repeat(1, 1, n, 1)[:, :, :n] * 3
        q = q.repeat_interleave(heads // kv_heads, 1)
    if adversary == "documents":
        place = torch.arange(n) // 64
        k = (
            k * 0.1
            + 9 * F.normalize(torch.randn(1, kv_heads, n // 64 + 1, d, generator=generator), dim=-1)[:, :, place]
        )
        q = k.repeat_interleave(heads // kv_heads, 1) * 3
    return q.to(dtype), k.to(dtype), v.to(dtype)


ADVERSARIES = ["none", "one huge key", "one huge query", "equal keys", "shifted keys", "few far keys", "peaked"]
ADVERSARIES += ["documents"]


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
    found = check("certified_sparse", q, k, v, causal, 1e-3)
    assert all(c.ran == "certified_sparse" and c.live < 0.3 and c.weight_error > 0 for c in found)


@pytest.mark.parametrize("causal", [False, True])
def test_bounds_of_tiles_are_above_those_of_rows_and_both_above_what_blocks_add(causal):
    q, k, v = inputs(0, 1, 1, 1000, 16, 8, (1.0,), "documents", torch.float32)
    epsilon = 1e-2
    run = executor("certified_sparse", cached_spec(q, k, v, causal), epsilon)
    q, k = q[0, 0] * run.plain.scale, k[0, 0]
    q[64:96] += torch.randn(32, 16)  # a tile of rows that differ
    scores = q.double() @ k.double().T
    if causal:
        scores.masked_fill_(torch.arange(1000)[:, None] < torch.arange(1000), -torch.inf)
    weights = torch.softmax(scores, -1)
    live = []
    for coarse in (False, True):
        marks, dropped = run.select(q, Summaries(k, run.kernel.keys), coarse=coarse)
        seen = marks.repeat_interleave(run.kernel.rows, 0)[:1000].repeat_interleave(run.kernel.keys, 1)[:, :1000]
        assert float((weights * (seen == 0)).sum(-1).max()) <= float(dropped) <= epsilon / 2
        live.append(float(marks[: 1000 // run.kernel.rows].float().mean()))
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
        (lambda s, n: s.masked_fill(torch.arange(n) > n // 2, float("-inf")), "neither absent nor causal"),
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


@pytest.mark.parametrize("method", ["polynomial", "certified_sparse"])
def test_a_glance_ends_the_matter_where_nothing_helps(method, monkeypatch):
    """Without looking at all of the data, which costs more than the exact kernel may become slower."""
    if mlir.unavailable() is not None:
        pytest.skip(mlir.unavailable())
    x = torch.randn(3, 1, 4, 4096, 16) * 16
    spec = cached_spec(*x, False)
    run = executor(method, spec, 1e-2)
    run.always = False
    exact = run.exact([*x], sizes_of(spec, x[0], x[1]))
    monkeypatch.setattr(Inspection, "whole", lambda *a, **k: 1 / 0)
    for _ in range(2):
        assert torch.equal(run([*x], sizes_of(spec, x[0], x[1])), exact)
    assert fusion.last_certificates()[-1].reason.startswith(("a sample of", "too many keys"))
    few = torch.randn(3, 1, 4, 300, 16) * 1e-3
    run([*few], sizes_of(spec, few[0], few[1]))
    assert fusion.last_certificates()[-1].reason.endswith("at this length")


@pytest.mark.parametrize(
    ("groups", "dtype", "causal"), [(1, torch.float32, False), (2, torch.float32, True), (2, torch.bfloat16, False)]
)
def test_the_kernel_that_looks_sees_what_torch_sees(groups, dtype, causal):
    """In tensors of any layout, in all rows and in a few; torch's operations run where it cannot read them."""
    if mlir.unavailable() is not None:
        pytest.skip(mlir.unavailable())
    n = 2300 if causal else 333
    q, k = (torch.randn(2, n, 4 // g, 20).transpose(1, 2).to(dtype) + 1 for g in (1, groups))
    spec = cached_spec(q, k, k, causal)
    looks = [Inspection(HeadPacker(spec), 0.1, causal, native) for native in (True, False)]
    sizes = sizes_of(spec, q, k)
    for operands in ([q, k, k], [q + 1, k + 1, k], [q.contiguous(), k, k]):
        assert looks[0].gather.places(operands, sizes) is not None
        for found, expected in (
            [look.whole(operands, sizes) for look in looks],
            [look.sample(operands, sizes, 12, 10) for look in looks],
        ):
            for one, other in zip(found, expected, strict=True):
                one, other = (torch.as_tensor(x).double() for x in (one, other))
                # Certificates have this much room for the rounding of what was looked at.
                assert_within((one - other).abs(), MOMENT_MARGIN * other.abs().max())
    known, found = looks[0].whole([q, k, k], sizes), looks[0].whole([q, k, k], sizes, limit=1e-3)  # given up at once
    assert found.moments == found.bounds == [torch.inf] * 8
    found = looks[0].whole([q, k, k], sizes, limit=0.999 * min(known.bounds))  # later
    assert all(a <= b <= 3 * a for a, b in zip(known.bounds, found.bounds, strict=True))
    assert torch.inf in found.moments
    operands = [q.mT.contiguous().mT, k, k]
    assert looks[0].gather.places(operands, sizes) is None
    assert looks[0].whole(operands, sizes).bounds == looks[1].whole(operands, sizes).bounds


@pytest.mark.parametrize("causal", [False, True])
def test_a_glance_counts_blocks_that_their_boxes_rule_out(causal):
    if mlir.unavailable() is not None:
        pytest.skip(mlir.unavailable())
    q, k = torch.randn(2, 2, 2, 704, 24).bfloat16()
    q[1, 1] *= 9
    k[1, 1, :] = k[1, 1, ::8].repeat_interleave(8, 0)  # boxes that are points
    spec, gap = cached_spec(q, k, k, causal), 20.0
    found = Inspection(HeadPacker(spec), 0.5, causal, True).ruled_out(
        [q, k, k], sizes_of(spec, q, k), (16, 128, 4, 8), gap
    )
    step, block_step = 42, 704 // 8 // 4 * 8  # queries at places of the keys 0, 6, 12, ..
    q, k = q[:, :, ::step][:, :, :16].flatten(0, 1).double(), k.flatten(0, 1).double()
    rows = torch.arange(16) * step
    scores = q @ k[:, ::6].mT
    if causal:
        scores.masked_fill_(rows[:, None] < torch.arange(0, 704, 6), -torch.inf)
    blocks = torch.stack([k[:, first : first + 8] for first in range(0, 704, block_step)], 1)[:, :, None]
    upper = torch.maximum(q[:, None] * blocks.amax(3), q[:, None] * blocks.amin(3)).sum(-1)
    seen = (rows >= torch.arange(blocks.shape[1])[:, None] * block_step) & (rows >= rows[len(rows) // 2])
    seen = seen if causal else torch.ones_like(seen)
    ruled_out = (upper <= scores.amax(-1)[:, None] - gap / 0.5) & seen
    assert [round(share * int(seen.sum())) for share in found] == ruled_out.sum((1, 2)).tolist()
    assert found[0] == 0 < found[3]


def test_training_keeps_the_exact_kernel():
    x = torch.randn(1, 2, 256, 8, requires_grad=True)
    options = {"inner": "eager", "approximate": "polynomial", "epsilon": 0.5}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="fusion", options=options)
    out = compiled(x)
    assert [c.reason for c in fusion.last_certificates()] == [dispatch.TRAINING]
    double = wide(x).requires_grad_()
    ours, eager, exact = (
        [y.detach(), *torch.autograd.grad(y.square().sum(), given)]
        for y, given in ((out, x), *((F.scaled_dot_product_attention(t, t, t), t) for t in (x, double)))
    )
    assert_as_exact_as_eager(ours, eager, exact)


def test_certificates_are_those_of_the_last_call():
    x = torch.randn(1, 2, 2048, 8) * 0.3
    options = {"inner": "eager", "approximate": "polynomial"}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(*[F.scaled_dot_product_attention(x, x, x)] * 3),
        backend="fusion", options=options,
    )  # fmt: skip
    for _ in range(2):
        compiled(x)
        assert sorted(head for c in fusion.last_certificates() for head in c.heads) == sorted([(0, 0), (0, 1)] * 2)


def test_certificates_of_models_and_threads_are_told_apart():
    torch._dynamo.reset()

    def compiled(epsilon):
        options = {"inner": "eager", "approximate": "polynomial", "epsilon": epsilon}
        return torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="fusion", options=options)

    x, models = torch.randn(1, 2, 2048, 8) * 0.3, {epsilon: compiled(epsilon) for epsilon in (0.01, 0.02)}
    for model in models.values():
        model(x)
    met = threading.Barrier(2)

    def run(epsilon: float) -> list[set[float]]:
        with fusion.collect_certificates() as found:
            models[epsilon](x)
            met.wait()
            models[epsilon](x)
        last = fusion.last_certificates()
        assert sum(len(c.heads) for c in found) == 4 and sum(len(c.heads) for c in last) == 2
        return [{c.epsilon for c in certificates} for certificates in (found, last)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, models)) == [[{epsilon}] * 2 for epsilon in models]
    with fusion.collect_certificates() as found:
        for model in models.values():
            model(x)
    assert {c.epsilon for c in found} == set(models)
    assert {c.epsilon for c in fusion.last_certificates()} == {0.02}


def test_a_failure_leaves_the_exact_kernel(monkeypatch):
    q, k, v = inputs(0, 4, 4, 4096, 8, 8, (0.2,), "none", torch.float32)
    monkeypatch.setattr(PolynomialAttention, "_run", lambda *a: 1 / 0)
    options = {"inner": "eager", "approximate": "polynomial", "epsilon": 0.1234}
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="fusion", options=options)
    assert_runs_as_exact_as_eager(compiled, F.scaled_dot_product_attention, q, k, v)
    assert "ZeroDivisionError" in fusion.last_certificates()[0].reason


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
    assert ran[0] == ran[1] and ran[0] in ([sparse] if "amx_bf16" in machine().isa else [sparse, ("exact", None)])
    if machine().kind == "cpu" and kernels.supports(machine()) is None:
        assert ran[2] == ("certified_sparse", 2)
    eager, exact = F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(*wide((q, k, v)))
    slack = math.sqrt(v.shape[-1]) * allowance(eager, exact)
    certified = max(c.output_error or 0.0 for c in fusion.last_certificates())
    assert_within((out - exact).norm(dim=-1), certified + slack)
