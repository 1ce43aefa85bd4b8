"""Specs with auxiliary outputs on both emitters: weights and statistics of every score program and normaliser."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.offline.facts import compile_offline
from fusion.codegen import cpu, reference, triton
from fusion.codegen.triton.aux_outputs import aux_kernels, aux_tiles
from fusion.ir import AttentionSpec, Kind, Normalizer, integers
from fusion.ir.expr import ROW_MAX, ROW_SUM, WEIGHT, C, I, J, const, load
from fusion.ir.ops import apply, where
from fusion.ir.spec import AuxOutput, Reduction
from fusion.machine import of_target
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from tests.codegen.mlir.cases import BATCH, HEAD, PROGRAMS, Case, case, draw
from tests.numerics import assert_as_exact_as_eager

ENTROPY = apply("fmul", WEIGHT, apply("log", apply("fadd", WEIGHT, const(1e-3))))
FAR = apply("fmul", WEIGHT, apply("to_float", integers.sub(I, J)))
INFINITE = apply("feq", apply("abs", ROW_MAX), const(math.inf))
LOG_SUM = where(INFINITE, ROW_MAX, apply("fadd", ROW_MAX, apply("log", ROW_SUM)))
"""As torch.logsumexp computes it."""
SHAPES = ({"B": 2, "H": 1, "Nq": 40, "Nk": 75}, {"B": 1, "H": 2, "Nq": 33, "Nk": 33})


def outputs(dtype: str, normalized: bool) -> tuple[AuxOutput, ...]:
    """One of each kind, in several orders of their dimensions."""
    found = [
        AuxOutput(value=WEIGHT, dims=("b1", "b0", "i", "j"), dtype=dtype),
        AuxOutput(value=ENTROPY, dims=("b0", "b1", "i"), dtype="float32", reduction=Reduction.SUM, over="j"),
        AuxOutput(value=WEIGHT, dims=("b0", "b1", "i"), dtype="float32", reduction=Reduction.MAX, over="j"),
        AuxOutput(value=FAR, dims=("b1", "b0", "j"), dtype="float32", reduction=Reduction.SUM, over="i"),
        AuxOutput(value=FAR, dims=("b0", "b1", "j"), dtype="float32", reduction=Reduction.MIN, over="i"),
    ]
    of_rows = [AuxOutput(value=value, dims=("b1", "b0", "i"), dtype="float32") for value in (ROW_MAX, LOG_SUM)]
    return (*found, *(of_rows if normalized else ()))


def kernel(spec: AttentionSpec, name: str):
    if name == "triton":
        return triton.Differentiable(spec, Tile(rows=32, keys=16, warps=4, stages=1))
    return cpu.compile_training(spec)


def check(c: Case, name: str, layout: str = "packed") -> None:
    spec = replace(c.spec, aux_outputs=outputs(c.spec.dtype, c.spec.normalizer is not Normalizer.NONE))
    run = kernel(spec, name)
    for shape in SHAPES:
        compare(run, spec, *draw(c, shape, layout))


def compare(run, spec: AttentionSpec, operands: list[torch.Tensor], sizes: list[int]) -> None:
    """With the reference interpreter in the spec's dtype, and in float64."""
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    out, _, *aux_outputs = run.outputs(operands, sizes)
    eager = reference.run_all(spec, operands, sizes, getattr(torch, spec.dtype))
    exact = reference.run_all(spec, wide, sizes, torch.float64)
    assert_as_exact_as_eager([out, *aux_outputs], eager, exact, check_strides=True)


emitters = pytest.mark.parametrize("name", ["mlir", "triton"])


KINDS = (
    "causal_last_key",
    "window",
    "left_padded",
    "transposed_bias",
    "half_bias",
    "bool_mask",
    "documents",
    "row_gate",
)


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("program", [p if p in KINDS else pytest.param(p, marks=pytest.mark.long) for p in PROGRAMS])
def test_programs(name: str, program: str) -> None:
    check(case(program, d=16), name)


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("normalizer", [n for n in Normalizer if n is not Normalizer.NONE])
@pytest.mark.parametrize("program", ["left_padded_inf", "padding"])
def test_rows_without_a_live_key(name: str, normalizer: Normalizer, program: str) -> None:
    check(case(program, d=16, normalizer=normalizer), name)


