"""Dynamic sizes stay dynamic where an attention is refused, at whatever stage; where it is taken, torch guards."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import sympy
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion.codegen import reference
from fusion.passes import assumptions
from fusion.refusals import Reason, Refusal
from fusion.runtime import kernels
from tests.numerics import assert_runs_as_exact_as_eager


def graphs(function, calls, **options):
    """How many graphs these calls compile; their results are as exact as eager."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="fusion", dynamic=True, options={"inner": "eager", **options})
    for inputs in calls:
        assert_runs_as_exact_as_eager(compiled, function, *inputs)
    return counters["stats"]["unique_graphs"], counters["fusion"]["fused"]


def tensors(d, heads=2, groups=2):
    torch.manual_seed(d)
    return torch.randn(3, heads, 9, d), torch.randn(3, groups, 11, d), torch.randn(3, groups, 11, d + 3)


WIDTHS = [tensors(d) for d in (5, 8, 12)]


def summed(q, k, v):
    return torch.softmax(q @ k.mT, -1).cumsum(-1) @ v


def mixed_dtypes(q, k, v):
    return sdpa(q.double(), k.double(), v.double())


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def scaled(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, -1).cumsum(-1) @ v


@pytest.mark.parametrize("function", [summed, mixed_dtypes])
def test_an_attention_that_is_refused_costs_no_compilation(function):
    assert graphs(function, WIDTHS) == (1, 0)


def test_numbers_of_a_refused_attention_stay_dynamic():
    calls = [(*WIDTHS[0], scale) for scale in (0.3, 0.4, 0.5)]
    assert graphs(scaled, calls) == (1, 0)


@pytest.mark.parametrize("function", [plain, sdpa])
def test_nor_does_one_that_no_kernel_is_made_for(function):
    refusing = SimpleNamespace(**vars(reference))
    refusing.supports = lambda spec, machine: Refusal(Reason.DTYPE, "no kernel, for this test")
    with kernels.emitting("refusing", ("cpu",), lambda: refusing):
        assert graphs(function, WIDTHS, emitter="refusing") == (1, 0)


@pytest.mark.parametrize("function", [plain, sdpa])
def test_one_that_is_taken_is_compiled_for_its_head_dimension(function):
    assert graphs(function, WIDTHS) == (3, 3)


def test_groups_of_heads_that_are_refused_stay_dynamic():
    def grouped(q, k, v):
        return sdpa(q.double(), k.double(), v.double(), enable_gqa=True)

    calls = [tensors(13, heads, groups) for heads, groups in ((8, 4), (10, 5), (12, 6))]
    assert graphs(grouped, calls)[0] == 1


def test_a_size_may_be_the_head_dimension_of_one_attention_and_the_length_of_another():
    def both(q, k, v, r, l, w):
        return plain(q, k, v), plain(r, l, w)

    def draw(n):
        shapes = (2, 9, n), (2, 11, n), (2, 11, n), (2, 9, 5), (2, n, 5), (2, n, 5)
        return [torch.randn(shape) for shape in shapes]

    assert graphs(both, [draw(8), draw(12)]) == (2, 4)


class Guards:
    """Environment of symbols that notes what torch would guard on."""

    def __init__(self):
        self.asked, self.guarded = 0, []

    @contextlib.contextmanager
    def suppress_guards(self):
        before, self.guarded = self.guarded, []
        yield
        self.guarded = before

    def evaluate_expr(self, expr):
        self.asked += 1
        self.guarded.append(expr)
        return sympy.Integer(8)


def test_questions_are_answered_at_once_and_guarded_on_later():
    env, assumed, (n, m) = Guards(), assumptions.Assumptions(), sympy.symbols("n m")
    with assumed.hold():
        assert assumptions.ask(n, env, lambda: env.evaluate_expr(n)) == 8
        assumptions.fix(m, env)
        assert assumptions.known(m + n) == n + 8
    assert not env.guarded and assumptions.known(m) is m
    assumed.guard()
    assert env.guarded == [n, m]


def test_what_is_asked_twice_is_guarded_on_once():
    env, assumed, n = Guards(), assumptions.Assumptions(), sympy.Symbol("n")
    with assumed.hold():
        for _ in range(2):
            assumptions.ask(n, env, lambda: env.evaluate_expr(n))
    assumed.guard()
    assert env.guarded == [n]


def test_assumptions_of_one_site_are_none_of_another():
    env, n = Guards(), sympy.Symbol("n")
    with assumptions.Assumptions().hold():
        assumptions.fix(n, env)
        with assumptions.Assumptions().hold():
            assert assumptions.known(n) is n
        assert assumptions.known(n) == 8


def test_without_assumptions_torch_guards_at_once():
    env, n = Guards(), sympy.Symbol("n")
    assumptions.ask(n, env, lambda: env.evaluate_expr(n))
    assert env.guarded == [n] and assumptions.known(n) is n
