"""Gradients that arrive at auxiliary outputs: in the backward kernels, of every score program and normaliser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.offline.facts import compile_offline
from fusion.codegen import reference
from fusion.codegen.triton.backward import backward_kernels
from fusion.codegen.triton.gradients import with_arriving
from fusion.ir import AttentionSpec, Kind, Normalizer, Operand
from fusion.ir.expr import ROW_MAX, WEIGHT, Expr, I, J, const, load
from fusion.ir.ops import apply
from fusion.ir.spec import AuxOutput, Reduction
from fusion.lowering import aux_gradients
from fusion.lowering.rows import LIVE_LOG_SUM
from fusion.machine import of_target
from fusion.planning.gpu import GpuPlanner
from tests.codegen.mlir.cases import HEAD, PROGRAMS, Case, case, draw
from tests.codegen.test_aux_outputs import ENTROPY, FAR, LOG_SUM, SHAPES, kernel
from tests.numerics import assert_as_exact_as_eager

SQUARE = apply("fmul", WEIGHT, WEIGHT)


def over(coordinate: str, value: Expr) -> AuxOutput:
    """A sum over keys ("j") or queries ("i")."""
    left = {"i": "j", "j": "i"}[coordinate]
    return AuxOutput(value=value, dims=("b1", "b0", left), dtype="float32", reduction=Reduction.SUM, over=coordinate)


def table(value: Expr, dtype: str = "float32") -> AuxOutput:
    return AuxOutput(value=value, dims=("i", "b0", "b1", "j"), dtype=dtype)


LOG_SUMS = AuxOutput(value=LOG_SUM, dims=("b1", "b0", "i"), dtype="float32")


def outputs(dtype: str, with_log_sum: bool) -> tuple[AuxOutput, ...]:
    """One of each kind, in several orders of their dimensions."""
    found = (over("j", ENTROPY), over("i", FAR), table(WEIGHT, dtype), over("j", SQUARE))
    return (*found, LOG_SUMS) if with_log_sum else found


emitters = pytest.mark.parametrize("name", ["mlir", "triton"])
first_mlir = pytest.mark.parametrize("name", ["mlir", pytest.param("triton", marks=pytest.mark.long)])


def check(c: Case, name: str, aux_outputs: Sequence[AuxOutput] | None = None, layout: str = "packed") -> None:
    """aux_outputs: all kinds by default."""
    if aux_outputs is None:
        aux_outputs = outputs(c.spec.dtype, c.spec.normalizer is Normalizer.SOFTMAX)
    spec = replace(c.spec, aux_outputs=tuple(aux_outputs))
    run = kernel(spec, name)
    assert aux_gradients.unsupported(spec) is None
    found = [
        gradients(run, spec, *draw(c, shape, layout), seed)
        for seed, shape in enumerate(SHAPES * 2 if name == "mlir" else SHAPES)
    ]
    ours, eager, exact = ([torch.cat(draws) for draws in zip(*way, strict=True)] for way in zip(*found, strict=True))
    assert_as_exact_as_eager(ours, eager, exact)


def gradients(
    run,
    spec: AttentionSpec,
    operands: list[torch.Tensor],
    sizes: list[int],
    seed: int,
    by: str = "kernels",
    at_output: float = 1.0,
) -> tuple[list[torch.Tensor], ...]:
    """Of all operands, flat: of the kernels, of the reference interpreter in the spec's dtype, and in float64. by: what
    must have made the first. at_output: the size of what arrives at the output."""
    torch.manual_seed(seed)
    for tensor in operands[:3]:
        tensor.copy_(torch.randn(tensor.shape))
    needs = tuple(o.is_floating_point() for o in operands)
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    out, statistics, *aux_outputs = run.outputs(operands, sizes)
    grad, *more = (torch.randn(result.shape).to(result.dtype) for result in (out, *aux_outputs))
    grad *= at_output
    with mock.patch.object(reference, "backward", wraps=reference.backward) as interpreter:
        ours = run.backward(grad, out, statistics, operands, sizes, needs, more)
    assert interpreter.called is (by == "reference")
    eager = reference.backward(spec, grad, operands, sizes, needs, getattr(torch, spec.dtype), more)
    exact = reference.backward(spec, grad.double(), wide, sizes, needs, aux_outputs=[g.double() for g in more])
    dtypes = [o.dtype for o in operands if o.is_floating_point()]
    cast = ([g.to(dtype).flatten() for g, dtype in zip(found, dtypes, strict=True)] for found in (ours, eager))
    return *cast, [g.flatten() for g in exact]


KINDS = ("plain", "causal_last_key", "window", "left_padded", "half_bias", "bool_mask", "documents", "row_gate")


@first_mlir
@pytest.mark.parametrize("program", [p if p in KINDS else pytest.param(p, marks=pytest.mark.long) for p in PROGRAMS])
def test_programs(name: str, program: str) -> None:
    check(case(program, d=16), name)


@pytest.mark.one_in(3)
@emitters
@pytest.mark.parametrize("normalizer", [Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX])
@pytest.mark.parametrize("program", ["left_padded_inf", "padding"])
def test_rows_without_a_live_key(name: str, normalizer: Normalizer, program: str) -> None:
    check(case(program, d=16, normalizer=normalizer), name)


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("program", ["left_padded_inf", "padding"])
def test_nothing_flows_through_the_log_sum_of_a_row_without_a_live_key(name: str, program: str) -> None:
    """Log-sum-exps of blocks of a ring get such gradients."""
    live = replace(LOG_SUMS, value=LIVE_LOG_SUM)
    check(case(program, d=16, normalizer=Normalizer.SAFE_SOFTMAX), name, [live])


@emitters
def test_sinks_far_above_the_scores(name: str) -> None:
    """In rows of large fills the sum, in terms of the largest score, overflows; the log-sum-exp is the sink's."""
    check(case("left_padded", d=16, sinks=True), name, [LOG_SUMS])


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("size", [1e4, 1e6, 1e8, 1e10])
def test_log_sums_of_huge_scores(name: str, size: float) -> None:
    """A kernel's sum is relative to its largest score times a rounded unit, and off by that in rows of huge scores.
    Nothing arrives at the output: with one key that has all the weight, eager's part of that is exactly 0."""
    c = case("plain", d=16)
    operand = Operand(dtype="float32", rank=1, name="factor")
    score = apply("fmul", c.spec.score, load(3, (J,), Kind.FLOAT))
    spec = replace(c.spec, score=score, operands=(*c.spec.operands, operand), aux_outputs=(LOG_SUMS,))
    operands, sizes = draw(c, SHAPES[0])
    factor = torch.randn(75, generator=torch.Generator().manual_seed(0)) * size
    assert_as_exact_as_eager(*gradients(kernel(spec, name), spec, [*operands, factor], sizes, 0, at_output=0.0))


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("aux", outputs("float32", True), ids=["rows", "keys", "table", "squares", "log-sum-exp"])
def test_each_alone(name: str, aux: AuxOutput) -> None:
    check(case("causal", d=16), name, [aux])


