"""Polynomial features on GPUs: in the interpreter against the reference and within certificates, and compiled ahead of
time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.facts import facts_of_features
from fusion.approximate import certificates
from fusion.approximate.certificates import plain_form
from fusion.approximate.polynomial import PolynomialAttention
from fusion.codegen.reference import polynomial as reference
from fusion.codegen.triton.polynomial import FeatureKernels, supports
from fusion.ir.request import Approximation, Request
from fusion.machine import machine
from fusion.planning.problem import Problem
from fusion.runtime.kernels import executor
from tests.numerics import assert_within

COEFFICIENTS = torch.tensor([[1.0, 1.01, 0.52, 0.17, 0.05], [0.99, 1.0, 0.51, 0.16, 0.04]], dtype=torch.float64)


def rounding(powers, planes):
    """What rounding may add to an output, relative to the values: four roundings to bf16 of the terms of the top
    degree, or of a rest 2**-8 smaller (see approximate/cost.py), over the least weight."""
    top, low = float(powers[0, -1]), float(powers[0, :-1].sum())
    error = top * (4 * 2.0**-8, 6 * 2.0**-16)[planes - 1] + low * 6 * 2.0**-16
    least = float(sum(c * (-1.0) ** g for g, c in enumerate(powers[0].tolist())))
    return 2 * error / max(least, 0.2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("n_q", "n_k", "d", "d_v", "degree"),
    [(1, 1, 1, 1, 1), (70, 90, 16, 16, 3), (65, 129, 3, 40, 4), (50, 140, 32, 20, 2), (30, 40, 8, 15, 1)],
)
@pytest.mark.parametrize("planes", [1, 2])
def test_kernels_agree_with_the_reference(n_q, n_k, d, d_v, degree, planes):
    """Two heads with polynomials of their own share one head of keys."""
    generator = torch.Generator().manual_seed(d * degree)
    q, k = (F.normalize(torch.randn(h, n, d, generator=generator), dim=-1) for h, n in ((2, n_q), (1, n_k)))
    v, powers = torch.randn(1, n_k, d_v, generator=generator), COEFFICIENTS[:, : degree + 1]
    run = FeatureKernels(d, d_v, degree, planes, True)
    expected = reference.attend(q.double(), k.double(), v.double(), powers)
    for values in (v, v.bfloat16()):
        exact = expected if values is v else reference.attend(q.double(), k.double(), values.double(), powers)
        found = run.attend(q, k, values, torch.zeros(2, dtype=torch.int64), powers)
        assert found.shape == (2, n_q, d_v)
        assert_within((found - exact).abs(), rounding(powers, planes) * v.abs().max())


def test_roundings_of_the_top_degree_are_those_that_are_counted():
    """One plane errs, or the test above would not tell it from two."""
    q, k, v = F.normalize(torch.randn(1, 60, 16), dim=-1), torch.ones(1, 80, 16) / 4, torch.randn(1, 80, 16)
    exact = reference.attend(q.double(), k.double(), v.double(), COEFFICIENTS[:1, :3])
    owner, errors = torch.zeros(1, dtype=torch.int64), []
    for planes in (1, 2):
        run = FeatureKernels(16, 16, 2, planes, True)
        errors.append(float((run.attend(q, k, v, owner, COEFFICIENTS[:1, :3]) - exact).abs().max()))
    assert errors[0] > 8 * errors[1] > 0


@pytest.mark.parametrize("n", [64, 150])
def test_causal_chunks(n):
    q, k = (F.normalize(torch.randn(2, n, 12), dim=-1) for _ in range(2))
    v, owner = torch.randn(2, n, 5), torch.tensor([1, 0])
    run = FeatureKernels(12, 5, 3, 2, True)
    found = run.attend(q, k, v, owner, COEFFICIENTS[:, :4], 64)
    expected = reference.attend(q.double(), k[owner].double(), v[owner].double(), COEFFICIENTS[:, :4], 64)
    assert_within((found - expected).abs(), rounding(COEFFICIENTS[:, :4], 2) * v.abs().max())


@pytest.mark.parametrize(("causal", "dtype", "n"), [(False, torch.bfloat16, 150), (True, torch.float32, 530)])
def test_heads_are_certified_or_exact_in_one_call(causal, dtype, n):
    """Against the exact function in float64: heads of bounded scores within their certificate, the other head exact."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    q, k, v = torch.randn(1, 4, n, 16), torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)
    q, k, v = (x.to(dtype) for x in (q * torch.tensor([0.1, 0.2, 100.0, 0.15]).view(1, 4, 1, 1), k, v))
    torch._dynamo.reset()
    spec = fusion.explain(attention, q, k, v).sites[0].spec
    exact = executor(spec.to_json(), "cpu", "reference")
    run = PolynomialAttention(
        spec, plain_form(spec), exact, lambda other: executor(other.to_json(), "cpu", "reference"), machine(), 1e-2,
        kernels="triton", always=True,
    )  # fmt: skip
    certificates.begin()
    known = {"B0": 1, "B1": 4, "Nq": n, "Nk": n}
    out = run([q, k, v], [known[name] for name in spec.sizes])
    wide = [x.double() for x in (q, *(x.repeat_interleave(2, 1) for x in (k, v)))]
    error = (out - F.scaled_dot_product_attention(*wide, is_causal=causal)).norm(dim=-1).amax(-1)[0]
    ran, rounding = {}, 2e-2 if dtype is torch.bfloat16 else 2e-5
    for certificate in fusion.last_certificates():
        for _, head in certificate.heads:
            ran[head] = certificate.ran
            assert error[head] <= certificate.output_error + rounding * wide[2].norm(dim=-1).max()
    assert ran == {0: "polynomial", 1: "polynomial", 2: "exact", 3: "polynomial"}


def test_gpus_are_sent_to_these_kernels(monkeypatch):
    """Where the machine is known; the machine without a GPU stands for one that is not."""
    from fusion.approximate import dispatch
    from tests.codegen.mlir.cases import case

    allowed, spec = Approximation(method="polynomial", epsilon=1e-2), case("plain", "bfloat16", 16).spec
    request = Request(approximation=allowed)
    assert dispatch.refusal(spec, "cuda") is None
    assert "up to 64" in str(dispatch.refusal(case("plain", "bfloat16", 128).spec, "cuda"))
    monkeypatch.setattr(dispatch, "find_machine", lambda name: machine("h200"))
    built = dispatch.build(spec, "cuda", request, None, None, machine())  # type: ignore[arg-type]
    assert isinstance(built, PolynomialAttention) and built.kernels == "triton" and built.machine.name == "h200"
    assert "faster than exact from N" in dispatch.describe(
        allowed, Problem(n_q=64, n_k=64, d=16, d_v=16), built.machine
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("d", "degree", "planes"), [(16, 3, 1), (32, 2, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_spills_on_hopper(d, degree, planes, causal):
    for fact in facts_of_features(d, d, degree, "sm_90", planes=planes, causal=causal):
        assert fact.fits and not fact.spills and not fact.lost and not fact.warnings, fact
        assert fact.matrix["wgmma"] > 0, fact


def test_wide_heads_are_refused():
    assert supports(64, 64) is None
    assert "up to 64, not 128" in str(supports(128, 64))
