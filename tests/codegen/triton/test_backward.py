"""Gradients by GPU kernels, in Triton's interpreter, against autograd in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.gradients import unsupported_gradient
from fusion.codegen.triton.launch import Kernel
from fusion.ir import Kind, Normalizer, Operand, integers
from fusion.ir.expr import ROW_SUM, SCORE, I, J, const
from fusion.ir.ops import apply, where
from fusion.passes.specify.masks import understand
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import JOINT, KEYS, KEYS_ALONE, QUERIES, VALUES_ALONE
from fusion.planning.gpu_model import PREPARE
from tests.codegen.mlir.cases import (
    BATCH,
    CAUSAL,
    FMIN,
    HEAD,
    PROGRAMS,
    Case,
    Program,
    assert_gradients_as_exact_as_eager,
    beside_eager,
    case,
    draw,
    eager_gradients,
    masked,
    read,
    tensor,
)
from tests.codegen.triton.counting import count_products
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws

SMALL = Tile(rows=32, keys=32, warps=4, stages=1)
SHAPES = ({"B": 2, "H": 1, "Nq": 40, "Nk": 40}, {"B": 1, "H": 2, "Nq": 17, "Nk": 75})


class Apart:
    """The policy that gives dK and dV a kernel each, in tiles of their own."""

    def forward(self, *_) -> Tile:
        return SMALL

    def backward(self, *_) -> dict[str, Tile]:
        rows_apart = {VALUES_ALONE: replace(SMALL, rows=2 * SMALL.rows)}
        return dict.fromkeys((PREPARE, QUERIES, KEYS_ALONE), SMALL) | rows_apart


class Joined(Apart):
    """The policy that makes all gradients in one kernel where that may be."""

    def backward(self, spec, machine, d: int, d_v: int, joint: bool) -> dict[str, Tile]:
        return dict.fromkeys((PREPARE, JOINT) if joint else (PREPARE, QUERIES, KEYS), SMALL)


def check(
    c: Case,
    layout: str = "packed",
    tile: Tile = SMALL,
    shapes: tuple[dict[str, int], ...] = SHAPES,
    run: Differentiable | None = None,
) -> None:
    run = run or Differentiable(c.spec, tile)

    def gradients(shape):
        operands, sizes = draw(c, shape, layout)
        needs = tuple(o.is_floating_point() for o in operands)
        assert unsupported_gradient(c.spec, needs) is None
        out, statistics = run.outputs(operands, sizes)
        grad = torch.randn(out.shape).to(out.dtype)
        got = run.backward(grad, out, statistics, operands, sizes, needs)
        return beside_eager(got, c, operands, grad, needs)

    for shape in shapes:
        rule = {"name": "gradient", "check_dtype": False}
        assert_as_exact_over_draws(functools.partial(gradients, shape), getattr(torch, c.spec.dtype), **rule)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "causal",
        "causal_last_key",
        "window",
        "left_padded",
        "bias",
        "transposed_bias",
        "alibi",
        "soft_cap",
        "bucket_table",
        "documents",
        "temperature",
        "row_gate",
        "clamp",
        "padding",
        "sine",
        "atan",
        "expm1",
    ],
)
def test_programs(name: str) -> None:
    check(case(name, d=16))


BY_KEYS_PROGRAMS = ["plain", "causal", "left_padded", "window", "soft_cap", "bias", "documents", "row_gate"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"weight": True, "sinks": True}, {"group": 2}], ids=str)
@pytest.mark.parametrize("name", BY_KEYS_PROGRAMS)
def test_the_product_for_dv_behind_that_for_dp(name: str, options: dict) -> None:
    check(case(name, d=16, **options), tile=replace(SMALL, rotated=True), shapes=SHAPES[-1:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"weight": True, "sinks": True}, {"group": 2}], ids=str)
@pytest.mark.parametrize("name", BY_KEYS_PROGRAMS)
def test_a_kernel_each_for_dk_and_dv(monkeypatch, name: str, options: dict) -> None:
    """Dead rows are noted anew for other blocks of rows; gradients of what keys read come with dK."""
    products, c = count_products(monkeypatch), case(name, d=16, **options)
    run = Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, Apart()))
    check(c, shapes=SHAPES[-1:], run=run)
    assert {KEYS_ALONE, VALUES_ALONE} <= products.keys() and KEYS not in products


INFINITE_AT_ZERO = {
    "root of a square": Program(
        eager=lambda s, i, j: (s * s) ** 0.6, score=lambda s: apply("pow", apply("fmul", s, s), const(0.6))
    ),
    "logarithm times a parameter": Program(
        eager=lambda s, i, j, t: t[:, None, None] * torch.log(s * s), operands=(tensor("t", 1),),
        score=lambda s: apply("fmul", read(HEAD), apply("log", apply("fmul", s, s))),
        tensors=lambda n: [torch.full((n["H"],), 0.3)],
    ),
}  # fmt: skip
"""Programs with derivatives that are infinite where K is filled with zeros, behind the last key."""


@pytest.mark.parametrize("policy", [Apart, Joined])
@pytest.mark.parametrize("name", INFINITE_AT_ZERO)
def test_derivatives_where_no_key_is(monkeypatch, name: str, policy: type[Apart]) -> None:
    monkeypatch.setitem(PROGRAMS, name, INFINITE_AT_ZERO[name])
    c = case(name, d=16)
    check(c, run=Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, policy())))


def weighed(q, k, v, numbers):
    return torch.softmax(q @ k.mT * 0.25, -1).mul(torch.log(numbers)) @ v


def test_factors_of_weights_where_no_key_is(emits) -> None:
    """Nothing is loaded behind the last key, and its logarithm is infinite."""
    emits(lambda spec: Kernel(spec, SMALL), lambda spec: Differentiable(spec, SMALL))
    given = [torch.randn(1, 2, 75, 16) for _ in range(3)] + [torch.rand(75) + 0.5]
    grad = torch.randn(1, 2, 75, 16)

    def found(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]

    torch._dynamo.reset()
    run = torch.compile(weighed, backend="fusion", options={"inner": "eager", "strict": True})
    results = found(run, torch.float32), found(weighed, torch.float32), found(weighed, torch.float64)
    for ours, eager, exact in zip(*results, strict=True):
        assert_as_exact_as_eager(ours, eager, exact, torch.float32)


JOINT_PROGRAMS = ["plain", "causal", "left_padded", "window", "soft_cap", "documents", "padding", "sine"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"group": 2}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", JOINT_PROGRAMS)
def test_one_kernel_for_all(monkeypatch, name: str, options: dict) -> None:
    """Neither number of keys fills its blocks; rows without a live key visit all."""
    products, c = count_products(monkeypatch), case(name, **{"d": 16, **options})
    run = Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, Joined()))
    check(c, run=run)
    assert JOINT in products and not {KEYS, QUERIES} & products.keys()


@pytest.mark.parametrize("options", [{"weight": True}, {"sinks": True}], ids=str)
def test_gradients_that_are_sums_over_keys_have_rows_of_their_own(monkeypatch, options: dict) -> None:
    products, c = count_products(monkeypatch), case("causal", d=16, **options)
    run = Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, Joined()))
    check(c, run=run)
    assert JOINT not in products


def test_deterministic_algorithms_add_nothing_up_in_memory(monkeypatch) -> None:
    products, c = count_products(monkeypatch), case("causal", d=16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(c, run=Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, Joined())))
    assert JOINT not in products


@pytest.mark.parametrize("needs", [(False, True, False), (False, False, True), (True, False, True)], ids=str)
def test_some_gradients_of_kernels_apart(needs: tuple[bool, ...]) -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPES[-1])
    run = Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, Apart()))
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape).to(out.dtype)
    got = run.backward(grad, out, statistics, operands, sizes, needs)
    assert len(got) == sum(needs)
    assert_gradients_as_exact_as_eager(got, c, operands, grad, needs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["causal", "bias"])
def test_low_precision(name: str, dtype: str) -> None:
    check(case(name, dtype, 32))


@pytest.mark.parametrize("layout", ["heads_inside", "columns"])
def test_grouped_heads(layout: str) -> None:
    check(case("causal", "float32", 24, 20, group=3, order=("b0", "i", "b1", "e")), layout)


@pytest.mark.parametrize(
    ("name", "dtype", "d", "d_v"),
    [("alibi", "float32", 40, 20), ("bias", "float32", 24, 40), ("left_padded", "bfloat16", 80, 96)],
)
def test_heads_of_two_panels(name: str, dtype: str, d: int, d_v: int) -> None:
    check(case(name, dtype, d, d_v))


def test_weights_and_sinks() -> None:
    check(case("causal", d=16, weight=True))
    check(case("alibi", d=16, sinks=True))
    check(case("left_padded", d=16, sinks=True))


@pytest.mark.parametrize("options", [{}, {"sinks": True}], ids=str)
def test_sums_over_keys_are_free_of_the_rounding_of_delta(options) -> None:
    """A slope's gradient is a sum of dS times distances, all large where there are more queries than keys: a row's dS
    must add up to what it would exactly. Over six slopes the error is smaller than eager's; it was three times that."""
    c = case("alibi", d=16, **options)
    operands, sizes = draw(c, {"B": 1, "H": 6, "Nq": 90, "Nk": 40})
    operands[3] = torch.linspace(0.3, 1, 6)
    if "sinks" in options:  # of little weight, but in a few rows
        operands[-1] -= 20
    needs = tuple(n == 3 for n in range(len(operands)))
    run = Differentiable(c.spec, SMALL)
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape)
    (got,) = run.backward(grad, out, statistics, operands, sizes, needs)
    (eager,), (exact,) = (eager_gradients(c, operands, grad, needs, dtype) for dtype in (None, torch.float64))
    error, theirs = ((found.double() - exact).square().mean().sqrt() for found in (got, eager))
    assert error < theirs


