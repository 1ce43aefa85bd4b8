"""`torch.compiler.nested_compile_region`: what it calls is fused like anything else."""

import copy

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return x + (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)


class Linear(torch.nn.Linear):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x).tanh()


def model(*layers):
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(32))


def results(module, run, x):
    given = x.clone().requires_grad_()
    out = run(given)
    gradients = torch.autograd.grad((out * x.cos()).sum(), [given, *module.parameters()])
    with torch.no_grad():
        return [out.detach(), run(x), *gradients]


def check(module, run, x):
    exact = copy.deepcopy(module).double()
    assert_as_exact_as_eager(results(module, run, x), results(module, module, x), results(exact, exact, x.double()))


def compiled(module, inner):
    return torch.compile(module, backend="fusion", options={"inner": inner, "strict": True}, fullgraph=True)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_layers_are_fused(inner):
    """Also where Inductor's own gradients of such layers are wrong (torch 2.13, for all calls but the first)."""
    module = model(Layer(), Layer(), Layer())
    run = compiled(module, inner)
    with fusion.collect_reports() as reports:
        check(module, run, torch.randn(2, 24, 32))
        check(module, run, torch.randn(3, 31, 32))
    assert {(report.fused, len(report.sites)) for report in reports} == {(3, 3)}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_attention_beside_regions_without_one(inner):
    module = model(torch.nn.Linear(32, 32), Linear(32, 32), torch.nn.MultiheadAttention(32, 4, batch_first=True))

    def run(x, first=module[0], second=module[1], attend=module[2], norm=module[3]):
        return norm(second(attend(second(first(x)), x, x, need_weights=False)[0]))

    exact, x = copy.deepcopy(module).double(), torch.randn(2, 24, 32)
    reference = results(exact, lambda x: run(x, *exact), x.double())
    assert_as_exact_as_eager(results(module, compiled(run, inner), x), results(module, run, x), reference)


@torch.compiler.nested_compile_region
def dropped(q, k, v):
    return F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.5) @ v


def test_calls_drop_different_elements_and_their_backward_the_same():
    """With values that are unit vectors the output is the weights, so the mask of the forward can be read off."""
    q, k, p = (torch.randn(2, 4, 24, 8, requires_grad=True) for _ in range(3))
    unit = torch.eye(24).expand(2, 4, 24, 24)
    out = compiled(lambda q, k, p: torch.stack([dropped(q, k, unit), dropped(p, k, unit)]), "aot_eager")(q, k, p)
    kept = (out.detach() != 0) * 2.0
    assert 0.4 < kept.mean() / 2 < 0.6 and 0.4 < (kept[0] != kept[1]).float().mean() < 0.6
    upstream = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, p), upstream)

    def explicit(dtype):
        a, b, c = tensors = [t.detach().to(dtype).requires_grad_() for t in (q, k, p)]
        return torch.autograd.grad(torch.softmax(torch.stack([a, c]) @ b.mT, -1) * kept, tensors, upstream.to(dtype))

    assert_as_exact_as_eager(actual, explicit(torch.float32), explicit(torch.float64))


def test_the_report_names_a_softmax_in_a_branch():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: torch.softmax(x @ x.transpose(-1, -2), -1) @ x, torch.tanh, (x,))

    x = torch.randn(4, 8)
    with fusion.collect_reports() as reports:
        found = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})(x)
    assert_as_exact_as_eager(found, function(x), function(x.double()))
    assert "a softmax inside of cond stays as it is" in str(reports[0].notes)
