"""Certified sparse attention on GPUs: the kernel in the interpreter against what it leaves out in float64, heads within
their certificates, and compiled ahead of time."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.facts import facts_of_sparse
from fusion.approximate import certificates, dispatch
from fusion.approximate.certificates import output_error
from fusion.approximate.sparse import SparseAttention
from fusion.codegen.triton.sparse_call import SparseKernel
from fusion.ir.expr import size
from fusion.ir.request import Approximation, Request
from fusion.machine import machine
from tests.codegen.mlir.cases import case
from tests.fusion.approximate.cases import assert_certified, cached_spec, inputs, selective_on_gpu, sizes_of
from tests.numerics import allowance, assert_as_exact_as_eager, assert_same, assert_within

ALLOWED = Approximation(method="certified_sparse", epsilon=1e-2)
SELECTIVE = Request(approximation=ALLOWED)


def documents(n, d, dtype=torch.float32, heads=2):
    """Queries and keys [heads, n, d] whose scores are high within a document of 64 tokens."""
    q, k, _ = inputs(0, heads, heads, n, d, d, (1.0,), "documents", dtype)
    return q[0], k[0]


def tiled(x, rows, keys):
    """[h, row tiles, rows, key tiles, keys], padded with zeros."""
    return (
        F.pad(x, (0, -x.shape[-1] % keys, 0, -x.shape[-2] % rows)).unflatten(-1, (-1, keys)).unflatten(-3, (-1, rows))
    )


def weights_of(q, k, scale, causal):
    """[h, n_q, n_k] in float64."""
    scores = q.double() @ k.double().mT * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def all_marks(run, heads, n_q, n_k):
    return torch.ones(heads, -(-n_q // run.rows), -(-n_k // run.keys), dtype=torch.uint8)


def needed(weights, run, share):
    """[h, row tiles, key tiles], by brute force: the tiles that have to be computed, visited in the order of the
    keys."""
    tiles = tiled(weights, run.rows, run.keys)
    found = torch.zeros(tiles.shape[0], tiles.shape[1], tiles.shape[3], dtype=torch.bool)
    total = torch.zeros(tiles.shape[:3], dtype=torch.float64)
    for number in range(tiles.shape[3]):
        highest = tiles[:, :, :, number].amax(-1)
        found[..., number] = ((highest > share * total) & (highest > 0)).any(-1)
        total += tiles[:, :, :, number].sum(-1) * found[..., number, None]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_left_out_is_certified_and_counted(dtype, causal):
    """V says which tile a key is in, so that outputs say how much of a row's weight each tile had."""
    n, share, scale = 389, 1e-4, 0.2
    q, k = documents(n, 40, dtype)
    run = SparseKernel(40, -(-n // 32), scale, causal, str(dtype)[6:])
    marks = all_marks(run, 2, n, n)
    v = F.one_hot(torch.arange(n) // run.keys, -(-n // 32)).to(dtype).expand(2, -1, -1)
    out, left, computed = run(q, k, v, (), marks, share)
    weights = weights_of(q, k, scale, causal)
    mass = tiled(weights, run.rows, run.keys).sum(-1).flatten(1, 2)[:, :n]
    want = needed(weights, run, share)
    dropped = ~want.repeat_interleave(run.rows, 1)[:, :n]
    assert computed.tolist() == want.sum((1, 2)).tolist()
    assert all(0 < count < 0.6 * marks[0].numel() for count in computed)
    assert not out[..., : mass.shape[-1]][dropped].any()
    true = (mass * dropped).sum(-1).amax(-1)
    assert_within(true, left)
    assert (true > 0).all() and (left < run.keys * mass.shape[-1] * share).all()
    eager = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    exact = weights @ v.double()
    for head in range(2):
        error = (out[head].double() - exact[head]).norm(dim=-1)
        slack = math.sqrt(v.shape[-1]) * allowance(eager[head], exact[head])
        assert_within(error, output_error(float(left[head]), 1.0) + slack)


@pytest.mark.parametrize("tiles", [3, 40])
@pytest.mark.parametrize("above", [1e-4, -1e-4, -300.0])
def test_tiles_at_the_threshold(tiles, above):
    """All keys but one have a weight of just the share: the certificate is what they add up to, and hardly more. Or
    one that float32 takes for 0, which is certified too."""
    share = 2.0**-24
    run = SparseKernel(16, 8, 1.0, False)
    n = tiles * run.keys
    q, k = torch.zeros(1, 50, 16), torch.zeros(1, n, 16)
    q[..., 0] = 1.0
    k[:, 1 : run.keys, 0] = -300.0
    k[:, run.keys :, 0] = math.log(share) + above
    v = torch.randn(1, n, 8)
    out, left, computed = run(q, k, v, (), all_marks(run, 1, 50, n), share)
    weights, blocks = weights_of(q, k, 1.0, False), -(-50 // run.rows)
    if above > 0:
        assert computed.tolist() == [blocks * tiles] and left.tolist() == [0.0]
        assert_as_exact_as_eager(out, F.scaled_dot_product_attention(q, k, v, scale=1.0), weights @ v.double())
        return
    true = weights[..., run.keys :].sum(-1).amax()
    assert computed.tolist() == [blocks]
    assert_within(true, left[0])
    assert_within(left[0], true / (1 - true) * 1.001 + 1e-25)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "d_v", "n"), [(1, 1, 1), (40, 24, 389), (16, 100, 130), (130, 7, 70)])
def test_nothing_is_left_out_of_even_weights(causal, d, d_v, n):
    """Scores far below 0 for every key (m starts at -inf) and keys that are all alike."""
    q, k, v = torch.randn(2, n, d), torch.randn(2, n, d) * 0.01, torch.randn(2, n, d_v)
    k -= 40 * F.normalize(q.mean(1, keepdim=True), dim=-1)
    k[1] = k[1, :1]
    q[1] = q[1].abs() * k[1, :1].sign() * -9
    run = SparseKernel(d, d_v, d**-0.5, causal)
    marks = all_marks(run, 2, n, n)
    out, left, computed = run(q, k, v, (), marks, 0.1 / n)
    live = tiled(weights_of(q * 0, k, 1.0, causal), run.rows, run.keys).flatten(-1).amax((2, 4)) > 0
    assert left.tolist() == [0.0] * 2 and computed.tolist() == live.sum((1, 2)).tolist()
    eager = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_as_exact_as_eager(out, eager, weights_of(q, k, d**-0.5, causal) @ v.double())


@pytest.mark.parametrize("n_k", [70, 389])
def test_only_marked_tiles_are_read(n_k):
    """The others hold NaN. Rows of queries, keys and values lie apart, in one packed tensor."""
    n_q, heads, d = 150, 3, 16
    run = SparseKernel(d, d, 0.3, False)
    marks = torch.rand(heads, -(-n_q // run.rows), -(-n_k // run.keys)) < 0.5
    marks[:, :, 1] = True
    marks = marks[:, :1].expand(-1, marks.shape[1], -1)
    q = torch.randn(n_q, heads, d).transpose(0, 1)
    k, v = torch.randn(2, n_k, heads, d).transpose(1, 2)
    keep = marks[:, 0].repeat_interleave(run.keys, 1)[:, :n_k, None]
    holes = [torch.where(keep, x.contiguous(), math.nan) for x in (k, v)]
    holes = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in holes]
    out, left, computed = run(q, *holes, (), marks, 0.0)
    assert left.tolist() == [0.0] * heads and computed.tolist() == marks.sum((1, 2)).tolist()
    mask = keep.mT.expand(-1, n_q, -1)
    eager, exact = (
        F.scaled_dot_product_attention(x, y, z, attn_mask=mask, scale=0.3)
        for x, y, z in ((q, k, v), (q.double(), k.double(), v.double()))
    )
    assert_as_exact_as_eager(out, eager, exact)
    assert_same(run(q.contiguous(), *(x.contiguous() for x in holes), (), marks, 0.0)[0], out)


@pytest.mark.parametrize("adversary", ["documents", "peaked", "one huge key", "few far keys", "none"])
@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_heads_stay_within_their_certificates(adversary, causal, dtype):
    """Four heads share two heads of keys, among them some of small scores."""
    q, k, v = inputs(1, 4, 2, 389, 40, 24, (1.0, 0.05), adversary, dtype)
    spec, epsilon = cached_spec(q, k, v, causal), 1e-2
    certificates.begin()
    out = selective_on_gpu(spec, epsilon, always=True)([q, k, v], sizes_of(spec, q, k))
    found = assert_certified(out, q, k, v, causal, epsilon)
    if adversary == "documents":
        assert all(c.ran == "certified_sparse" and c.live < 0.6 and c.weight_error > 0 for c in found)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("operand", range(3))
def test_heads_that_are_not_finite_run_exact(operand, value):
    q, k, v = given = inputs(0, 3, 3, 200, 16, 16, (1.0,), "documents", torch.float32)
    given[operand][0, 1, 3, 0] = value
    spec = cached_spec(q, k, v, False)
    certificates.begin()
    out = selective_on_gpu(spec, 1e-2, always=True)([q, k, v], sizes_of(spec, q, k))
    ran = {head[1]: c.ran for c in fusion.last_certificates() for head in c.heads}
    large = operand == 2 and math.isfinite(value)
    assert ran == {0: "certified_sparse", 1: "certified_sparse" if large else "exact", 2: "certified_sparse"}
    eager, exact = (F.scaled_dot_product_attention(*(x.to(dtype) for x in given)) for dtype in (q.dtype, torch.float64))
    if not large:
        assert_as_exact_as_eager(out[:, 1], eager[:, 1], exact[:, 1])


@pytest.mark.parametrize(("causal", "n"), [(False, 2048), (True, 4096)])
def test_heads_together_are_judged_as_heads_alone(causal, n):
    """With predicted times: peaked heads leave out tiles, the others run exact; all are asked for with one read."""
    peaked = inputs(0, 2, 2, n, 16, 16, (1.0,), "documents", torch.float32)
    diffuse = inputs(0, 2, 2, n, 16, 16, (0.1, 10.0), "none", torch.float32)
    q, k, v = (torch.cat([x, y], 1) for x, y in zip(peaked, diffuse, strict=True))
    spec = cached_spec(q, k, v, causal)
    certificates.begin()
    run = selective_on_gpu(spec, 1e-3)
    out = run([q, k, v], sizes_of(spec, q, k))
    found = assert_certified(out, q, k, v, causal, 1e-3)
    ran = {head[1]: (c.ran, c.live or 1) for c in found for head in c.heads}
    assert [ran[head][0] for head in range(4)] == ["certified_sparse"] * 2 + ["exact"] * 2
    assert max(ran[0][1], ran[1][1]) < 0.5
    shares = dict.fromkeys(range(4), 0.5)
    together = run.selection.marks(q[0], k[0], v[0], shares, True)
    for head in range(4):
        alone = run.selection.marks(*(x[0, head : head + 1] for x in (q, k, v)), {0: 0.5}, True)
        assert (head in together) == (0 in alone)
        if alone:
            assert_same(together[head][0], alone[0][0])


def test_heads_bounded_by_tiles_and_by_rows_keep_their_places():
    """The second head is chosen by bounds of whole tiles, the others by bounds of every row."""
    q, k, v = inputs(0, 3, 3, 1024, 16, 16, (1.0,), "documents", torch.float32)
    q[:, ::2] = torch.randn(2, 1024, 16)
    spec = cached_spec(q, k, v, False)
    run = selective_on_gpu(spec, 1e-3, always=True)
    certificates.begin()
    found = assert_certified(run([q, k, v], sizes_of(spec, q, k)), q, k, v, False, 1e-3)
    live = {head[1]: c.live for c in found for head in c.heads}
    assert live[1] < 0.2 < min(live[0], live[2])


def test_gpus_are_sent_to_this_kernel(monkeypatch):
    """Where the machine is known, and for what the kernel can do."""
    spec = case("causal", "bfloat16", 64).spec
    assert dispatch.refusal(spec, "cuda", SELECTIVE) is None
    assert "up to 256" in str(dispatch.refusal(case("plain", "bfloat16", 576).spec, "cuda", SELECTIVE))
    assert "this one varies" in str(dispatch.refusal(replace(spec, d=size("Nq")), "cuda", SELECTIVE))
    assert "skips nothing" in str(dispatch.refusal(spec, "cuda", Request(approximation=ALLOWED, emitter="reference")))
    build = (spec, "cuda", SELECTIVE, None, lambda other: None, machine())
    unknown = dispatch.build(*build)  # type: ignore[arg-type]
    assert isinstance(unknown, dispatch.Exact) and "times cannot be predicted" in unknown.reason
    monkeypatch.setattr(dispatch, "find_machine", lambda name: machine("h200"))
    built = dispatch.build(*build)  # type: ignore[arg-type]
    assert isinstance(built, SparseAttention) and isinstance(built.kernel, SparseKernel)
    assert built.machine.name == "h200" and built.rounding is None


def test_calls_in_cuda_graphs_run_exact(monkeypatch):
    spec = cached_spec(*(torch.randn(1, 1, 8, 16) for _ in range(3)), False)
    run = selective_on_gpu(spec, 1e-2, always=True)
    run.exact = lambda operands, sizes: "exact"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    operand = SimpleNamespace(is_cuda=True, shape=(8, 16), dim=lambda: 2)
    certificates.begin()
    assert run([operand] * 3, []) == "exact"
    (found,) = fusion.last_certificates()
    assert found.ran == "exact" and "CUDA graph is being captured" in found.reason


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(("dtype", "d", "d_v"), [("bfloat16", 128, 128), ("float16", 64, 40), ("float32", 64, 64)])
def test_the_kernel_on_every_target(target, dtype, d, d_v):
    """Nothing spills to memory; float32 is multiplied without tensor cores, in full precision."""
    fact = facts_of_sparse(d, d_v, target, dtype=dtype, causal=True)
    assert fact.fits and not fact.lost and not fact.warnings, fact
    assert fact.spilled == 0 and (target == "gfx942" or not fact.spills), fact
    kind = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}[target]
    assert (fact.matrix[kind] > 0) == (dtype != "float32" or target == "gfx942"), fact


@pytest.mark.parametrize(("dtype", "d"), [("bfloat16", 256), ("float32", 32), ("float32", 128), ("float32", 256)])
def test_other_widths_do_not_spill_on_hopper(dtype, d):
    fact = facts_of_sparse(d, d, "sm_90", dtype=dtype)
    assert fact.fits and not fact.spills and not fact.lost and not fact.warnings, fact
