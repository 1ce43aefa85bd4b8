"""GPU kernels as Triton compiles them, executed as PTX: within the house rule, and without a fault of memory."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton import launch, module
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from fusion.runtime.guards import failures_raised
from tests import numerics
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_gradients_as_exact_as_eager, case, draw
from tests.emitters import interpreted
from tests.ptx import matrices
from tests.ptx.emulated import emulated

TILE = Tile(rows=16, keys=16, warps=4, stages=1)
HALF = Tile(rows=64, keys=32, warps=4, stages=2)
SIZES = {"B": 1, "H": 1, "Nq": 16, "Nk": 1024}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("splits", [1, 2])
def test_sharp_rows_in_float32(target: str, splits: int) -> None:
    """A factor of what was summed before that is not 1 where the maximum stays would move the sums at each tile."""
    c = case("plain", "float32", 16)
    operands, sizes = draw(c, SIZES)
    operands[0].mul_(40)
    operands[1][..., 0, :] = operands[0][..., 0, :] / operands[0][..., 0, :].norm() * 9
    with emulated(target) as emulation:
        out = Kernel(c.spec, TILE, splits=splits)(operands, sizes)
    assert emulation.names == (["attention_forward"] if splits == 1 else ["attention_split", "attention_combine"])
    assert_as_exact_as_eager(out, c, operands)


def test_sums_over_many_keys_in_float32() -> None:
    """The first key has about half of each row's weight: terms added to that one by one would all be rounded to its
    last place."""
    c = case("plain", "float32", 16)
    operands, sizes = draw(c, SIZES | {"Nk": 4096})
    operands[1][..., 0, :] = operands[0][..., 0, :] / operands[0][..., 0, :].norm() * 9
    operands[2].add_(1)
    with emulated("sm_80"):
        out = Kernel(c.spec, TILE, splits=1)(operands, sizes)
    assert_as_exact_as_eager(out, c, operands)


def test_gradients_summed_over_many_queries_in_float32() -> None:
    """Those of V, of which all terms have much in common."""
    c, needs = case("plain", "float32", 16), (True, True, True)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 2048, "Nk": 16})
    run = Differentiable(c.spec, TILE)
    with emulated("sm_80"):
        out, statistics = run.outputs(operands, sizes)
        grad = torch.randn(out.shape) + 1
        gradients = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(gradients, c, operands, grad, needs)


@pytest.mark.parametrize("splits", [1, 2])
def test_contraction_would_show(splits: int) -> None:
    """Products that Triton contracts with sums, of which `module.EXACT` asks for none."""
    with mock.patch.dict(module.EXACT, enable_fp_fusion=True), pytest.raises(AssertionError, match="exceeds"):
        test_sharp_rows_in_float32("sm_80", splits)


def truncated(sums: np.ndarray) -> np.ndarray:
    """float32 of exact sums, towards zero, as devices' matrix units round."""
    nearest = sums.astype(np.float32)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(sums), np.nextafter(nearest, np.float32(0)), nearest)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
def test_products_of_parts_of_float32_are_outside_of_the_rule(precision: str) -> None:
    """Split products are as exact as float32's, but for numbers with an infinite upper or a denormal lower part."""
    c = case("plain", "float32", 64)
    (q, k, v), sizes = draw(c, {"B": 1, "H": 1, "Nq": 64, "Nk": 64})
    run = Kernel(c.spec, HALF, splits=1)
    with (
        mock.patch.object(launch, "precision", lambda dtype: precision),
        mock.patch.object(matrices, "rounded", truncated),
        emulated("sm_80") as emulation,
    ):
        assert_as_exact_as_eager(run([q, k, v], sizes), c, [q, k, v])
        assert "mma.sync" in emulation.kernels[0].asm["ptx"]
        infinite = v.index_fill(-2, torch.tensor([5]), torch.inf)
        assert_as_exact_as_eager(run([q, k, infinite], sizes), c, [q, k, infinite])
        small = [1e36 * q, 1e-36 * k, v]
        with pytest.raises(AssertionError, match="exceeds"):
            assert_as_exact_as_eager(run(small, sizes), c, small)
        large = [q, k, (0 * v).index_fill(-2, torch.tensor([5]), 3.4028e38)]
        with pytest.raises(AssertionError, match="NaN|inf"):
            assert_as_exact_as_eager(run(large, sizes), c, large)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_causal_in_bfloat16(target: str) -> None:
    c = case("causal", "bfloat16", 64)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 100, "Nk": 100})
    with emulated(target) as emulation:
        # Of 64 rows sm_100 makes products in tensor memory, which are not executed.
        out = Kernel(c.spec, TILE if target == "sm_100" else HALF)(operands, sizes)
    assert emulation.names == ["attention_forward"]
    assert ("wgmma" if target == "sm_90" else "mma.sync") in emulation.kernels[0].asm["ptx"]
    assert_as_exact_as_eager(out, c, operands)


