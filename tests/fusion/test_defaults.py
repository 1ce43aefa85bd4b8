"""Torch's default dtype and device are the user's: kernels have memory of their own dtype, where their operands are."""

import ast
import math
from pathlib import Path

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_same

ROOT = Path(__file__).parents[2]
BY_DEFAULT = {"empty", "zeros", "ones", "rand", "randn", "linspace", "logspace", "eye"}
"""Functions of torch whose results have the default dtype where none is given."""


def plain(q, k, v, extra):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def sink(q, k, v, extra):
    s = torch.cat(
        [(q @ k.mT).masked_fill(torch.ones(33, 33, dtype=torch.bool, device="cpu").triu(1), -math.inf), extra], -1
    )
    return torch.softmax(s, -1)[..., :-1] @ v


def weighted(q, k, v, extra):
    """The weights of a row are multiplied by a number that follows from them, and their largest is returned, too."""
    w = torch.softmax(q @ k.mT * 9, -1)
    return w @ v * w.amax(-1, keepdim=True), w.sum(-2)


def results(function, **options) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(2, 3, 33, 16)] * 3 + [(2, 3, 33, 1)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    given = [tensor.requires_grad_() for tensor in drawn]
    given = given if function is sink else [*given[:3], None]
    torch._dynamo.reset()
    run = torch.compile(function, backend="fusion", options={"strict": True, **options})
    with torch.no_grad():
        alone = run(*given)
    found = run(*given)
    outputs = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad([out.square().sum() for out in outputs], [x for x in given if x is not None])
    return [*(alone if isinstance(alone, tuple) else (alone,)), *outputs, *gradients]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["mlir", "reference"])
@pytest.mark.parametrize("function", [plain, sink, weighted])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype(dtype, function, emitter):
    expected = results(function, inner="eager", emitter=emitter)
    torch.set_default_dtype(dtype)
    try:
        found = results(function, inner="eager", emitter=emitter)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, expected)


@pytest.mark.parametrize(("function", "inner"), [(plain, "aot_eager"), (sink, "inductor"), (weighted, "aot_eager")])
def test_another_default_device(function, inner):
    """The backward runs in Python, under the mode that holds the device."""
    expected = results(function, inner=inner)
    torch.set_default_device("meta")
    try:
        found = results(function, inner=inner)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        causal = torch.ones(33, 33, dtype=torch.bool, device="cpu").triu(1)
        return torch.softmax((q @ k.mT).masked_fill(causal, -math.inf), -1) @ v


def test_a_default_device_is_not_that_of_the_analysis():
    """And the report's lines are those of the model."""
    given = [torch.randn(2, 3, 33, 16) for _ in range(3)]
    eager, exact = Attend()(*given), Attend()(*(x.double() for x in given))
    program = torch.export.export(Attend(), tuple(given))
    with fusion.collect_reports() as reports, torch.device("meta"):
        compiled = torch.compile(Attend(), backend="fusion", options={"inner": "eager"})
        found = [compiled(*given), fusion.rewrite(program).module()(*given)]
    for result in found:
        assert_as_exact_as_eager(result, eager, exact)
    assert [report.fused for report in reports] == [1, 1]
    assert "test_defaults.py" in str(reports[0].sites[0].location)


def calls_by_default(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BY_DEFAULT:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and "dtype" not in {k.arg for k in node.keywords}:
                yield node.lineno


def test_every_tensor_that_is_made_has_a_dtype():
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for top in ("fusion", "passes", "codegen")
        for file in sorted((ROOT / top).rglob("*.py"))
        for line in calls_by_default(ast.parse(file.read_text()))
    ]
    assert not found, "these would have torch's default dtype: " + ", ".join(found)