@pytest.mark.parametrize("fill", [-math.inf, FMIN])
def test_rows_without_a_live_key_have_no_part_in_slopes(fill: float) -> None:
    """Though their weights are NaN, or the same for all keys: eager's gradient ends at the mask."""
    c = case("alibi", d=16)
    live = apply("and", CAUSAL, read(BATCH, J, kind=Kind.BOOL, operand=4))
    mask = Operand(dtype="bool", rank=2, name="mask")
    spec = replace(c.spec, operands=(*c.spec.operands, mask), score=where(live, c.spec.score.args[1], const(fill)))
    padding = torch.tensor([[21], [0]])
    tensors = lambda n: [torch.linspace(0.3, 1, n["H"]), torch.arange(n["Nk"])[None] >= padding]

    def eager(s, i, j, slope, mask):
        return masked(s + slope[:, None, None] * (j - i), (j <= i) & mask[:, None, None], fill)

    program = replace(c.program, operands=(*c.program.operands, mask), tensors=tensors, eager=eager)
    found = replace(c, spec=replace(spec, mask=understand(spec.score)), program=program)
    check(found, shapes=({"B": 2, "H": 1, "Nq": 50, "Nk": 50},))


def test_keys_beyond_the_last_have_no_gradient_in_rows_of_nan() -> None:
    """Rows whose weights are NaN, and whose keys all are in another document: eager's gradient is 0."""
    c = case("chunks", d=16)
    first = apply("ieq", J, integers.integer(0))
    spec = replace(c.spec, score=where(first, const(math.inf), c.spec.score), mask=None)

    def eager(s, i, j):
        return torch.where(j == 0, math.inf, c.program.eager(s, i, j))

    found = replace(c, spec=spec, program=replace(c.program, eager=eager))
    check(found, shapes=({"B": 1, "H": 1, "Nq": 75, "Nk": 40},))


