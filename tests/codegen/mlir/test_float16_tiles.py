"""AMX's products of float16, emulated: which attentions take them, and that nothing is lost to the range of float16."""

from __future__ import annotations

import math
import platform
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import machine_code
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.backward.kernel import BackwardKernel
from fusion.codegen.mlir.backward.lanes import FUSED
from fusion.codegen.mlir.backward.tile import Problem
from fusion.codegen.mlir.kernel import emit
from fusion.ir import AttentionSpec, Normalizer
from fusion.ir.expr import ROW_MAX
from fusion.ir.spec import AuxOutput
from fusion.lowering.backward_plan import backward_plan
from fusion.machine import cpu
from fusion.planning.register_tiles import backward_tiling, planes_of, tilings_for
from tests import emulation, numerics
from tests.codegen.mlir.cases import (
    Case,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
    eager,
    eager_gradients,
)
from tests.fuzz import quick

TARGET = emulation.AMX_FP16
SIZES = {"B": 1, "H": 2, "Nq": 70, "Nk": 150}
FEATURES = ",".join(
    f"+{feature}" for feature in (
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512fp16", "amx-tile",
        "amx-bf16", "amx-fp16",
    )
)  # fmt: skip
OF_FLOAT16, OF_BFLOAT16 = "x86.tdpfp16ps", "x86.tdpbf16ps"


def planned(c: Case, *, cuts: bool = False) -> quick.Plan:
    tiling = tilings_for(c.spec, TARGET)[0]
    assert tiling.planes == 1
    tiling = replace(tiling, keys=64) if cuts else tiling
    return quick.Plan(target=TARGET, tiling=tiling, schedule="flash", span=512, optimised=False, cuts=cuts)


def forward(c: Case, operands: list[torch.Tensor], sizes: list[int], chosen: quick.Plan | None = None) -> torch.Tensor:
    with quick.compiling_for(chosen := chosen or planned(c)):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        return run(operands, sizes)


def float16_of(name: str, **fields) -> AttentionSpec:
    return case(name, "float16", 40, 24, **fields).spec


def test_products_are_of_float16_but_for_those_of_ds() -> None:
    spec = float16_of("causal")
    tiling = tilings_for(spec, TARGET)[0]
    text = emit(spec, tiling, TARGET, 40, 24).source
    assert OF_FLOAT16 in text and OF_BFLOAT16 not in text
    problem = Problem(
        spec=spec, plan=backward_plan(spec), tiling=backward_tiling(tiling, TARGET), target=TARGET, d=40, d_v=24
    )
    text = BackwardKernel(FUSED, problem, (True,) * 3).text().source
    assert OF_FLOAT16 in text and OF_BFLOAT16 in text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM's instructions for x86")
def test_the_compiler_has_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """In machine code, by its encoding: as many as in the text, or more where loops are unrolled."""
    monkeypatch.setattr(cpu, "left_out", lambda: FEATURES)
    spec = case("plain", "float16", 32, 16).spec
    source = emit(spec, tilings_for(spec, TARGET)[0], TARGET, 32, 16).source
    code = machine_code._object(machine_code._engine(source))
    found = [match[0] for match in re.findall(rb"\xc4\xe2([\x00-\x7f])\x5c", code)]
    assert sum(byte & 0x87 == 3 for byte in found) >= source.count(OF_FLOAT16) > 0
    assert not sum(byte & 0x87 == 2 for byte in found)


def test_which_attentions_are_multiplied_in_float16() -> None:
    """Weights or operands that float16 may not hold go as they do without these products."""
    spec = float16_of("plain")
    log_sum = AuxOutput(value=ROW_MAX, dims=("b0", "b1", "i"), dtype="float32")
    wider = [replace(spec.operands[0], dtype=dtype) for dtype in ("bfloat16", "float32")]
    others = [
        float16_of("plain", weight=True), float16_of("plain", off_by_one=True),
        float16_of("plain", normalizer=Normalizer.NONE), float16_of("plain", out_dtype="float32"),
        replace(spec, aux_outputs=(log_sum,)), *(replace(spec, operands=(q, *spec.operands[1:])) for q in wider),
        case("plain", "float32").spec,
    ]  # fmt: skip
    float8 = [replace(o, dtype="float8_e5m2") for o in spec.operands[1:]]
    assert planes_of(spec, TARGET) == planes_of(replace(spec, operands=(spec.operands[0], *float8)), TARGET) == 1
    for other in others:
        assert planes_of(other, TARGET) == planes_of(other, emulation.AMX) != 1
    assert planes_of(spec, TARGET.reproducible) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "fields"),
    [("plain", {}), ("causal", {"group": 2}), ("soft_cap", {}), ("left_padded", {}), ("left_padded_inf", {}),
     ("bucket_table", {}), ("half_bias", {}), ("window", {"sinks": True}),
     ("left_padded_inf", {"normalizer": Normalizer.SAFE_SOFTMAX}),
     ("left_padded_inf", {"normalizer": Normalizer.ZERO_SOFTMAX})],
)  # fmt: skip
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "in parts"])
def test_forward(name: str, fields: dict, cuts: bool) -> None:
    c = case(name, "float16", 40, 24, **fields)
    operands, sizes = draw(c, SIZES | {"Nk": 334 if cuts else 150}, "heads_inside")
    assert_as_exact_as_eager(forward(c, operands, sizes, planned(c, cuts=cuts)), c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "fields"),
    [("plain", {}), ("causal", {"group": 2}), ("left_padded", {}), ("left_padded_inf", {}), ("half_bias", {}),
     ("soft_cap", {}), ("window", {"sinks": True})],
)  # fmt: skip
@pytest.mark.parametrize("fused", [True, False], ids=["one kernel", "two kernels"])
def test_gradients(name: str, fields: dict, fused: bool) -> None:
    c = case(name, "float16", 40, 24, **fields)
    with quick.compiling_for(chosen := planned(c)):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        run.fused = fused
        operands, sizes = draw(c, SIZES)
        out, statistics = run.outputs(operands, sizes)
        assert_as_exact_as_eager(out, c, operands)
        grad, needs = torch.randn_like(out), tuple(x.is_floating_point() for x in operands)
        found = run.backward(grad, out, statistics, operands, sizes, needs)
        assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)


