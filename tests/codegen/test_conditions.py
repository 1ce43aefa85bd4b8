"""What decides which keys are live is computed as it is written: in conditions a unit in the last place, or one bit of
an integer, is another mask."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fusion
from fusion.ir.expr import I, J, const
from fusion.ir.ops import apply, where
from fusion.lowering.numbers import feeding_comparisons, width
from tests.emitters import interpreted
from tests.numerics import assert_as_exact_as_eager

N = 90
SECONDS = 1.7e9 + 100 * torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TENTHS = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16).repeat(30)
IDS = torch.randint(2**61, 2**62, (N,), generator=torch.Generator().manual_seed(0))

CONDITIONS = {
    "floors of quotients": lambda i, j: (i / 41).floor() == (j / 41).floor(),
    "ceilings": lambda i, j: (i / 7).ceil() >= (j / 7).ceil(),
    "truncated quotients": lambda i, j: (i.float() / 47).long() >= (j.float() / 47).int(),
    "a remainder of floats": lambda i, j: ((i - j) / 41) % 1 == 0,
    "a quotient and an integer": lambda i, j: j / 7 <= i // 7,
    "two quotients": lambda i, j: i / 3 >= j / 7,
    "products of several constants": lambda i, j: i * 0.1 * 3 >= j * 0.3,
    "a product and a sum": lambda i, j: i * 0.7 + 2.1 >= j * 0.7,
    "a large remainder": lambda i, j: (i * 2654435761 + j * 40503) % 97 < 60,
    "a remainder of powers": lambda i, j: (i * i + j**6) % 11 < 7,
    "remainders of data": lambda i, j: IDS[i] % 7 == IDS[j] % 7,
    "a quotient by large data": lambda i, j: (i * 3) // IDS[j] == (j // 9) * 0,
    "far steps": lambda i, j: j <= i * 71582789,
    "steps whose products are far": lambda i, j: j * 2**26 <= i * (2**26 + 2**26 // 3),
    "data of float64": lambda i, j: SECONDS[i] - SECONDS[j] < 10,
    "arithmetic of float64": lambda i, j: i.double() * 0.7 + 2.1 >= j.double() * 0.7,
    "integers as float64": lambda i, j: IDS[i].double() >= IDS[j].double() + 2.0**52,
    "arithmetic of bfloat16": lambda i, j: i.bfloat16() * 3.3 >= j.bfloat16() * 3.1,
    "floors of bfloat16": lambda i, j: (i.bfloat16() * 0.3).floor() == (j.bfloat16() * 0.3).floor(),
    "arithmetic of float16": lambda i, j: i.half() * 3.3 >= j.half() * 3.1,
    "a scalar beside bfloat16": lambda i, j: (TENTHS[j] != 0.1) & (TENTHS[i] <= 0.3),
    "an element beside bfloat16": lambda i, j: TENTHS[i] + 0 * j <= torch.tensor(0.3),
    "integers beside bfloat16": lambda i, j: (i + 4000).bfloat16() < j + 4000,
    "integers beside float16": lambda i, j: (i + 4000).half() < j + 4000,
    "a limit beside bfloat16": lambda i, j: TENTHS[j].clamp(max=0.1) != TENTHS[i],
    "equal steps": lambda i, j: j * 2**30 <= i * 2**30 + 1,
}


def attend(condition):
    def run(q, k, v):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        scores = (q @ k.mT).masked_fill(~(condition(i, j) | (i == j)), -torch.inf)
        return torch.softmax(scores, -1) @ v

    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("emitter", ["reference", "mlir", "triton"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_masks(name: str, emitter: str) -> None:
    """Of outputs and gradients."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    function = attend(CONDITIONS[name])
    inputs = [torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3)]
    options = {"inner": "aot_eager"} | ({} if emitter == "triton" else {"emitter": emitter})

    def run(call, given):
        out = call(*given)
        return [out, *torch.autograd.grad(out.sin().sum(), given)]

    with interpreted() if emitter == "triton" else contextlib.nullcontext(), fusion.collect_reports() as reports:
        actual = run(torch.compile(function, backend="fusion", options=options), inputs)
    assert [report.fused for report in reports] == [1]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert_as_exact_as_eager(actual, run(function, inputs), run(function, exact), torch.float32)


def test_a_bias_that_is_rounded_to_integers() -> None:
    torch.manual_seed(0)

    def biased(q, k, v):
        i, j = torch.arange(N)[:, None], torch.arange(N)[None]
        return torch.softmax(q @ k.mT - ((i - j).abs() / 41).floor(), -1) @ v

    inputs = [torch.randn(1, 2, N, 16) for _ in range(3)]
    actual = torch.compile(biased, backend="fusion", options={"inner": "eager"})(*inputs)
    exact = biased(*(x.double() for x in inputs))
    assert_as_exact_as_eager([actual], [biased(*inputs)], [exact], torch.float32)


def test_what_is_decided_and_what_is_not() -> None:
    quotient = apply("div", apply("to_float", I), const(7.0))
    smooth = apply("fmul", apply("div", apply("to_float", J), const(3.0)), const(0.1))
    chosen = where(apply("flt", quotient, const(2.0)), smooth, const(0.0))
    assert quotient in feeding_comparisons(chosen) and smooth not in feeding_comparisons(chosen)
    assert feeding_comparisons(apply("detach", smooth)) == frozenset()
    assert smooth in feeding_comparisons(apply("floor", smooth))


def test_a_remainder_is_as_wide_as_what_it_is_of() -> None:
    large = apply("mul", I, const(2**40))
    assert width(apply("mod", large, const(7))) >= 2**40
    assert width(apply("floordiv", J, large)) >= 2**40
    assert width(apply("add", I, J)) < 2**31
