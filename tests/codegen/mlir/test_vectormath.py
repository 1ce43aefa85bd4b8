"""The elementary functions against torch in float64: relative error, infinities and NaN."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.machine_code import compile_text
from fusion.codegen.mlir.builder import PTR, Builder, Value, vector_of
from fusion.codegen.mlir.vectormath import VectorMath, sum_rows, transpose
from fusion.codegen.mlir.x86 import Avx512
from fusion.lowering.elementary import BIAS, MANTISSA, exp2_polynomial
from tests.codegen.mlir.cases import HERE
from tests.numerics import assert_as_exact_as_eager, assert_within

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 88.7, 88.8, -87.0, -103.9, 1e-40, 3e38, -3e38, 1e9]
LANES = [16, 8, 0]


def apply(write: Callable[[Builder, Value], Value], x: torch.Tensor, lanes: int) -> torch.Tensor:
    """Run what `write` makes of each vector of x (scalars for 0 lanes)."""
    b = Builder()
    source, target, count = Value("%a", PTR), Value("%b", PTR), Value("%n", "i64")
    with b.loop(0, count, max(lanes, 1)) as i:
        b.store(write(b, b.load(b.at(source, i, "f32"), vector_of("f32", lanes))), b.at(target, i, "f32"))
    header = f"func.func @f(%a: {PTR}, %b: {PTR}, %n: i64)"
    code = compile_text(f"module {{\n{header} {{\n{b.text()}\n  return\n}}\n}}\n", "f")
    y = torch.empty_like(x)
    values = [ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel())]
    packed = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(ctypes.addressof(packed))
    return y


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["exp", "exp2", "tanh", "sigmoid", "log", "log1p"])
def test_accuracy(name: str, lanes: int) -> None:
    parts = [torch.randn(4096) * 10.0**e for e in (-6, -3, -1, 0, 1, 1.5)]
    x = torch.cat([*parts, torch.tensor(SPECIAL), torch.zeros(1)])
    y = apply(lambda b, v: getattr(VectorMath(b, HERE.avx512 and lanes == 16), name)(v), x, lanes)
    want, eager = getattr(torch, name)(x.double()), getattr(torch, name)(x)
    assert torch.equal(y.isnan(), eager.isnan())
    assert torch.equal(y.isinf(), eager.isinf())
    normal = torch.isfinite(eager) & (want.abs() > torch.finfo(torch.float32).tiny)
    ours, theirs = (found[normal] / want[normal] for found in (y.double(), eager.double()))
    assert_as_exact_as_eager(ours, theirs, torch.ones_like(ours), torch.float32)  # relative errors


@pytest.mark.parametrize("degree", [3, 5])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("name", "least"), [("tanh", -1.0), ("sigmoid", 0.0)])
def test_values_stay_in_the_range_of_the_function(name: str, least: float, lanes: int, degree: int) -> None:
    """Programs go on from it: `asin(tanh(s))` takes a root of what is left to 1."""
    x = torch.linspace(-20, 20, 1 << 16)
    y = apply(lambda b, v: getattr(VectorMath(b, HERE.avx512 and lanes == 16, degree), name)(v), x, lanes)
    assert least <= y.min() and y.max() <= 1.0


@pytest.mark.parametrize("ordinary", [True, False])
def test_powers_as_pairs_of_bfloat16(ordinary: bool) -> None:
    """x is rounded to 2**-8 and 2**x to bfloat16, half a step each."""
    if not HERE.amx:
        pytest.skip("needs AVX-512 with vpermi2b, as processors with AMX have")
    x = torch.cat([torch.linspace(-48, 48, 16 * 4000), torch.arange(-48.0, 48.0)])
    if not ordinary:
        x = torch.cat([x, torch.tensor([-math.inf, -1e30, -1e9, -500.0, -128.0, -127.0, -126.0, 100.0] * 2)])

    def write(b: Builder, v: Value) -> Value:
        return b.bitcast(Avx512(b).power_pairs(v, v, ordinary), v.type)

    found = apply(write, (x + BIAS) * MANTISSA, 16).view(torch.bfloat16).view(-1, 2)
    assert torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(found[x == x.round()][:96, 0].float(), torch.exp2(x[x == x.round()][:96]))
    normal = x >= -126
    relative = (found[normal, 0].double() / torch.exp2(x[normal].double()) - 1).abs()
    assert_within(relative, 2.0 ** (2.0**-8) * (1 + 2.0**-8) - 1)
    assert_within(relative.square().mean().sqrt(), 2.0**-8 * math.hypot(math.log(2), 1) / math.sqrt(3))
    assert (found[x < -126].float() < 2.0**-126).all() and (found[x <= -127] == 0).all()


@pytest.mark.parametrize("lanes", LANES)
def test_the_logarithm_of_ordinary_numbers_is_the_same(lanes: int) -> None:
    x = torch.cat([torch.rand(4096) * 10.0**e for e in (-37, -9, 0, 10, 37)])
    x = torch.cat([x[x >= 2.0**-126], torch.tensor([2.0**-126, 1.0, 2.0**127, math.nan])])
    x = x[: len(x) // max(lanes, 1) * max(lanes, 1)]
    short, whole = (
        apply(lambda b, v, o=o: VectorMath(b, HERE.avx512 and lanes == 16).log(v, ordinary=o), x, lanes)
        for o in (True, False)
    )
    assert torch.equal(short.isnan(), whole.isnan())
    assert torch.equal(short.nan_to_num(), whole.nan_to_num())


@pytest.mark.parametrize("degree", [3, 4])
def test_cheaper_exponentials(degree: int) -> None:
    x = torch.linspace(-100, 100, 16 * 1000)
    y = apply(lambda b, v: VectorMath(b, HERE.avx512, degree).exp2(v), x, 16)
    f = np.linspace(0, 1, 4001)
    own = np.abs(np.polyval(exp2_polynomial(degree)[::-1], f) / 2**f - 1).max()
    best = math.sqrt(2) * (math.log(2) / 2) ** (degree + 1) / (2**degree * math.factorial(degree + 1))  # Chebyshev's
    assert_within(own, 1.25 * best)
    roundings = 2.0**-21
    assert_within((y.double() / torch.exp2(x.double()) - 1).abs(), own + roundings)


@pytest.mark.parametrize("degree", [3, 4, 5, 6])
def test_the_largest_weight_is_exact(degree: int) -> None:
    """2**x is 1 at 0 and just below it, where rounding puts the difference of a score and its row's maximum."""
    below = -torch.logspace(-25, -149, 125, base=2)
    x = torch.cat([torch.arange(-60.0, 60.0), below, torch.zeros(11)])
    y = apply(lambda b, v: VectorMath(b, HERE.avx512, degree).exp2(v), x, 16)
    assert torch.equal(y, torch.exp2(x.round()))


