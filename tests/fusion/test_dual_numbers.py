"""Forward-mode derivatives around a compiled function (`torch.autograd.forward_ad`)."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import fusion
from tests.numerics import assert_as_exact_as_eager, wide

INNER = ({}, {"inner": "eager"}, {"inner": "aot_eager"}, {"transforms": "always"})


def attention(q, k, v):
    return (q @ k.mT / 3).softmax(-1) @ v


def between(q, k, v):
    return torch.tanh(attention(torch.sin(q), k, v)) + q


def masked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square()


def drawn():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 9, 8, generator=generator) for _ in range(6)]


def moved(call, q, k, v, *directions, trained=False):
    q, k, v = (t.requires_grad_(trained) for t in (q.clone(), k.clone(), v.clone()))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip((q, k, v), directions, strict=True)]
        out = forward_ad.unpack_dual(call(*duals))
        return out.primal.detach(), out.tangent.detach()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("options", INNER, ids=str)
@pytest.mark.parametrize("function", [attention, between, masked])
def test_tangents_pass_through_a_compiled_function(function, options, trained):
    torch._dynamo.reset()
    compiled, given = torch.compile(function, backend="fusion", options=options), drawn()
    before = compiled(*given[:3])
    actual = moved(compiled, *given, trained=trained)
    assert_as_exact_as_eager(actual, moved(function, *given), moved(function, *wide(given)))
    with forward_ad.dual_level():  # without a tangent in it
        assert_as_exact_as_eager(compiled(*given[:3]), function(*given[:3]), function(*wide(given[:3])))
    assert_as_exact_as_eager(before, function(*given[:3]), function(*wide(given[:3])))


def test_a_parameter_moves():
    """Tangents of a module's parameters, as `torch.func.functional_call` hands them over."""
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, names = torch.randn(2, 7, 16), dict(layer.named_parameters())
    compiled = torch.compile(lambda p, x: torch.func.functional_call(layer, p, (x, x, x))[0], backend="fusion")

    def tangent(call):
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for n, p in names.items()}
            return forward_ad.unpack_dual(call(duals, x)).tangent

    def eager(p, x):
        return torch.func.functional_call(layer, p, (x, x, x))[0]

    with fusion.collect_reports():
        ours = tangent(compiled)
    assert ours is not None
    layer64 = layer.double()
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p.detach().double(), torch.ones_like(p)) for n, p in names.items()}
        exact = torch.func.functional_call(layer64, duals, (x.double(),) * 3)[0]
        exact = forward_ad.unpack_dual(exact).tangent
    layer.float()
    assert_as_exact_as_eager(ours, tangent(eager), exact)