@pytest.mark.parametrize(
    ("q", "k", "v"), [(2.0**-18, 2.0**14, 1), (1, 1, 2.0**-20), (1, 1, 2.0**13), (2.0**10, 2.0**5, 1)]
)
def test_the_ends_of_float16(q: float, k: float, v: float) -> None:
    """Denormal operands count, as for the processor (Intel's manual, TDPFP16PS), and so do scores beyond 65504. Eager
    mode, whose scores have the range of float16, is taken in float32."""
    c = case("plain", "float16", 40, 24)
    operands, sizes = draw(c, SIZES)
    operands = [(x * factor).clamp(-65504, 65504) for x, factor in zip(operands, (q, k, v), strict=True)]
    theirs, exact = eager(c, operands, torch.float32).half(), eager(c, operands, torch.float64)
    numerics.assert_as_exact_as_eager(forward(c, operands, sizes), theirs, exact, torch.float16)


@pytest.mark.parametrize("above", [8.0, 14.0])
def test_small_weights_beside_a_sink_of_no_value(above: float) -> None:
    """A key that takes nearly all weight and has no value: all that comes out is of weights that are far below 1, which
    are as exact as in float32."""
    c = case("plain", "float16", 16, 16)
    operands, sizes = draw(c, SIZES | {"Nk": 600})
    q, k, v = operands
    q[..., 0], k[..., 0], k[:, :, 300], v[:, :, 300] = 4.0, 0.0, 0.0, 0.0
    k[:, :, 300, 0] = above
    theirs, exact = eager(c, operands, torch.float32).half(), eager(c, operands, torch.float64)
    numerics.assert_as_exact_as_eager(forward(c, operands, sizes), theirs, exact, torch.float16)


@pytest.mark.parametrize("keys", [64, 3000])
def test_small_gradients(keys: int) -> None:
    """dS is below what float16 holds, and dQ is not: eager mode in float16 loses it, and one in float32 does not."""
    c = case("plain", "float16", 40, 24)
    with quick.compiling_for(chosen := planned(c)):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        operands, sizes = draw(c, SIZES | {"Nk": keys})
        operands[1] *= 8
        out, statistics = run.outputs(operands, sizes)
        grad, needs = torch.randn_like(out) * 2.0**-12, (True,) * 3
        found = run.backward(grad, out, statistics, operands, sizes, needs)
    theirs = [x.half() for x in eager_gradients(c, operands, grad, needs, torch.float32)]
    exact = eager_gradients(c, operands, grad, needs, torch.float64)
    numerics.assert_as_exact_as_eager(list(found), theirs, exact, torch.float16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("trained", [False, True])
def test_special_values(where: int, value: float, trained: bool) -> None:
    c = case("causal", "float16", 40, 24)
    with quick.compiling_for(chosen := planned(c)):
        run = quick.kernel(c.spec, chosen, trained=trained)
        operands, sizes = draw(c, SIZES)
        operands[where][0, 1, 3, 5] = value
        if isinstance(run, TrainingKernel):
            out, statistics = run.outputs(operands, sizes)
            grad = torch.randn_like(out)
            found = run.backward(grad, out, statistics, operands, sizes, (True,) * 3)
            assert_gradients_as_exact_as_eager(found, c, operands, grad, (True,) * 3)
        else:
            assert isinstance(run, Kernel)
            assert_as_exact_as_eager(run(operands, sizes), c, operands)


def test_the_weights_of_many_equal_keys() -> None:
    """Each is far below float16's smallest normal number, and halfway between two of its denormal ones."""
    c, keys = case("plain", "float16", 8, 8), round(2**24 / 64.5)
    with quick.compiling_for(chosen := planned(c)):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 32, "Nk": keys})
        operands[0].zero_()
        out, statistics = run.outputs(operands, sizes)
        grad, needs = torch.full_like(out, 1000.0), (False, False, True)
        *_, found = run.backward(grad, out, statistics, operands, sizes, needs)
    (theirs,) = eager_gradients(c, operands, grad, needs, torch.float32)
    (exact,) = eager_gradients(c, operands, grad, needs, torch.float64)
    numerics.assert_as_exact_as_eager(found, theirs.half(), exact, torch.float16)
