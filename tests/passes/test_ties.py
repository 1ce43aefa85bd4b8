"""Gradients where values tie are those of the torch that is installed, whatever its conventions are."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import Kind, node
from fusion.ir.ops import evaluate
from fusion.passes.nodes import Unsupported
from fusion.passes.pullback import pointwise, ties
from fusion.passes.pullback.casts import Call
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


# Other versions' conventions


def convention(forward, *shares):
    """A function with gradients of its own: `shares` has that of each argument."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.save_for_backward(*given)
            return forward(*given)

        @staticmethod
        def backward(ctx, gradient):
            return tuple(gradient * share(*ctx.saved_tensors) for share in shares)

    return Other.apply


def relation(below, tie, above):
    """Of a value and another one: a share by which is less."""
    return lambda x, y: torch.where(x < y, below, torch.where(x == y, tie, above)).double()


OTHERS = {
    **{f"a bound with {1 - share} of it": (aten.clamp_min, convention(
        torch.maximum, relation(0.0, share, 1.0), relation(1.0, 1 - share, 0.0))) for share in (1.0, 0.0, 0.5)},
    **{f"{slope} at 0": (aten.relu, convention(torch.relu, lambda x, slope=slope: torch.where(x == 0, slope, x > 0)))
       for slope in (0.0, 0.5, 1.0)},
    "-1 at 0": (aten.abs, convention(torch.abs, lambda x: torch.where(x > 0, 1.0, -1.0))),
    "hardtanh with slopes at its ends": (aten.hardtanh, convention(F.hardtanh, lambda x: (x.abs() <= 1).double())),
    "hardshrink with slopes at its ends": (aten.hardshrink, convention(F.hardshrink, lambda x: x.abs() >= 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_convention_is_followed(name):
    packet, function = OTHERS[name]
    numbers = torch.tensor([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0], dtype=torch.float64)
    count = 2 if packet is aten.clamp_min else 1
    grid = torch.cartesian_prod(*[numbers] * count).view(-1, count).unbind(1)
    leaves = [node("load", (), Kind.FLOAT, f"x{k}") for k in range(count)]
    call = Call(args=tuple(leaves), kwargs={}, dtype=torch.float32, target=None)
    builders = pointwise.ALTERNATIVES.get(packet) or (pointwise.BUILDERS[packet],)
    made = ties.as_torch_differentiates(function, call, builders)
    own = [x.clone().requires_grad_() for x in grid]
    result = function(*own)
    theirs = torch.autograd.grad(result.sum(), own)
    known = dict(zip(leaves, grid, strict=True))
    derived = adjoints(made, UPSTREAM, leaves)
    ours = [evaluate(part, lambda x: known.get(x, torch.tensor(1.0)), torch.float64) for part in
            (made, *map(derived.get, leaves))]  # fmt: skip
    for their, our in zip((result, *theirs), ours, strict=True):
        assert torch.equal(their.detach().double(), our.expand(their.shape))


def test_a_convention_that_is_not_known_is_refused():
    function = convention(torch.maximum, relation(0.0, 0.25, 1.0), relation(1.0, 0.75, 0.0))
    leaves = [node("load", (), Kind.FLOAT, f"x{k}") for k in range(2)]
    call = Call(args=tuple(leaves), kwargs={}, dtype=torch.float32)
    with pytest.raises(Unsupported, match="differentiates .* in a way that fusion does not know"):
        ties.as_torch_differentiates(function, call, (pointwise.BUILDERS[aten.maximum],))


def test_torch_is_asked_outside_of_the_modes_of_a_compilation():
    builders = pointwise.ALTERNATIVES[aten.clamp_min]
    call = Call(args=(node("load", (), Kind.FLOAT, "x"), 0.0), kwargs={}, dtype=torch.float32)
    form = ties._form(aten.clamp_min, call)
    at_zero = torch.tensor(0.0, requires_grad=True)
    (slope,) = torch.autograd.grad(at_zero.clamp(min=0.0), at_zero)
    expected = ties._Rule(int(slope.item() != 1))
    ties._rule.cache_clear()
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
        assert ties._rule(form, builders) == expected
