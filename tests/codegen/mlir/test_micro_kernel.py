"""The loop along the reduction, on operands of any strides: products of small integers, which are exact."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.machine_code import compile_text
from fusion.codegen.mlir.builder import PTR, Builder, Value
from fusion.codegen.mlir.micro_kernel import (
    PLANE_PAIRS,
    TILE_ELEMENTS,
    AmxTiles,
    Bf16Vectors,
    FmaVectors,
    MatrixOperand,
)
from fusion.planning.register_tiles import Target
from tests import emulation

MR, NR, K = 4, 2, 24


def run(target: Target, write: Callable[..., None], *tensors: Tensor) -> None:
    """Run what `write` makes of the addresses of these tensors."""
    b, places = Builder(), [Value(f"%t{n}", PTR) for n in range(len(tensors))]
    write(b, *places)
    header = f"func.func @f({', '.join(f'{place}: {PTR}' for place in places)})"
    with emulation.compiling(target):
        code = compile_text(f"module {{\n{header} {{\n{b.text()}\n  return\n}}\n}}\n", "f")
    values = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    packed = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(ctypes.addressof(packed))


TARGETS = emulation.AVX2, emulation.AVX512, emulation.PAIRS, emulation.ARM_PAIRS


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, dtype=torch.float32)


def kernel_of(b: Builder, target: Target) -> FmaVectors:
    return Bf16Vectors(b, target.lanes) if target.pairs else FmaVectors(b, target.lanes)


def aligned(x: Tensor) -> Tensor:
    """A copy on a cache line."""
    room = torch.empty(x.numel() * x.element_size() + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)


def sides(target: Target) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A [rows, k], B [k, columns], and both as the vectors' micro-kernel reads them: A as it is, B by words."""
    a, b = integers(MR, K), integers(K, NR * target.lanes)
    if not target.pairs:
        return a, b, a, aligned(b)
    words = b.view(K // 2, 2, -1).transpose(1, 2).bfloat16()
    return a, b, a.bfloat16(), aligned(words)


@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_vectors(target: Target, unroll: int) -> None:
    """In two ranges of steps: the first from zeros, the second on top of it, in registers and in memory."""
    a, b, left, right = sides(target)
    c = aligned(torch.full((2, MR, NR * target.lanes), torch.nan))

    def write(builder: Builder, x: Value, y: Value, z: Value) -> None:
        kernel, lanes = kernel_of(builder, target), target.lanes
        steps, row = K // kernel.kr, NR * lanes
        rows = MatrixOperand(bases=[x], step=1, count=MR, part=steps)
        columns = MatrixOperand(bases=[y], step=row, count=NR, part=lanes)
        cells, others = (
            [builder.at(z, part * MR * row + n * lanes, "f32") for n in range(MR * NR)] for part in range(2)
        )
        first = kernel.gemm(kernel.zeros(MR * NR), rows, columns, 0, 6, unroll, stride=unroll)
        kernel.store(kernel.gemm(first, rows, columns, 6, steps, unroll, stride=unroll), cells)
        kernel.store(first, others)
        kernel.add(kernel.gemm(kernel.zeros(MR * NR), rows, columns, 6, steps), others)

    run(target, write, left, right, c)
    assert torch.equal(c[0], a @ b) and torch.equal(c[1], a @ b)


def test_operands_of_other_strides() -> None:
    """A by columns, B with a base for each vector, and unrolled steps that lie elsewhere than the next ones."""
    target = emulation.AVX2
    a, b = integers(MR, K), integers(K, NR * target.lanes)
    halves = a.T.reshape(2, K // 2, MR).contiguous()  # steps k and k + K / 2 are unrolled
    columns = aligned(b.view(2, K // 2, NR, target.lanes).permute(2, 1, 0, 3))
    c = aligned(torch.full((MR, NR * target.lanes), torch.nan))

    def write(builder: Builder, x: Value, y: Value, z: Value) -> None:
        kernel, lanes = FmaVectors(builder, target.lanes), target.lanes
        rows = MatrixOperand(bases=[x], step=MR, unrolled=K // 2 * MR, count=MR, part=1)
        bases = [builder.at(y, n * K * lanes, "f32") for n in range(NR)]
        vectors = MatrixOperand(bases=bases, step=2 * lanes, unrolled=lanes)
        cells = [builder.at(z, n * lanes, "f32") for n in range(MR * NR)]
        kernel.store(kernel.gemm(kernel.zeros(MR * NR), rows, vectors, 0, K // 2, unroll=2), cells)

    run(target, write, halves, columns, c)
    assert torch.equal(c, a @ b)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("planes", "element"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "f16")])
def test_tiles(planes: int, element: str, mirrored: bool) -> None:
    """Two rows of tiles by two columns over three steps. The pairs of planes that count are those of the table, with
    both sides exchanged where the kernel is mirrored; work beside the products is written once in each step."""
    rows, columns, steps = 2, 2, 3
    a, b = integers(rows, steps, planes, 16, 32), integers(steps, columns, planes, 32, 16)
    dtype = torch.bfloat16 if element == "bf16" else torch.float16
    words = b.view(*b.shape[:-2], 16, 2, 16).transpose(-2, -1).contiguous().to(dtype)
    c = torch.full((rows * columns, 16, 16), torch.nan)
    done = torch.zeros(steps, 5)

    def write(builder: Builder, x: Value, y: Value, z: Value, marks: Value) -> None:
        kernel, size = AmxTiles(builder, planes, mirrored, element=element), planes * TILE_ELEMENTS

        def beside(step: Value) -> list[Callable[[], None]]:
            place = builder.row(marks, step, 5)
            one = builder.constant(1.0, "f32")
            return [lambda n=n: builder.store(one, builder.at(place, n, "f32")) for n in range(5)]

        left = MatrixOperand(bases=[x], step=size, count=rows, part=steps * size)
        right = MatrixOperand(bases=[y], step=columns * size, count=columns, part=size)
        cells = [builder.at(z, 256 * n, "f32") for n in range(rows * columns)]
        kernel.store(kernel.gemm(kernel.zeros(rows * columns), left, right, 0, steps, beside=beside), cells)

    run(emulation.AMX_FP16, write, a.to(dtype), words, c, done)
    pairs = [pair[::-1] if mirrored else pair for pair in PLANE_PAIRS[planes]]
    expected = [
        sum(a[r, k, p] @ b[k, column, q] for k in range(steps) for p, q in pairs)
        for r in range(rows) for column in range(columns)
    ]  # fmt: skip
    assert torch.equal(c, torch.stack(expected)) and done.all()
