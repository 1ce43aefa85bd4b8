"""Keys and values stored in float8, in Triton's interpreter and compiled for GPUs that are not here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.facts import compile_offline, facts_of
from fusion.codegen import triton
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import Kernel, combining_tile, split_kernels
from fusion.machine import of_target
from fusion.planning import gpu_layout
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from tests import numerics
from tests.codegen.mlir.cases import (
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
)
from tests.float8 import FORMATS, drawn, every_number, is_same, narrow, stored

SMALL = Tile(rows=16, keys=32, warps=4, stages=1)
ROTATED = dataclasses.replace(SMALL, rotated=True)
DESCRIBED = dataclasses.replace(ROTATED, described=True)


@pytest.fixture(autouse=True)
def compiled_format(request: pytest.FixtureRequest) -> None:
    """float8_e4m3fn, which the tests use that have no other as a parameter, is compiled from sm_89 on."""
    of_test = getattr(request.node, "callspec", None)
    narrow = (of_test.params if of_test else {}).get("format_", torch.float8_e4m3fn)
    if request.config.getoption("--ptx") == "sm_80" and narrow is torch.float8_e4m3fn:
        pytest.skip("Triton compiles no float8_e4m3fn for sm_80")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_every_number_is_widened_exactly(format_: torch.dtype, dtype: str) -> None:
    """A query with a single key has its value for a result: subnormal numbers, infinities and NaN included. (To the
    last bit where the score is 0; the weight may be off by rounding else.)"""
    c = narrow(case("plain", dtype, 16), format_)
    (q, k, _), sizes = drawn(c, {"B": 1, "H": 16, "Nq": 1, "Nk": 1})
    v = every_number(format_).view(1, 16, 1, 16)
    for kernel in (Kernel(c.spec, SMALL), Kernel(c.spec, DESCRIBED)):
        is_same(kernel([q * 0, k, v], sizes).flatten(), v.flatten().to(getattr(torch, dtype)))
    (variant,) = kernel._variants.values()
    assert "v_tiles.load(" in variant.source


@pytest.mark.parametrize(
    ("name", "layout", "format_", "which"),
    [
        ("causal", "heads_inside", FORMATS[0], "k v"),
        ("left_padded", "gaps", FORMATS[1], "q k"),
        ("bias", "columns", FORMATS[0], "bias"),
    ],
)
def test_as_exact_as_eager(name: str, layout: str, format_: torch.dtype, which: str) -> None:
    c = narrow(case(name, "bfloat16", 32, 16, group=2, order=("b0", "i", "b1", "e")), format_, which)
    for tile, splits, queries in ((SMALL, None, 20), (DESCRIBED, None, 20), (SMALL, 2, 1)):
        operands, sizes = drawn(c, {"B": 1, "H": 1, "Nq": queries, "Nk": 75}, layout)
        got = Kernel(c.spec, tile, splits=splits)(operands, sizes)
        assert_as_exact_as_eager(got, c, operands)


def test_values_that_are_columns_of_the_keys() -> None:
    """A latent cache in float8 is read, and widened, once."""
    c = narrow(case("plain", "bfloat16", 48, 32), FORMATS[0])
    operands, sizes = drawn(c, {"B": 1, "H": 2, "Nq": 3, "Nk": 40})
    operands[2] = operands[1][..., :32]
    kernel = Kernel(c.spec, SMALL)
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    (variant,) = kernel._variants.values()
    assert "v = k\n" in variant.source and "v_ptr" not in variant.source


@pytest.mark.parametrize("tile", [SMALL, dataclasses.replace(SMALL, described=True)], ids=str)
def test_gradients_beside_a_cache(tile: Tile) -> None:
    """Those of q and of a bias, where k and v are frozen."""
    c = narrow(case("bias", "float32", 32, group=2), FORMATS[0])
    operands, sizes = drawn(c, {"B": 1, "H": 1, "Nq": 20, "Nk": 40})
    needs = (True, False, False, True)
    run = Differentiable(c.spec, tile)
    assert run.without_kernels(needs) is None
    out, statistics = run.outputs(operands, sizes)
    got = run.backward(out, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(got, c, operands, out, needs)


def decode(q, k, v, k_scale, v_scale):
    k = (k[:, :, :45].to(q.dtype) * k_scale).repeat_interleave(4, 1)
    v = (v[:, :, :45].to(q.dtype) * v_scale).repeat_interleave(4, 1)
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


def test_a_cache_and_its_scales_through_the_backend() -> None:
    q = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 50, 64).to(format_) for format_ in FORMATS)
    scales = [torch.rand(1, 2, 1, 1, dtype=torch.bfloat16) for _ in range(2)]
    torch._dynamo.reset()
    with torch.no_grad(), fusion.collect_reports() as reports:
        got = torch.compile(decode, backend="fusion", options={"inner": "eager", "strict": True})(q, k, v, *scales)
    (site,) = (site for report in reports for site in report.sites)
    assert [o.dtype for o in site.spec.operands[1:3]] == ["float8_e4m3fn", "float8_e5m2"]
    assert ".to(tl.float16).to(tl.bfloat16)" in site.source
    exact, eager = decode(*(x.double() for x in (q, k, v, *scales))), decode(q, k, v, *scales)
    numerics.assert_as_exact_as_eager(got, eager, exact)


@pytest.mark.parametrize("target", ["gfx942", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_which_machines_read_which_formats(target: str) -> None:
    machine = of_target(target)
    assert triton.reads(torch.float8_e4m3fn, machine) is (target not in ("sm_75", "sm_80", "sm_86"))
    assert triton.reads(torch.float8_e5m2, machine)
    assert not triton.reads(torch.float8_e8m0fnu, machine)


# --- compiled ahead of time -------------------------------------------------------------------------------------------


def test_decoding_on_hopper() -> None:
    """Tiles of the cache wait in shared memory as they are stored: three of them, 32 KiB each in bfloat16."""
    spec = gpu_layout.packed(stored(case("causal", "bfloat16", 128, group=8).spec, FORMATS[0]), 8)
    tile = GpuPlanner(spec, of_target("sm_90")).tile_for(8, 16384, 128, 128)
    kernels = split_kernels(spec, 128, 128, False, Order(packed=8))
    part, combine = compile_offline(
        spec, kernels, 128, 128, {"attention_split": tile, "attention_combine": combining_tile(tile)}, "sm_90"
    )
    assert part.matrix["mma"] > 0 and not (part.spills or part.warnings or part.lost), part
    assert part.shared < 40 << 10 and not (combine.lost or combine.spills)


@pytest.mark.parametrize(
    ("target", "format_"),
    [
        ("sm_90", FORMATS[0]),
        pytest.param("sm_80", FORMATS[1], marks=pytest.mark.long),  # which has no conversion from e4m3fn
        *(pytest.param(t, f, marks=pytest.mark.long) for t in ("sm_100", "gfx942") for f in FORMATS),
    ],
)
def test_forward(target: str, format_: torch.dtype) -> None:
    (fact,) = facts_of(stored(case("causal", "bfloat16", 64).spec, format_), target)
    assert fact.fits and not (fact.warnings or fact.lost) and any(fact.matrix.values()), fact
    assert target != "sm_90" or not fact.spills, fact
