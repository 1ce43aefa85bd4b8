"""Gradients where values tie are those of the torch that is installed, whatever its conventions are."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import ZERO, Kind, const, node
from fusion.ir.ops import evaluate
from fusion.passes.pullback import pointwise
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import EMITTERS, as_exact_as_eager

aten = torch.ops.aten

SCORES = {
    "clamp below": lambda s, b: s.clamp(min=0.0),
    "clamp above": lambda s, b: s.clamp(max=1),
    "clamp": lambda s, b: s.clamp(-1, 2),
    "clamp to one number": lambda s, b: s.clamp(1, 1) + s,
    "clamp to nothing": lambda s, b: s.clamp(2, -1) + s,
    "clamp above a tensor": lambda s, b: torch.clamp(s, min=b),
    "clamp below a tensor": lambda s, b: torch.clamp(s, max=b),
    "clamp between tensors": lambda s, b: torch.clamp(s, min=b, max=b.abs()),
    "clamp to a known tensor": lambda s, b: torch.clamp(s, min=torch.zeros(())) + b,
    "clamp_min": lambda s, b: aten.clamp_min(s, 0.0),
    "clip": lambda s, b: torch.clip(s, -1, 1),
    "maximum": torch.maximum,
    "minimum": lambda s, b: torch.minimum(b, s),
    "maximum of scores": lambda s, b: torch.maximum(s, s * 2),
    "relu": lambda s, b: s.relu() + b,
    "relu6": lambda s, b: F.relu6(s + b),
    "hardtanh": lambda s, b: F.hardtanh(s + b),
    "hardsigmoid": lambda s, b: F.hardsigmoid(s) * 3 + b,
    "hardswish": lambda s, b: F.hardswish(s + b),
    "softshrink": lambda s, b: F.softshrink(s * 0.5 + b),
    "hardshrink": lambda s, b: F.hardshrink(s * 0.5 + b),
    "threshold": lambda s, b: F.threshold(s, 0.0, 0.0) + b,
    "leaky relu": lambda s, b: F.leaky_relu(s + b, 0.25),
    "absolute value": lambda s, b: s.abs() + b,
    "power": lambda s, b: (s + b) ** 2,
    "selection": lambda s, b: torch.where(s >= b, s, b),
    "logaddexp": torch.logaddexp,
    "remainder": lambda s, b: (s + b) % 2,
}


def tied(seed=0):
    """Integers, of which half the queries and a third of the keys are zero, as padded ones are."""
    torch.manual_seed(seed)
    q, k = (torch.randint(-1, 2, (2, 2, n, 4)).float() for n in (7, 33))
    q[:, :, ::2] = 0
    k[:, :, ::3] = 0
    return [q, k, torch.randn(2, 2, 33, 4), torch.randint(-1, 2, (7, 33)).float()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_scores_that_tie(name, emitter):
    def attend(q, k, v, b):
        return (SCORES[name](q @ k.mT, b) + 0 * b).softmax(-1) @ v

    sites = as_exact_as_eager(attend, tied(), emitter, gradients=True)
    assert [site.reason for site in sites] == [None]


@pytest.mark.parametrize("name", ["clamp below", "clamp", "clamp between tensors", "maximum", "relu", "hardtanh"])
def test_tangents_and_second_derivatives_of_scores_that_tie(name):
    q, k, v, b = (x.double() for x in tied())
    moving = [torch.randn_like(q), torch.randn_like(k)]

    def attend(q, k):
        return SCORES[name](q @ k.mT, b).softmax(-1) @ v

    def results(function, *given):
        def gradient(q, k):
            return torch.func.grad(lambda q, k: function(q, k).square().sum(), argnums=(0, 1))(q, k)

        return torch.func.jvp(function, given, moved), torch.func.jvp(gradient, given, moved)

    moved = tuple(moving)
    exact = results(attend, q, k)
    moved = tuple(x.float() for x in moving)
    v, b = v.float(), b.float()
    eager = results(attend, q.float(), k.float())
    compiled = torch.compile(attend, backend="fusion", options={"inner": "eager", "transforms": "always"})
    assert_as_exact_as_eager(results(compiled, q.float(), k.float()), eager, exact)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_of_a_value_on_its_bound_is_torchs(share):
    """By versions of torch it is all, half or nothing."""
    x = node("load", (), Kind.FLOAT, "x")
    derived = adjoints(pointwise._clamped(x, ZERO, const(2.0), share), UPSTREAM, [x])[x]
    known = {x: torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0, math.nan])}
    slopes = evaluate(derived, lambda leaf: known.get(leaf, torch.tensor(1.0)))
    assert slopes[:5].tolist() == [0.0, share, 1.0, share, 0.0]


@pytest.mark.parametrize("tensors", [False, True])
def test_torch_is_asked_outside_of_the_modes_of_a_compilation(tensors):
    at_zero = torch.tensor(0.0, requires_grad=True)
    (slope,) = torch.autograd.grad(at_zero.clamp(min=torch.tensor(0.0) if tensors else 0.0), at_zero)
    share = slope.item()
    pointwise._share_on_bound.cache_clear()
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
        assert pointwise._share_on_bound(tensors) == share
