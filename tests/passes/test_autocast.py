"""Automatic mixed precision around a fused attention, and inside of the compiled function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fusion  # noqa: F401  (registers the backend)
from tests.numerics import assert_as_exact_as_eager

B, H, N, D = 2, 4, 24, 16


class Attention(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.qkv, self.out, self.call = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D), call

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(self.call(q, k, v).transpose(1, 2).flatten(2))


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v


def einsum(q, k, v):
    return torch.einsum("bhij,bhje->bhie", torch.einsum("bhic,bhjc->bhij", q, k).softmax(-1), v)


MASK = torch.linspace(-2, 2, N * N).view(N, N).sin()


def masked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, MASK.to(q.device))


def region(q, k, v):
    """A region of its own inside of the function, and one without autocast inside of that."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = q @ k.transpose(-1, -2) / 4
        with torch.autocast("cpu", enabled=False):
            s = s.float() * 1.5
        out = torch.softmax(s, -1) @ v
    return out.float()


def results(model, function, x, dtype, ambient):
    x = x.to(dtype).requires_grad_()
    parameters = list(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
        out = function(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("call", [plain, einsum, masked, region])
def test_as_eager_under_autocast(call, inner):
    model, exact = Attention(call), Attention({region: lambda q, k, v: plain(1.5 * q, k, v)}.get(call, call)).double()
    if call is masked:
        exact.call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK.double())
    exact.load_state_dict(model.state_dict())
    x = torch.randn(B, N, H * D)
    counters.clear()
    compiled = torch.compile(model, backend="fusion", options={"inner": inner}, fullgraph=True)
    found = results(model, compiled, x, torch.float32, call is not region)
    eager = results(model, model, x, torch.float32, call is not region)
    reference = results(exact, exact, x, torch.float64, False)
    assert counters["fusion"]["fused"] == 1, "not fused"
    assert_as_exact_as_eager(found, eager, reference, torch.bfloat16)


def test_switching_autocast_compiles_again():
    model = Attention(plain)
    compiled = torch.compile(model, backend="fusion", options={"inner": "aot_eager"})
    x = torch.randn(B, N, H * D)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    for ambient in (False, True, False):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
            found, expected = compiled(x), model(x)
        assert_as_exact_as_eager(found, expected, exact)