@pytest.mark.parametrize("name", ["window", "left_padded_inf"])
def test_rows_with_an_infinite_score_are_nan_at_all_keys(name: str) -> None:
    """Also at keys that the mask hides and that no other row of the block attends to: eager's gradient of V is NaN."""
    c = case(name, d=16)
    live, score, fill = c.spec.score.args
    there = apply("and", *(apply("ieq", axis, integers.integer(at)) for axis, at in ((I, 40), (J, 38))))
    spec = replace(c.spec, score=where(live, where(there, const(math.inf), score), fill))

    def eager(s, i, j, *others):
        return c.program.eager(torch.where((i == 40) & (j == 38), math.inf, s), i, j, *others)

    infinite = replace(c, spec=spec, program=replace(c.program, eager=eager))
    check(infinite, shapes=({"B": 2, "H": 1, "Nq": 75, "Nk": 90},))


def test_rows_that_are_nan_behind_a_mask_have_no_part_in_a_bias_of_the_row() -> None:
    """The mask is not the last operation, so that no tile is skipped; row 49 has no key, and its weights are NaN."""
    c = case("plain", d=16)
    at = read(BATCH, I, operand=3)
    later = apply("ilt", I, J)
    distance = apply("fmul", const(0.05), apply("to_float", apply("add", J, apply("mul", integers.integer(-1), I))))
    score = apply("fadd", where(later, apply("fadd", c.spec.score, at), const(-math.inf)), distance)
    bias = Operand(dtype="float32", rank=2, name="bias")
    spec = replace(c.spec, operands=(*c.spec.operands, bias), score=score, mask=None)

    def eager(s, i, j, bias):
        return torch.where(i < j, s + bias[:, None, :, None], -math.inf) + 0.05 * (j - i)

    tensors = lambda n: [torch.randn(n["B"], n["Nq"])]
    program = replace(c.program, operands=(bias,), tensors=tensors, eager=eager)
    check(replace(c, spec=spec, program=program), shapes=({"B": 2, "H": 1, "Nq": 50, "Nk": 50},))


