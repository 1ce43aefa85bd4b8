"""Casts of expanded tensors go before the expansion, so that heads which share keys are seen."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.codegen.triton.gradients import unsupported_gradient
from fusion.ir import integers
from fusion.ir.expr import coord, walk
from tests.numerics import assert_as_exact_as_eager, assert_same

B, N, H, KV, D = 2, 24, 8, 4, 16


def expanded(x):
    return x[:, :, None].expand(B, KV, H // KV, N, D).reshape(B, H, N, D)


def interleaved(x):
    return x.repeat_interleave(H // KV, 1)


def softmax(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def model(repeat, attend):
    """Projections, rotary factors in float32, and K and V repeated for the query heads."""

    def run(x, wq, wk, wv, cos):
        q, k, v = ((x @ w).view(B, N, -1, D).transpose(1, 2) for w in (wq, wk, wv))
        return attend(q * cos, repeat(k * cos), repeat(v))

    return run


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (B, N, 32), (32, H * D), (32, KV * D), (32, KV * D), (N, D)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("attend", [softmax, sdpa])
@pytest.mark.parametrize("repeat", [expanded, interleaved])
def test_keys_are_shared_under_autocast(repeat, attend) -> None:
    run, given = model(repeat, attend), inputs()
    with fusion.collect_reports() as reports, torch.autocast("cpu", torch.bfloat16):
        fused = torch.compile(run, backend="fusion", options={"inner": "eager"})(*given)
        eager = run(*given)
    assert reports[0].sites, reports[0]
    (site,) = reports[0].sites
    assert site.fused, site.reason
    spec = site.specs[0]
    for index in (spec.k, spec.v):
        assert integers.floordiv(coord("b1"), H // KV) in set(walk(*index)), spec
    assert unsupported_gradient(spec, (True,) * len(spec.operands)) is None
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = run(*wide)
    assert_as_exact_as_eager(fused, eager, exact, torch.bfloat16)
    ends = ((fused, given), (eager, given), (exact, wide))
    gradients = [torch.autograd.grad(out.sum(), xs, retain_graph=True) for out, xs in ends]
    assert_as_exact_as_eager(*gradients, torch.bfloat16)


def test_a_cast_whose_layout_is_seen_stays() -> None:
    """An expansion shares memory, which its cast does not: it can be written, and viewed in another shape."""

    def run(q, k, v):
        k = k.expand(B, H, N, D).to(torch.bfloat16)
        return softmax(q, k, v), k.view(B * H, N, D), k

    q, k, v = (torch.randn(B, heads, N, D) for heads in (H, 1, H))
    given = q.bfloat16(), k, v.bfloat16()
    found = torch.compile(run, backend="fusion", options={"inner": "eager"})(*given)
    eager = run(*given)
    assert_same(found[1:], eager[1:])
    assert found[2].stride() == eager[2].stride()
    found[2].zero_()
