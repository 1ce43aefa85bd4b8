"""Gradients of pointwise operations at NaN, at the ends of the range and at bounds, also of gradients that are not
finite: where eager has a number, zero or NaN, the derivative of the expression has it as well."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import Kind, const, coord, node
from fusion.ir.ops import apply, evaluate
from fusion.passes.pullback.casts import Call
from fusion.passes.pullback.pointwise import build
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import EMITTERS, as_exact_as_eager

NUMBERS = [0, 1, -1, 0.5, -0.5, 2, -3, 3, 6, 25, -25, 110, -110, math.inf, -math.inf, math.nan]
"""So many that eager computes their pairs in vectors alone: what does not fill one has other gradients at NaN."""
LEAVES = [node("load", (), Kind.FLOAT, name) for name in "xy"]
FUNCTIONS = {
    "clamp": lambda x, y: x.clamp(-1, 2),
    "clamp to equal numbers": lambda x, y: x.clamp(1, 1),
    "clamp below": lambda x, y: x.clamp(min=0),
    "clamp above": lambda x, y: x.clamp(max=1),
    "clamp below a tensor": lambda x, y: torch.clamp(x, max=y),
    "clamp above a tensor": lambda x, y: torch.clamp(x, min=y),
    "clamp between tensors": lambda x, y: torch.clamp(x, min=-y.abs(), max=y.abs()),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu": lambda x, y: x.relu(),
    "relu6": lambda x, y: F.relu6(x),
    "leaky relu": lambda x, y: F.leaky_relu(x, 0.1),
    "threshold": lambda x, y: F.threshold(x, 0.1, -2.0),
    "elu": lambda x, y: F.elu(x, 0.7),
    "celu": lambda x, y: F.celu(x, 0.7),
    "selu": lambda x, y: F.selu(x),
    "silu": lambda x, y: F.silu(x),
    "softplus": lambda x, y: F.softplus(x),
    "softshrink": lambda x, y: F.softshrink(x),
    "hardshrink": lambda x, y: F.hardshrink(x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "absolute value": lambda x, y: x.abs(),
    "root": lambda x, y: x.sqrt(),
    "logarithm": lambda x, y: x.log(),
    "square": lambda x, y: x**2,
    "logaddexp": torch.logaddexp,
    "nan_to_num": lambda x, y: x.nan_to_num(0.5),
    "selection": lambda x, y: torch.where(x > y, x, y),
    "step": lambda x, y: x * (x > 0),
    "ramp": lambda x, y: x * x.clamp(0, 1),
    "selected gate": lambda x, y: x * torch.where(x > 0, x.tanh(), 0.0),
}


def expression(function, given):
    """The expression that stands for a function of x and y, with x and y as loads."""
    values, inputs = {}, iter(LEAVES)

    def value(argument):
        return values[argument] if isinstance(argument, torch.fx.Node) else argument

    for step in make_fx(function, pre_dispatch=True)(*given).graph.nodes:
        if step.op == "placeholder":
            values[step] = next(inputs)
        elif step.op == "output":
            return value(step.args[0])
        else:
            call = Call(
                args=tuple(map(value, step.args)),
                kwargs={key: value(x) for key, x in step.kwargs.items()},
                dtype=step.meta["val"].dtype,
            )
            values[step] = build(step.target.overloadpacket, call)


ARRIVING = [
    *((name, 1.0) for name in FUNCTIONS),
    *((name, math.nan) for name in FUNCTIONS if name != "nan_to_num"),  # there eager multiplies NaN by 0
    *((name, math.inf) for name in FUNCTIONS if "clamp" in name or "shrink" in name or "relu" in name),
    *((name, math.inf) for name in ("maximum", "minimum", "hardtanh", "hardsigmoid", "absolute value", "selection")),
]


@pytest.mark.parametrize(("name", "arriving"), ARRIVING)
def test_gradients_at_special_numbers(name, arriving):
    function, numbers = FUNCTIONS[name], torch.tensor(NUMBERS)
    given = numbers.repeat_interleave(len(NUMBERS)), numbers.repeat(len(NUMBERS))
    built = expression(function, given)
    derived = adjoints(built, UPSTREAM, LEAVES)

    def ours(dtype):
        named = {leaf: x.to(dtype) for leaf, x in zip(LEAVES, given, strict=True)}
        upstream = torch.full(given[0].shape, arriving, dtype=dtype)
        parts = [built, *(derived[leaf] for leaf in LEAVES)]
        return [evaluate(part, lambda leaf: named.get(leaf, upstream), dtype).expand(given[0].shape) for part in parts]

    def eager(dtype):
        x, y = (value.to(dtype).requires_grad_() for value in given)
        out = function(x, y)
        found = torch.autograd.grad(out, (x, y), torch.full_like(out, arriving), allow_unused=True)
        return [out.detach(), *(torch.zeros_like(x) if g is None else g for g in found)]

    assert_as_exact_as_eager(ours(torch.float32), eager(torch.float32), eager(torch.float64))


@pytest.mark.parametrize("function", [F.silu, lambda x: F.gelu(x, approximate="none")])
def test_gradients_that_a_fill_would_take_beyond_the_range(function):
    """The gradient times the fill, that is; the slope there is 0 or 1."""
    fills = torch.tensor([-3e38, -1e38, 1e38] + [3e38] * (function is F.silu))  # eager's of gelu is NaN there
    built = expression(lambda x, y: function(x), (fills, fills.clone()))
    derived = adjoints(built, UPSTREAM, LEAVES)[LEAVES[0]]
    x = fills.clone().requires_grad_()
    eager = torch.autograd.grad(function(x), x, torch.full_like(x, 50.0))[0]
    ours = evaluate(derived, lambda leaf: fills if leaf is LEAVES[0] else torch.tensor(50.0), torch.float32)
    assert eager.tolist() == ours.tolist() and eager.isfinite().all()


def test_a_tensors_element_is_no_function_of_a_factor():
    """It is a load at indices that are constants."""
    slope, distance = node("load", (const(0),), Kind.FLOAT, 3), apply("to_float", coord("j"))
    assert adjoints(slope * distance, UPSTREAM, [slope])[slope] is UPSTREAM * distance


SCORES = {
    "clamp": lambda s, b: (s + b).clamp(min=0),
    "both sides": lambda s, b: (s + b).clamp(-1, 1) * 2,
    "trained bounds": lambda s, b: torch.clamp(s, min=-b.abs(), max=b.abs()),
    "root of a magnitude": lambda s, b: torch.where(b < -0.5, s * 0.0, s + b).abs().sqrt(),
    "maximum": lambda s, b: torch.maximum(s, b),
    "minimum": lambda s, b: torch.minimum(b, s),
    "hard sigmoid": lambda s, b: F.hardsigmoid(s + b),
    "masked shrinkage": lambda s, b: F.hardshrink(s + b, 0.1).masked_fill(b != b, -math.inf),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("name", SCORES)
def test_a_row_of_nan(name, emitter):
    """A NaN in a query and in a bias: gradients of these, and of all other operands."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (16, 32, 32))
    bias = torch.randn(2, 16, 32)
    bias[0, 5, 7] = math.nan
    if "masked" not in name:
        q[0, 1, 3, 2] = math.nan

    def attend(q, k, v, bias):
        return SCORES[name](q @ k.mT, bias).softmax(-1) @ v

    sites = as_exact_as_eager(attend, [q, k, v, bias], emitter, gradients=True)
    assert [site.reason for site in sites] == [None]
