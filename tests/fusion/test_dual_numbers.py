"""Forward-mode derivatives around a compiled function (`torch.autograd.forward_ad`)."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion
from tests.numerics import assert_as_exact_as_eager, wide

INNER = ({}, {"inner": "eager"}, {"inner": "aot_eager"}, {"transforms": "always"})


def attention(q, k, v):
    return (q @ k.mT / 3).softmax(-1) @ v


def between(q, k, v):
    return torch.tanh(attention(torch.sin(q), k, v)) + q


def masked(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):  # eager mode's other one has no tangents
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


@pytest.mark.one_in(3)
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


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x):
        return attention(*self.project(x).chunk(3, -1))


def test_parameters_move():
    """Tangents of a module's parameters, as `torch.func.functional_call` hands them over."""
    layer, x = Layer(), torch.randn(2, 7, 8)
    directions = {name: torch.randn_like(p) for name, p in layer.named_parameters()}

    def call(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    def moved_by(run, dtype):
        with forward_ad.dual_level():
            given = {n: p.detach().to(dtype) for n, p in layer.named_parameters()}
            duals = {n: forward_ad.make_dual(p, directions[n].to(dtype)) for n, p in given.items()}
            return tuple(forward_ad.unpack_dual(run(duals, x.to(dtype))))

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="fusion")
    with fusion.collect_reports() as reports:
        compiled({n: p.detach() for n, p in layer.named_parameters()}, x)
    assert sum(report.fused for report in reports) == 1
    actual = moved_by(compiled, torch.float32)
    assert_as_exact_as_eager(actual, moved_by(call, torch.float32), moved_by(call, torch.float64))
