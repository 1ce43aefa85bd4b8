"""The feature kernels against the reference, and the reference against the polynomial itself."""

import pytest
import torch

from fusion.codegen.cpu import polynomial as kernels
from fusion.codegen.reference import polynomial as reference
from fusion.machine import machine
from tests.numerics import assert_as_exact_as_eager, assert_same_in_float64, assert_within

needs_tiles = pytest.mark.skipif(kernels.supports(machine()) is not None, reason="no AMX")


def case(heads, n_q, n_k, d, d_v, degree):
    generator = torch.Generator().manual_seed(d * degree)
    q, k = (torch.randn(heads, n, d, generator=generator) / d**0.5 for n in (n_q, n_k))
    return q, k, torch.randn(heads, n_k, d_v, generator=generator), [1.0, 1.01, 0.52, 0.17, 0.05][: degree + 1]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_computes_the_polynomial(degree, causal):
    q, k, v, c = case(2, 600, 600, 5, 3, degree)
    q, k, v, c = q.double(), k.double(), v.double(), torch.tensor(c).tolist()  # numbers of float32, which c is kept in
    scores = q @ k.mT
    weights = sum(c[g] * scores**g for g in range(degree + 1))
    if causal:
        chunk = torch.arange(600) // 256
        weights = torch.where(chunk[:, None] == chunk, scores.exp(), weights).tril()
    expected = weights @ v / weights.sum(-1, keepdim=True)
    assert_same_in_float64(reference.attend(q, k, v, c, 256 if causal else 0), expected)
    each = torch.tensor([c, c])
    assert_same_in_float64(reference.attend(q, k, v, each, 256 if causal else 0), expected)


@pytest.mark.one_in(2)
@needs_tiles
@pytest.mark.parametrize(
    ("n_q", "n_k", "d", "d_v", "degree"),
    [(1, 1, 1, 1, 1), (200, 333, 16, 16, 3), (64, 128, 32, 32, 2), (65, 129, 3, 40, 4), (70, 1000, 8, 15, 3)],
)
@pytest.mark.parametrize("planes", [1, 2])
def test_kernels_agree_with_the_reference(n_q, n_k, d, d_v, degree, planes):
    q, k, v, c = case(3, n_q, n_k, d, d_v, degree)
    run = kernels.kernels(d, d_v, degree, planes)
    state = run.state(k, v)
    weighted = state * run.weights(torch.tensor(c))[:, None]
    total = run.readout(q, weighted)
    quotient, exact = (x[..., :-1] / x[..., -1:] for x in (total, total.double()))
    assert_as_exact_as_eager(run.readout(q, weighted, divided=True), quotient, exact)
    scores = q.double() @ k.double().mT
    expected = sum(c[g] * scores**g for g in range(degree + 1)) @ torch.cat([v, torch.ones(3, n_k, 1)], -1).double()
    # Four roundings to bf16 of the terms of the top degree, or of a rest 2**-8 smaller; see approximate/cost.py.
    unit = (4 * 2.0**-8, 6 * 2.0**-16)[planes - 1]
    largest = (q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).double()
    top, low = (sum(c[g] * largest**g for g in part) for part in ([degree], range(degree)))
    values = torch.cat([v.abs(), torch.ones(3, n_k, 1)], -1).double().sum(1, keepdim=True)
    assert_within((total - expected).abs(), (top * unit + low * 6 * 2.0**-16) * 1.02 * values)