@first_mlir
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["heads_inside", "gaps"])
def test_half_precision_and_layouts(name: str, dtype: str, layout: str) -> None:
    check(case("causal", dtype, d=16), name, layout=layout)


@emitters
def test_rows_of_another_scale(name: str) -> None:
    """exp(x) / (1 + the sum), of whose log-sum-exp kernels have no gradient."""
    c = case("causal", d=16, off_by_one=True)
    check(c, name, outputs("float32", False))
    reason = aux_gradients.unsupported(replace(c.spec, aux_outputs=(LOG_SUMS,)))
    assert reason is not None and "scaled by something else" in reason


def with_factor(c: Case) -> tuple[AttentionSpec, Expr]:
    """A spec that reads one more tensor, with an element per head, query and key."""
    operand = Operand(dtype="float32", rank=3, name="factor")
    return replace(c.spec, operands=(*c.spec.operands, operand)), load(3, (HEAD, I, J), Kind.FLOAT)


@emitters
@pytest.mark.parametrize("other", ["weight", "itself"])
def test_tensors_beside_the_weights_have_gradients(name: str, other: str) -> None:
    """Also where there is no weight, in tiles that a mask would let kernels skip."""
    c = case("causal", d=16)
    spec, factor = with_factor(c)
    value = apply("fmul", factor, WEIGHT if other == "weight" else factor)
    for aux in (over("j", value), table(value)):
        run = kernel(replace(spec, aux_outputs=(aux,)), name)
        operands, sizes = draw(c, SHAPES[1])
        by = "kernels" if name == "mlir" else "reference"
        found = gradients(run, run.spec, [*operands, torch.randn(2, 33, 33)], sizes, 0, by)
        assert_as_exact_as_eager(*found)
        assert found[0][3].view(2, 33, 33)[0].count_nonzero() > 33 * 16


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("place", [(2, 3), (2, 30)], ids=["live", "masked"])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_arrives_is_no_number(name: str, what: float, place: tuple[int, int]) -> None:
    """A masked weight has no part in its row, but where its gradient is none either."""
    c = case("causal", d=16)
    run = kernel(replace(c.spec, aux_outputs=(table(WEIGHT),)), name)
    operands, sizes = draw(c, SHAPES[1])
    out, statistics, weights = run.outputs(operands, sizes)
    grad, more = torch.randn_like(out), torch.randn_like(weights)
    more[place[0], 0, 0, place[1]] = what
    needs = (True, True, True)
    ours = run.backward(grad, out, statistics, operands, sizes, needs, [more])
    eager = reference.backward(run.spec, grad, operands, sizes, needs, aux_outputs=[more])
    wide = reference.backward(
        run.spec, grad.double(), [o.double() for o in operands], sizes, needs, aux_outputs=[more.double()]
    )
    assert not bool(eager[0].isfinite().all())
    assert_as_exact_as_eager(ours, eager, wide)


