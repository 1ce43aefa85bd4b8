"""A sample of kernels as 64-bit Arm runs them, and what they consist of. Skipped where the tools are missing: see
`aarch64`."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.mlir.kernel import emit
from fusion.codegen.mlir.launch import Kernel
from fusion.codegen.mlir.strategy import tilings_for
from fusion.codegen.mlir.training import TrainingKernel
from tests.codegen.mlir import aarch64
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_trains_as_exact_as_eager, case, draw

pytestmark = pytest.mark.skipif(aarch64.missing() is not None, reason=str(aarch64.missing()))
SIZES = {"B": 1, "H": 2, "Nq": 70, "Nk": 150}


@pytest.mark.parametrize("n_q", [70, 2])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", "float32"), ("bool_mask", "float32"), ("soft_cap", "float16"), ("bias", "bfloat16"),
     ("bucket_table", "float32")],
)  # fmt: skip
def test_forward(name: str, dtype: str, n_q: int) -> None:
    c = case(name, dtype, 40, 24, group=2)
    with aarch64.running():
        kernel = Kernel(c.spec, tilings_for(c.spec, aarch64.NEON), aarch64.NEON)
        operands, sizes = draw(c, SIZES | {"Nq": n_q}, "heads_inside")
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients(dtype: str) -> None:
    c = case("bias", dtype, 40, 24)
    with aarch64.running():
        kernel = TrainingKernel(c.spec, tilings_for(c.spec, aarch64.NEON), aarch64.NEON)
        assert_trains_as_exact_as_eager(kernel, c, SIZES)


def loops(text: str) -> list[list[str]]:
    """Instructions of the innermost loops of an assembly text."""
    label, block, found = "", [], []
    for line in text.splitlines():
        if match := re.match(r"(\.\w+):", line):
            label, block = match[1], []
        elif re.match(r"\t[a-z]", line):
            block.append(line.split()[0])
            if re.match(rf"\tb\.\w+\s+{re.escape(label)}$", line):
                found.append([*block])
    return found


def test_products_are_mostly_multiply_adds() -> None:
    """Nothing is spilled in the two products' loops, and most instructions compute: 16 of 28, and 64 of 93 (with the
    register tile of 4 x 2 these were 8 of 18, and 32 of 52)."""
    c = case("plain", "float32", 64, 64)
    source = emit(c.spec, tilings_for(c.spec, aarch64.NEON)[0], aarch64.NEON, 64, 64).source
    text = aarch64.compiled(source, "asm").decode()
    products = [loop for loop in loops(text) if loop.count("fmla") >= aarch64.NEON.tile_rows * aarch64.NEON.tile_groups]
    assert len(products) == 2
    for loop in products:
        assert 2 * loop.count("fmla") > len(loop)
        assert not {"str", "stp", "stur"} & set(loop)