@pytest.mark.parametrize("order", ["rotated", "spread"])
def test_other_orders_in_float32(order: str) -> None:
    """Heads of 48 columns, which two panels hold. A name that a condition defines exists only inside of it for Triton's
    compiler; its interpreter knows it afterwards, too."""
    c = case("causal", "float32", 48)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 40, "Nk": 40})
    with emulated("sm_80"):
        out = Kernel(c.spec, dataclasses.replace(TILE, **{order: True}))(operands, sizes)
    assert_as_exact_as_eager(out, c, operands)


@pytest.mark.parametrize(
    ("target", "dtype", "size"), [("sm_80", "bfloat16", 1), ("sm_90", "float32", 40), ("sm_100", "float32", 40)]
)
def test_gradients(target: str, dtype: str, size: int) -> None:
    c, n = case("causal", dtype, 32), 70 if dtype == "bfloat16" else 40
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": n, "Nk": n})
    operands[0].mul_(size)
    run, needs = Differentiable(c.spec, HALF if dtype == "bfloat16" else TILE), (True,) * len(operands)
    with emulated(target) as emulation:
        out, statistics = run.outputs(operands, sizes)
        grad = torch.randn(out.shape).to(out.dtype)
        gradients = run.backward(grad, out, statistics, operands, sizes, needs)
    assert {"attention_forward", "attention_backward_prepare"} < set(emulation.names)
    assert_gradients_as_exact_as_eager(gradients, c, operands, grad, needs)


WIDTHS = [(16, 16), (17, 33), (72, 72), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256), (512, 512),
          (576, 512)]  # fmt: skip


@pytest.mark.one_in(8)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("d", "d_v"), WIDTHS)
def test_widths(d: int, d_v: int, target: str) -> None:
    """In the tiles that are planned for a device, of heads that share keys, with gradients."""
    c, needs = case("window", "bfloat16", d, d_v, group=2), (True, True, True)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 70, "Nk": 70})
    run = Differentiable(c.spec)
    with emulated(target) as emulation:
        inferred = Kernel(c.spec)(operands, sizes)
        out, statistics = run.outputs(operands, sizes)
        grad = torch.randn(out.shape).to(out.dtype)
        gradients = run.backward(grad, out, statistics, operands, sizes, needs)
    assert "attention_backward_prepare" in emulation.names
    for each in (inferred, out):
        assert_as_exact_as_eager(each, c, operands)
    assert_gradients_as_exact_as_eager(gradients, c, operands, grad, needs)


def test_packed_sequences_with_a_map_of_tiles() -> None:
    """Through torch.compile: a kernel lists the tiles, and another visits them."""
    lengths = torch.tensor([40, 56, 32]).repeat_interleave(torch.tensor([40, 56, 32]))[None]
    i, j = torch.arange(128)[:, None], torch.arange(128)

    def attention(q, k, v, documents):
        live = (documents[:, None, :, None] == documents[:, None, None, :]) & (j <= i)
        return (q @ k.mT / 4).masked_fill(~live, -torch.inf).softmax(-1) @ v

    q, k, v = (torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    options = {"inner": "eager", "strict": True, "tile_maps": "always"}
    with interpreted(), failures_raised(), emulated("sm_80") as emulation:
        out = torch.compile(attention, backend="fusion", dynamic=False, options=options)(q, k, v, lengths)
    assert emulation.names == ["attention_tiles", "attention_forward"]
    eager, exact = attention(q, k, v, lengths), attention(q.double(), k.double(), v.double(), lengths)
    numerics.assert_as_exact_as_eager(out, eager, exact)


def test_one_query_over_a_cache() -> None:
    c = case("plain", "float16", 64, group=4)
    operands, sizes = draw(c, {"B": 1, "H": 4, "Nq": 1, "Nk": 200})
    with emulated("sm_89") as emulation:
        out = Kernel(c.spec, Tile(rows=16, keys=32, warps=4, stages=2), splits=3)(operands, sizes)
    assert emulation.names == ["attention_split", "attention_combine"]
    assert_as_exact_as_eager(out, c, operands)
