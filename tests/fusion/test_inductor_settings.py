"""Settings of Inductor's under which it is given other graphs, or writes other code."""

import copy

import pytest
import torch
from torch._inductor import config

import fusion
from tests.numerics import assert_as_exact_as_eager


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out((torch.softmax(q @ k.mT / 3, -1) @ v).transpose(1, 2).flatten(2))


def compiled(module):
    return torch.compile(module, backend="fusion", options={"strict": True})


@pytest.mark.long  # 20 s of a C++ compiler
def test_code_in_cpp():
    """The text of an attention is written into C++ as it is, and the graph's inputs have their gradients."""
    module, x = Layer(), torch.randn(2, 24, 32)
    exact, run = copy.deepcopy(module).double(), compiled(module)

    def results(layer, call, x):
        out = call(x)
        return [out, *torch.autograd.grad((out * x.cos()).sum(), [*layer.parameters()])]

    with config.patch(cpp_wrapper=True):
        actual = results(module, run, x)
    assert_as_exact_as_eager(actual, results(module, module, x), results(exact, exact, x.double()))


@pytest.mark.parametrize("freezing", [False, True])
def test_parameters_that_are_constants(freezing):
    module, x = Layer().requires_grad_(False), torch.randn(2, 24, 32)
    with config.patch(freezing=freezing), fusion.collect_reports() as reports, torch.no_grad():
        found = compiled(module)(x)
    assert [report.fused for report in reports] == [1]
    assert_as_exact_as_eager(found, module(x), copy.deepcopy(module).double()(x.double()))