@emitters
def test_scores_that_are_no_numbers(name: str) -> None:
    """Maxima of rows with a NaN are NaN, others infinite where a score is."""
    c = case("plain", d=16)
    spec = replace(c.spec, aux_outputs=outputs("float32", True))
    operands, sizes = draw(c, SHAPES[0])
    operands[0][0, 0, 3, 0], operands[0][0, 0, 9, 0], operands[1][1, 0, 11, 0] = math.nan, math.inf, math.nan
    operands[0][1, :, 9, 0] = math.inf
    compare(kernel(spec, name), spec, operands, sizes)


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize("fill", [-1e5, -1e7, -1e9, -1e11, -math.inf])
def test_the_sum_of_rows_of_large_fills(name: str, fill: float) -> None:
    """It counts their keys, however the kernel's unit rounds its largest score; where that is infinite it is NaN."""
    c = case("plain", d=16)
    filled = where(apply("ilt", I, const(7)), const(fill), c.spec.score)
    sums = AuxOutput(value=ROW_SUM, dims=("b0", "b1", "i"), dtype="float32")
    spec = replace(c.spec, score=filled, aux_outputs=(sums, replace(sums, value=LOG_SUM)))
    compare(kernel(spec, name), spec, *draw(c, SHAPES[1]))


@pytest.mark.one_in(2)
@emitters
@pytest.mark.parametrize(
    "c",
    [
        case("causal", d=16, sinks=True),
        case("left_padded_inf", d=16, sinks=True, normalizer=Normalizer.SAFE_SOFTMAX),
        case("plain", d=16, off_by_one=True),
        case("causal", d=16, weight=True),
        case("bias", d=16, d_v=20, group=2),
        case("window", d=20),
        case("plain", d=144),
        case("sigmoid", d=16, normalizer=Normalizer.NONE),
    ],
    ids=["sinks", "safe sinks", "off by one", "weight", "groups", "padded columns", "panels", "no softmax"],
)
def test_variants(name: str, c: Case) -> None:
    check(c, name)


@pytest.mark.one_in(3)
@emitters
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["heads_inside", "gaps"])
def test_half_precision_and_layouts(name: str, dtype: str, layout: str) -> None:
    check(case("causal", dtype, d=16), name, layout)


@emitters
def test_a_quantised_cache(name: str) -> None:
    """K is eight bits of which the kernel makes numbers."""
    c = case("causal", d=20)
    stored = replace(c.spec.operands[1], dtype="int8")
    value = apply("fmul", apply("to_float", load(1, (BATCH, HEAD, J, C), Kind.INT)), const(0.02))
    spec = replace(c.spec, operands=(c.spec.operands[0], stored, *c.spec.operands[2:]), k_value=value)
    spec = replace(spec, aux_outputs=outputs("float32", True))
    (q, _, v), sizes = draw(c, SHAPES[0])
    operands = [q, torch.randint(-128, 128, v.shape, dtype=torch.int8), v]
    compare(kernel(spec, name), spec, operands, sizes)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_ahead_of_time(target: str) -> None:
    spec = replace(case("causal", "bfloat16", d=64).spec, aux_outputs=outputs("bfloat16", True))
    kernels = aux_kernels(spec, 64, 64)
    planned = GpuPlanner(spec, of_target(target)).backward(64, 64)
    tiles = aux_tiles(planned)
    found = compile_offline(spec, kernels, 64, 64, tiles, target)
    assert len(found) == 2 and not any(facts.spills or facts.lost for facts in found)


@emitters
def test_nothing_to_attend_to(name: str) -> None:
    c = case("plain", d=16)
    spec = replace(c.spec, aux_outputs=outputs("float32", True)[:1])
    for shape in ({"B": 2, "H": 1, "Nq": 0, "Nk": 5}, {"B": 0, "H": 1, "Nq": 3, "Nk": 5}):
        operands, sizes = draw(c, shape)
        compare(kernel(spec, name), spec, operands, sizes)
