"""Keys less what they have in common, in the gradient of Q: as exact as eager where means are large, whether or not
gradients of a row's scores add up to zero."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

import fusion
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir.expr import J, const
from fusion.ir.ops import apply, where
from fusion.ir.spec import Normalizer
from fusion.lowering.gradients import adds_up_to_zero
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, Case, assert_gradients_as_exact_as_eager, case, draw
from tests.numerics import assert_as_exact_over_draws


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check(c: Case, target: str, operands: list[torch.Tensor], sizes: list[int]) -> None:
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    out, statistics = run.outputs(operands, sizes)
    grad, needs = torch.randn_like(out), (True,) * len(operands)
    found = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "group"), [("plain", 1), ("plain", 3), ("causal", 1), ("bias", 1)])
@pytest.mark.parametrize("target", ["best", "pairs", "multiply-add", "avx2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_with_a_large_mean(name: str, group: int, target: str, dtype: str) -> None:
    """Before, the root mean square of the error of dQ was up to eight times eager's."""
    c = case(name, dtype, 40, 24, group=group)
    # An odd number of keys: the last has no other to be a pair with.
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 210, "Nk": 211}, "heads_inside")
    for x in operands[1:3]:
        x += 8
    check(c, target, operands, sizes)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30])
def test_special_keys(value: float) -> None:
    """One of the keys of which the mean is taken."""
    c = case("plain", "float32", 40, 24)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 35, "Nk": 50})
    operands[1][0, 0, 3, 7] = value
    check(c, "best", operands, sizes)


@pytest.mark.parametrize("name", ["plain", "bias", "causal", "left_padded_inf", "alibi", "brain_bias", "temperature"])
def test_gradients_of_scores_add_up_to_zero(name: str) -> None:
    assert adds_up_to_zero(case(name).spec)


@pytest.mark.parametrize("name", ["window", "causal_last_key", "soft_cap"])
def test_those_with_fills_that_may_have_weight_do_not(name: str) -> None:
    assert not adds_up_to_zero(case(name).spec)


@pytest.mark.parametrize(("fill", "adds_up"), [(-math.inf, True), (-2.0, False)])
def test_the_filled_branch_may_be_either(fill: float, adds_up: bool) -> None:
    """`masked_fill` has it first, `where` last."""
    spec = case("plain").spec
    for branches in (const(fill), spec.score), (spec.score, const(fill)):
        score = where(apply("ilt", J, const(5)), *branches)
        assert adds_up_to_zero(replace(spec, score=score)) is adds_up


def test_without_a_normaliser_they_do_not() -> None:
    assert not adds_up_to_zero(case("plain", normalizer=Normalizer.NONE).spec)


def gradients(run: Callable, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = run(*inputs)
    found = found if type(found) is tuple else (found,)
    arriving = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype) for x in found]
    return torch.autograd.grad(found, inputs, arriving)


def check_program(program: Callable, draw: Callable[[], Sequence[torch.Tensor]]) -> None:
    torch._dynamo.reset()
    run = torch.compile(program, backend="fusion", options={"inner": "eager"})

    def drawn():
        inputs = draw()
        return gradients(run, inputs), gradients(program, inputs), gradients(program, [x.double() for x in inputs])

    with fusion.collect_reports() as reports:
        assert_as_exact_over_draws(drawn)
    assert [report.fused for report in reports] == [1]


def softmax_and_one(s: torch.Tensor) -> torch.Tensor:
    peak = s.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - peak)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-peak))


OUTLIERS = {
    "soft-cap": lambda s, v, x: (20 * torch.tanh(s / 20)).masked_fill(HIDDEN, -math.inf).softmax(-1) @ v,
    "sink": lambda s, v, x: torch.cat([2 * s, x.expand(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v,
    "fill": lambda s, v, x: torch.where(HIDDEN, -1e4, 2 * s).softmax(-1) @ v,
    "factor": lambda s, v, x: (s * x).masked_fill(HIDDEN, -math.inf).softmax(-1) @ v,
    "softmax and one": lambda s, v, x: softmax_and_one(2 * s) @ v,
    "log-sum": lambda s, v, x: (s.softmax(-1) @ v, s.logsumexp(-1)),
    "sums of weights": lambda s, v, x: (s.softmax(-1) @ v, s.softmax(-1).sum(-2)),
}
HIDDEN = torch.ones(512, 512, dtype=torch.bool).triu(1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OUTLIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])  # two kernels, one kernel
def test_an_outlier_among_the_columns(name: str, dtype: torch.dtype, heads: int, two_threads: None) -> None:
    """As language models have it: large in all keys, and hardly read. The gradients of a row's scores do not add up to
    zero here, or are not known to. Before, the error of dQ was up to eight times what is allowed."""
    torch.manual_seed(1)

    def draw() -> list[torch.Tensor]:
        q, k, v = (torch.randn(1, heads, 512, 64) for _ in range(3))
        q[..., 0] *= 0.02
        k[..., 0] += 50
        v[..., 1] += 20
        x = 1 + torch.rand(1, heads, 1, 1)
        return [t.to(dtype) for t in (q, k, v, x)][: 4 if name in ("factor", "sink") else 3]

    check_program(lambda q, k, v, x=None: OUTLIERS[name](q @ k.mT / 8, v, x), draw)


@pytest.mark.parametrize("fill", [-1.0, torch.finfo(torch.float32).min])
def test_fills_that_have_weight(fill: float) -> None:
    """Keys that are filled take part in the sum, and what arrives there goes nowhere. Two rows have no live key: their
    scores are the fill itself, whatever it is."""
    torch.manual_seed(0)
    n = 70
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    added = torch.zeros(n, n)
    added[:2] = fill

    def filled(q, k, v):
        return torch.softmax((q @ k.mT / 4 + added.to(q.dtype)).masked_fill(hidden, fill), -1) @ v

    check_program(filled, lambda: [torch.randn(1, 2, n, 16), 8 + torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)])