@pytest.mark.parametrize("lanes", [16, 8, 4])
@pytest.mark.parametrize("denormals", [True, False])
def test_denormal_powers(lanes: int, denormals: bool) -> None:
    x = torch.cat([torch.linspace(-152, -126, 16 * 100), torch.tensor([-math.inf, math.nan, -1e30, 0.0] * 4)])
    y = apply(lambda b, v: VectorMath(b, HERE.avx512 and lanes == 16, denormals=denormals).exp2(v), x, lanes)
    exact = torch.exp2(x.double())
    if denormals:
        assert (y > 0).sum() > 1400
        assert torch.equal(y.isnan(), exact.isnan())
        assert_within((y - exact).abs().nan_to_num(), 0.51 * 2.0**-149 + 2.0**-21 * exact.nan_to_num())
    else:
        assert (y[x < -126] == 0).all()


@pytest.mark.parametrize("lanes", [16, 8, 4])
def test_transpose_and_sum(lanes: int) -> None:
    """Both networks on a square block, written with rows made by rotating one vector."""
    x = torch.arange(float(lanes))

    def rows(b: Builder, v: Value) -> list[Value]:
        turned = [b.shuffle(v, v, [(r + c) % lanes for c in range(lanes)]) for r in range(lanes)]
        return [b.as_value(b.mul(row, float(10 ** (r % 3))), v.type) for r, row in enumerate(turned)]

    block = torch.stack([x.roll(-r) * 10.0 ** (r % 3) for r in range(lanes)])
    assert torch.equal(apply(lambda b, v: transpose(b, rows(b, v))[1], x, lanes), block[:, 1])
    assert torch.equal(apply(lambda b, v: sum_rows(b, rows(b, v)), x, lanes), block.sum(1))


@pytest.mark.parametrize("lanes", [16, 8, 4, 0])
def test_rounding_to_bfloat16(lanes: int) -> None:
    """Without the processor's help: bits as torch's, and NaN stays NaN."""
    halves = torch.tensor([1.0, 1.5, -1.0, 3.0]) * (1 + 2.0**-8)  # between two neighbours: the even one
    x = torch.cat([torch.randn(1000), halves, halves * (1 + 2.0**-20), torch.tensor(SPECIAL), torch.zeros(9)])
    payload = torch.tensor([0x7F800001, -0x007FFFFF], dtype=torch.int32).view(torch.float32)  # NaN in the low bits only
    x = torch.cat([x, payload, torch.zeros(-(x.numel() + 2) % 16)])
    y = apply(lambda b, v: b.convert("arith.extf", VectorMath(b, False).narrow(v, "bf16"), "f32"), x, lanes)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.nan_to_num(), x.bfloat16().float().nan_to_num())