@pytest.mark.parametrize("name", ["sigmoid", "clamp"])
def test_no_normaliser(name: str) -> None:
    check(case(name, d=16, normalizer=Normalizer.NONE))


def test_safe_softmax() -> None:
    check(case("left_padded_inf", d=16, normalizer=Normalizer.SAFE_SOFTMAX))


def test_twice_the_same() -> None:
    c = case("causal", d=16, group=2)
    operands, sizes = draw(c, SHAPES[1])
    run = Differentiable(c.spec, SMALL)
    out, statistics = run.outputs(operands, sizes)
    first, second = (run.backward(out, out, statistics, operands, sizes, (True, True, True)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "alibi", "left_padded"])
def test_row_scales(name: str, options) -> None:
    """exp(x) / (1 + sum of exp(x)). Several heads: of gradients with one element eager's error is one draw."""
    check(case(name, d=16, off_by_one=True, **options), shapes=({"B": 1, "H": 6, "Nq": 40, "Nk": 40},))


def test_row_scales_that_depend_on_the_maximum_are_left_to_the_reference() -> None:
    c = case("plain", d=16)
    spec = replace(c.spec, row_scale=apply("div", const(1.0), apply("fadd", ROW_SUM, const(0.5))))
    assert "maximum" in (unsupported_gradient(spec, (True, True, True)) or "")
    operands, sizes = draw(c, SHAPES[0])
    run = Differentiable(spec, SMALL)
    out, statistics = run.outputs(operands, sizes)
    assert len(run.backward(out, out, statistics, operands, sizes, (True, False, True))) == 2


def test_every_program_has_a_reason_or_kernels() -> None:
    from fusion.codegen.triton.backward import backward_kernels

    for name in PROGRAMS:
        c = case(name, d=16)
        needs = tuple(o.dtype in ("float32", "float16") for o in c.spec.operands)
        assert unsupported_gradient(c.spec, needs) is None
        assert backward_kernels(c.spec, 16, 16, needs)


def test_gradients_that_are_nan_where_a_mask_hides_keys_are_left_to_the_reference() -> None:
    hidden = where(CAUSAL, SCORE, const(-math.inf))
    score = where(CAUSAL, apply("fmul", hidden, read(HEAD)), const(-1e9))
    spec = replace(case("temperature", d=16).spec, score=score, mask=understand(score))
    assert "the mask hides" in (unsupported_gradient(spec, (True, True, True, True)) or "")
    assert unsupported_gradient(spec, (True, True, True, False)) is None


def test_gradients_that_multiply_a_fill_are_left_to_the_reference() -> None:
    """Where one weight is 1, eager's gradient of the score is 0, and a kernel's has the rounding of the outputs. Sums
    over keys have a correction for it."""
    masked = where(CAUSAL, SCORE, const(-1e4))
    dense, per_head = (replace(case("temperature", d=16).spec, score=apply("fmul", masked, read(*at))) for at in
                       ((I, J), (HEAD,)))  # fmt: skip
    assert "a fill" in (unsupported_gradient(dense, (True, True, True, True)) or "")
    assert unsupported_gradient(dense, (True, True, True, False)) is None
    assert unsupported_gradient(per_head, (True, True, True, True)) is None
