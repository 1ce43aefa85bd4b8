"""Floats of Python that differ from call to call: a temperature, a scale of each layer. Two graphs serve all values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fusion
from tests.numerics import assert_as_exact_as_eager

VALUES = (0.25, 0.1, 1.7, -0.3, 1e-3)
USES = {
    "factor": lambda s, x: s * x,
    "divisor": lambda s, x: s / x,
    "term": lambda s, x: s + x * torch.arange(s.shape[-1]).to(s.dtype),
    "made of the float": lambda s, x: s * (1 - 2 / (x + 4)),
    "cap": lambda s, x: torch.tanh(s / (x + 5)) * (x + 5),
    "subtracted": lambda s, x: (s - x).sigmoid(),
}


def _attend(use, q, k, v, x):
    return use(q @ k.mT, x).softmax(-1) @ v


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", USES)
def test_another_value_compiles_nothing_again(name: str, dtype: torch.dtype, inner: str) -> None:
    if inner == "inductor" and (name not in ("factor", "made of the float") or dtype is not torch.float32):
        pytest.skip("the same code of torch")
    torch.manual_seed(0)
    given = [torch.randn(2, n, 8, dtype=dtype) for n in (11, 13, 13)]
    with fusion.collect_reports() as reports:
        compiled = torch.compile(_attend, backend="fusion", fullgraph=True, options={"inner": inner})
        found = [_outputs_and_gradients(compiled, name, given, x) for x in VALUES]
    assert len(reports) == 2 and all(site.fused for report in reports for site in report.sites)
    eager = [_outputs_and_gradients(_attend, name, given, x) for x in VALUES]
    exact = [_outputs_and_gradients(_attend, name, [t.double() for t in given], x) for x in VALUES]
    assert_as_exact_as_eager(found, eager, exact)


def _outputs_and_gradients(function, name: str, given: list[torch.Tensor], x: float) -> list[torch.Tensor]:
    given = [t.clone().requires_grad_() for t in given]
    out = function(USES[name], *given, x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]


class Layer(torch.nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.project, self.scale = torch.nn.Linear(16, 48), scale

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return x + (q @ k.mT * self.scale).softmax(-1) @ v


def test_layers_with_scales_of_their_own_share_a_graph() -> None:
    layers, counter = [Layer(0.25 / (n + 1)) for n in range(12)], CompileCounterWithBackend("fusion")
    x = torch.randn(2, 20, 16)
    with torch.no_grad():
        for layer in layers:
            eager, exact = layer(x), copy.deepcopy(layer).double()(x.double())
            layer.compile(backend=counter)
            assert_as_exact_as_eager(layer(x), eager, exact)
    assert counter.frame_count == 2


def test_where_a_float_decides_something_its_value_is_compiled_in() -> None:
    def attend(q, k, v, p):
        return torch.nn.functional.dropout((q @ k.mT).softmax(-1), p) @ v

    q = torch.randn(2, 12, 8)
    compiled = torch.compile(attend, backend="fusion", options={"inner": "eager"})
    with fusion.collect_reports() as reports:
        for p in (0.0, 0.5, 0.25):
            torch.manual_seed(0)
            assert compiled(q, q, q, p).isfinite().all()
    assert all(site.fused for report in reports for site in report.sites)
