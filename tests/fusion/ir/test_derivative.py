"""Every primitive has a derivative, and it is torch's; whole programs too."""

import pytest
import torch

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import SCORE, ZERO, I, J, Kind, const, load, node
from fusion.ir.ops import apply, evaluate, where
from fusion.ir.primitives import PRIMITIVES, ROUNDED
from tests.numerics import assert_same, assert_same_in_float64

FLOAT_PRIMITIVES = [n for n, p in PRIMITIVES.items() if p.result is Kind.FLOAT and Kind.FLOAT in p.args]
SMOOTH = [name for name in FLOAT_PRIMITIVES if name not in (*ROUNDED.values(), "detach")]
POSITIVE = {"sqrt", "rsqrt", "log", "log1p", "pow"}


def test_every_primitive_has_a_derivative():
    """All that turn floats into floats, but for those that are piecewise constant and the one that has none."""
    without = {name for name in FLOAT_PRIMITIVES if PRIMITIVES[name].derivative is None}
    assert without == {"floor", "ceil", "trunc", "round", "detach"}
    assert all(PRIMITIVES[name].derivative is None for name in PRIMITIVES.keys() - set(FLOAT_PRIMITIVES))


def leaves(kinds):
    return tuple(load(number, (I,), kind) for number, kind in enumerate(kinds))


def pull_back(expr, values, upstream):
    """Gradients of all float loads of an expression, by `adjoints` and by torch's autograd."""
    tensors = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    loads = leaves([Kind.FLOAT if v.is_floating_point() else Kind.BOOL for v in values])
    known = dict(zip(loads, tensors, strict=True))

    def leaf(part):
        return (lambda *index: known[part]) if part.op == "load" else upstream if part is UPSTREAM else torch.tensor(0)

    wanted = [x for x in loads if x.kind is Kind.FLOAT]
    ours = adjoints(expr, UPSTREAM, wanted)
    out = evaluate(expr, leaf, torch.float64)
    theirs = torch.autograd.grad(
        out, [known[x] for x in wanted], upstream.expand_as(out), allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():
        return [(evaluate(ours[x], leaf, torch.float64).expand_as(t), t) for x, t in zip(wanted, theirs, strict=True)]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_those_of_torch(name):
    kinds = PRIMITIVES[name].args
    values = []
    for number, kind in enumerate(kinds):
        x = torch.linspace(-2.3, 2.9, 64, dtype=torch.float64).roll(11 * number)
        x = x.abs() + 0.1 if name in POSITIVE else x
        values.append(x > 0.3 if kind is Kind.BOOL else x)
    expr = apply(name, *leaves(kinds))
    for ours, theirs in pull_back(expr, values, torch.linspace(0.5, 1.5, 64, dtype=torch.float64)):
        assert_same_in_float64(ours, theirs)


@pytest.mark.parametrize("name", ROUNDED.values())
def test_a_gradient_passes_through_rounding(name):
    """torch rounds it as well, to the same dtype."""
    x = load(0, (I,), Kind.FLOAT)
    assert adjoints(apply(name, x), UPSTREAM, [x])[x] is UPSTREAM


@pytest.mark.parametrize("name", ["abs", "minimum", "maximum", "pow"])
def test_conventions_at_kinks(name):
    zero = torch.zeros(3, dtype=torch.float64)
    values = [zero, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)][: len(PRIMITIVES[name].args)]
    for ours, theirs in pull_back(
        apply(name, *leaves(PRIMITIVES[name].args)), values, torch.ones(3, dtype=torch.float64)
    ):
        assert_same(ours, theirs)


def test_a_selection_drops_what_is_not_a_number_on_the_other_side():
    live, x = load(0, (I,), Kind.BOOL), load(1, (I,), Kind.FLOAT)
    values = [torch.tensor([True, False]), torch.tensor([1.0, 0.0], dtype=torch.float64)]
    expr = where(live, apply("log", x), const(0.0))
    # torch itself multiplies 0 by 1 / 0 here; the gradient at the selection is 0, and what follows is the same product.
    ((ours, theirs),) = pull_back(expr, values, torch.ones(2, dtype=torch.float64))
    assert_same(ours, theirs)


def test_a_value_used_twice_adds_up():
    x = load(0, (I, J), Kind.FLOAT)
    program = apply("fadd", apply("fmul", SCORE, x), apply("tanh", x))
    found = adjoints(program, UPSTREAM, [SCORE, x, load(1, (I,), Kind.FLOAT)])
    assert found[SCORE] is apply("fmul", UPSTREAM, x)
    assert found[x].op == "fadd"
    assert found[load(1, (I,), Kind.FLOAT)] is ZERO


def test_integers_and_truth_values_end_a_gradient():
    x = load(0, (I,), Kind.FLOAT)
    for program in (apply("floor", x), apply("to_float", apply("to_int", x)), node("row_max", (), Kind.FLOAT)):
        assert adjoints(program, UPSTREAM, [x])[x] is ZERO
