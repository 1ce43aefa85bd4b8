"""Inputs of approximate attention, easy and hard, and what runs them."""

import math

import torch
import torch.nn.functional as F

import fusion
from fusion.approximate.certificates import plain_form
from fusion.approximate.polynomial import PolynomialAttention
from fusion.codegen import cpu
from fusion.codegen.cpu import polynomial as kernels
from fusion.machine import machine
from fusion.runtime import kernels as built
from tests.numerics import allowance, assert_within, wide


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


def executor(spec, epsilon, amx=True):
    emitter = "auto" if cpu.unavailable() is None else "reference"
    exact = built.executor(spec.to_json(), "cpu", emitter)

    def build(other):
        return built.executor(other.to_json(), "cpu", emitter)

    if amx is True:
        amx = "amx" if kernels.supports(machine()) is None else None
    return PolynomialAttention(
        spec, plain_form(spec), exact, build, machine(), epsilon, kernels=amx or None, always=True
    )


def sizes_of(spec, q, k):
    known = {"B0": q.shape[0], "B1": q.shape[1], "Nq": q.shape[2], "Nk": k.shape[2]}
    return [known[name] for name in spec.sizes]


def check(q, k, v, causal, epsilon, amx=True):
    """One call: every head within its certificate. Returns the certificates."""
    from fusion.approximate import certificates

    spec = cached_spec(q, k, v, causal)
    run = executor(spec, epsilon, amx)
    certificates.begin()
    return assert_certified(run([q, k, v], sizes_of(spec, q, k)), q, k, v, causal, epsilon)


def assert_certified(out, q, k, v, causal, epsilon):
    """Every head of the last call within its certificate. Returns the certificates."""
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