@emitters
def test_a_derivative_that_is_infinite_without_a_weight(name: str) -> None:
    """w log(w) has none at 0: rows of a causal mask are NaN, but for the last."""
    c = case("causal", d=16)
    aux = over("j", apply("fmul", WEIGHT, apply("log", WEIGHT)))
    run = kernel(replace(c.spec, aux_outputs=(aux,)), name)
    found = gradients(run, run.spec, *draw(c, SHAPES[1]), 0)
    assert bool(found[1][0].isnan().any()) and not bool(found[1][0].isnan().all())
    assert_as_exact_as_eager(*found)


def test_whether_tiles_without_a_weight_count() -> None:
    spec, factor = with_factor(case("causal", d=16))
    for value, everywhere in (
        (WEIGHT, False),
        (ENTROPY, False),
        (FAR, False),
        (apply("fmul", WEIGHT, apply("log", WEIGHT)), True),
        (apply("fmul", WEIGHT, factor), True),
        (apply("sqrt", WEIGHT), True),
    ):
        found = aux_gradients.aux_gradients(replace(spec, aux_outputs=(over("j", value),)), 5)
        assert found.everywhere is everywhere, str(value)


@emitters
def test_what_is_left_to_the_reference_interpreter(name: str) -> None:
    c = case("causal", d=16)
    largest = replace(over("j", WEIGHT), reduction=Reduction.MAX)
    logit = AuxOutput(value=ROW_MAX, dims=("b1", "b0", "i"), dtype="float32")
    spec, factor = with_factor(c)
    beside = replace(LOG_SUMS, value=apply("fmul", LOG_SUM, load(3, (HEAD, I, I), Kind.FLOAT)))
    safe = replace(c.spec, normalizer=Normalizer.SAFE_SOFTMAX)
    for given, aux, word in (
        (safe, LOG_SUMS, "without a live key"),
        (c.spec, largest, "the position of the max"),
        (c.spec, logit, "largest logit"),
        (spec, beside, "a tensor beside"),
    ):
        given = replace(given, aux_outputs=(aux, over("j", ENTROPY)))
        assert word in str(aux_gradients.unsupported(given))
        run = kernel(given, name)
        operands, sizes = draw(c, SHAPES[1])
        if given.operands is spec.operands:
            operands = [*operands, torch.randn(2, 33, 33)]
        assert_as_exact_as_eager(*gradients(run, given, operands, sizes, 0, "reference"))


@first_mlir
@pytest.mark.parametrize(
    "c",
    [
        case("causal", d=16, sinks=True),
        case("left_padded_inf", d=16, sinks=True, normalizer=Normalizer.SAFE_SOFTMAX),
        case("causal", d=16, weight=True),
        case("bias", d=16, d_v=20, group=2),
        case("window", d=20),
        case("plain", d=144),
        case("sigmoid", d=16, normalizer=Normalizer.NONE),
    ],
    ids=["sinks", "safe sinks", "weight", "groups", "padded columns", "panels", "no softmax"],
)
def test_variants(name: str, c: Case) -> None:
    check(c, name)


@pytest.mark.parametrize("target", ["sm_90", *(pytest.param(t, marks=pytest.mark.long) for t in ("sm_80", "gfx942"))])
def test_kernels_compile_ahead_of_time(target: str) -> None:
    spec = with_arriving(
        replace(case("causal", "bfloat16", d=64).spec, aux_outputs=(over("j", ENTROPY), LOG_SUMS)), (0, 1)
    )
    kernels = backward_kernels(spec, 64, 64, (True, True, True, False, False))
    tiles = GpuPlanner(spec, of_target(target)).backward(64, 64)
    found = compile_offline(spec, kernels, 64, 64, tiles, target)
    assert len(found) == 3 and not any(facts.lost for facts in found)


@emitters
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_keys_that_are_made_of_what_is_stored(dtype: str, name: str) -> None:
    """Kernels of gradients read elements as they are: the reference interpreter has these."""
    c = case("causal", d=16)
    value = apply("fmul", apply("to_float", load(1, c.spec.k, Kind.INT)), const(0.02))
    stored = replace(c.spec.operands[1], dtype=dtype)
    spec = replace(c.spec, operands=(c.spec.operands[0], stored, *c.spec.operands[2:]), k_value=value)
    (q, _, v), sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 75})
    operands = [q, torch.randint(0, 100, v.shape).to(getattr(torch, dtype)), v]
    run, needs = kernel(spec, name), (True, False, True)
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn_like(out)
    found = run.backward(grad, out, statistics, operands, sizes, needs)
    eager = reference.backward(spec, grad, operands, sizes, needs)
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    assert_as_exact_as_eager(found, eager, reference.backward(spec, grad.double(), wide, sizes, needs))


@emitters
def test_rows_of_nan_that_are_set_to_zero_have_gradients_by_the_reference(name: str) -> None:
    """Kernels multiply what arrives by the weights of such a row, which are NaN there."""
    c = case("left_padded_inf", d=16, normalizer=Normalizer.ZERO_SOFTMAX)
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 20})
    run, needs = kernel(c.spec, name), (False, False, True, *(False for _ in operands[3:]))
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn_like(out)
    (found,) = run.backward(grad, out, statistics, operands, sizes, needs)
    assert torch.equal(found, reference.backward(c.spec, grad, operands, sizes, needs)[0])
