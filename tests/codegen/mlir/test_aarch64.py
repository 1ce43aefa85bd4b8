"""A sample of kernels as 64-bit Arm runs them, and what they consist of. Skipped where the tools are missing: see
`aarch64`."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.kernel import emit
from fusion.planning.register_tiles import Target, tilings_for
from tests import emulation
from tests.codegen.mlir import aarch64
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_trains_as_exact_as_eager, case, draw

pytestmark = pytest.mark.skipif(aarch64.missing() is not None, reason=str(aarch64.missing()))
TARGETS = aarch64.NEON, aarch64.PAIRS
SIZES = {"B": 1, "H": 2, "Nq": 70, "Nk": 150}


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("n_q", [70, 2])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", "float32"), ("bool_mask", "float32"), ("soft_cap", "float16"), ("bias", "bfloat16"),
     ("bucket_table", "float32")],
)  # fmt: skip
def test_forward(name: str, dtype: str, n_q: int, target: Target) -> None:
    c = case(name, dtype, 40, 24, group=2)
    with aarch64.running():
        kernel = Kernel(c.spec, tilings_for(c.spec, target), target)
        operands, sizes = draw(c, SIZES | {"Nq": n_q}, "heads_inside")
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients(dtype: str, target: Target) -> None:
    c = case("bias", dtype, 40, 24)
    with aarch64.running():
        kernel = TrainingKernel(c.spec, tilings_for(c.spec, target), target)
        assert_trains_as_exact_as_eager(kernel, c, SIZES)


def loops(text: str) -> list[list[str]]:
    """Instructions of the innermost loops of an assembly text."""
    label, block, found = "", [], []
    for line in text.splitlines():
        if match := re.match(r"(\.\w+):", line):
            label, block = match[1], []
        elif re.match(r"\t[a-z]", line):
            block.append(line.split()[0])
            if re.match(rf"\t(b\.|j)\w+\s+{re.escape(label)}$", line):
                found.append([*block])
    return found


X86 = "x86_64-linux-gnu"
PRODUCTS = {
    "NEON": (aarch64.NEON, aarch64.TRIPLE, aarch64.CORE, 448, 376),
    "NEON, pairs": (aarch64.PAIRS, aarch64.TRIPLE, aarch64.CORE, 240, 236),
    "AVX2": (emulation.AVX2, X86, "haswell", 224, 214),
    "AVX-512": (emulation.AVX512, X86, "skylake-avx512", 102, 102),
}
"""Target, what it is compiled for, and how many instructions 16 scores and their product with V take at most at d = 64.
Multiply-adds alone are 256, of pairs 128, 128 and 64 for each."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_mostly_multiply_adds(name: str) -> None:
    """Nothing is spilled in the two products' loops on Arm, and most instructions of all compute."""
    target, triple, core, *most = PRODUCTS[name]
    c, tile = case("plain", "bfloat16" if target.pairs else "float32", 64, 64), target.tile_rows * target.tile_groups
    source = emit(c.spec, tilings_for(c.spec, target)[0], target, 64, 64).source
    found = loops(aarch64.compiled(source, "asm", triple, core).decode())
    products = [loop for loop in found if not any("max" in i for i in loop) and adds(loop) >= tile]
    words = 64 // (1 + target.pairs)
    counts = [len(loop) / adds(loop) * 16 * words / target.lanes for loop in products]
    assert all(count <= limit for count, limit in zip(counts, most, strict=True)), counts
    for loop in products:
        assert 2 * adds(loop) > len(loop)
        assert not {"str", "stp", "stur"} & set(loop)


def adds(loop: list[str]) -> int:
    return sum(i in ("fmla", "bfdot") or i.startswith("vfmadd") for i in loop)
