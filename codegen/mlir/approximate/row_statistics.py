"""Base of kernels that look at the rows of queries and keys of each head, and how they are called.

Such a kernel runs in front of attention, after other work has filled the caches: it takes some 20 us, of which as much
again is easily spent on a single operation of torch. What does not change between calls is put together once, and a
call that wants figures alone makes no tensor.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..builder import Value
from ..calling import CompiledKernel, Launch
from ..scope import MEMORY_TYPE
from ..thread_function import KernelText, ThreadFunction
from ..values import round_up
from ..vectormath import sum_rows
from ..x86 import F32, LANES

BLOCK = 64
SUMS = 16  # vectors of sums that stay in registers
MAX_WIDTH = 256  # columns of Q and K up to which these kernels are made
GIVEN = tuple(("ptr", name) for name in ("q", "k", "found", "means", "squares", "slants"))
"""The parameters that change from call to call."""


class RowStatisticsKernel(ThreadFunction):
    """The text of such a kernel for rows of d elements of one scalar type. Subclasses write what happens to a head."""

    def __init__(self, d: int, scalar: str):
        super().__init__()
        self.d, self.scalar, self.width = d, scalar, round_up(d, LANES)
        self.vectors = self.width // LANES
        self.mr = 1 << max(0, (SUMS // self.vectors).bit_length() - 1)  # divides BLOCK, and the width
        self.stage = self.area(4 * BLOCK * self.width, "stage")
        self.partial = self.area(4 * BLOCK * LANES, "partial")

    def text(self) -> KernelText:
        b, p = self.b, self.params
        with self.dynamic_loop(p[("items",)], "item") as item:
            q, k = (b.at(p[("ptr", x)], self._offset(item, f"{x}_offsets"), self.scalar, x) for x in ("q", "k"))
            self._item(item, q, k)
        return self.kernel_text()

    def _offset(self, item: Value, name: str) -> Value:
        return self.b.load(self.b.at(self.params[("ptr", name)], item, "i64"), "i64", name)

    def _item(self, item: Value, q: Value, k: Value) -> None:
        raise NotImplementedError

    def _float(self, x: Value) -> Value:
        return self.b.convert("arith.uitofp", x, "f32", "count")

    def _row(self, address: Value) -> list[Value]:
        """A row in memory as vectors of float32, with zeros behind its end."""
        b, results = self.b, []
        word = {"f32": "f32", "bf16": "i16", "f16": "f16"}[self.scalar]
        for column in range(0, self.width, LANES):
            at = b.at(address, column, self.scalar)
            if column + LANES <= self.d:
                x = b.load(at, f"vector<{LANES}x{word}>", "x")
            else:
                valid = b.dense(
                    [float(column + lane < self.d) for lane in range(LANES)], f"vector<{LANES}xi1>", "valid"
                )
                x = b.masked_load(at, valid, f"vector<{LANES}x{word}>", "x")
            if word == "i16":
                x = b.convert("arith.extui", x, "i32", "wide")
                x = b.bitcast(b.binary("arith.shli", x, 16), F32)
            results.append(b.convert("arith.extf", x, "f32"))
        return results

    def _line(self, address: Value, hint: str = "v") -> Iterator[Value]:
        """The vectors of a row that was staged."""
        return (self.b.load(self.b.at(address, LANES * v, "f32"), F32, hint, align=64) for v in range(self.vectors))

    def _product(self, left: Iterable[Value], right: Iterable[Value]) -> Value:
        """16 numbers that add up to the product of two rows."""
        total = None
        for x, y in zip(left, right, strict=True):
            total = self.b.mul(x, y) if total is None else self.b.fma(x, y, total)
        assert total is not None
        return total

    def _write_product(self, r: Value, left: Iterable[Value], right: Iterable[Value]) -> None:
        """Into `partial` of row r, the product of two rows."""
        b = self.b
        b.store(self._product(left, right), b.row(self.partial, r, LANES), align=64)

    def _clear(self, area: Value, width: int, count: Value) -> None:
        """Zeros in the rows of a block from `count` on."""
        b = self.b
        with b.loop(b.mul(count, width), BLOCK * width, LANES, hint="beyond") as place:
            b.store(b.constant(0.0, F32), b.at(area, place, "f32"), align=64)

    def _stage(self, rows: Value, stride: Value, count: Value, mean: Value | None) -> None:
        """A block of rows in float32, minus the mean where one is given, and the squares of each in `partial`."""
        b = self.b
        away = [] if mean is None else [b.load(b.at(mean, c, "f32"), F32) for c in range(0, self.width, LANES)]
        with b.loop(0, count, hint="r") as r:
            row = self._row(b.row(rows, r, stride, self.scalar))
            row = [b.sub(x, y) for x, y in zip(row, away, strict=True)] if away else row
            for column, x in enumerate(row):
                b.store(x, b.at(self.stage, b.add(b.mul(r, self.width), column * LANES), "f32"), align=64)
            self._write_product(r, row, row)
        self._clear(self.partial, LANES, count)
        self._clear(self.stage, self.width, count)

    def _sums(self, first: Value) -> Value:
        """Sums over `partial` for rows first .. first + 15."""
        b = self.b
        rows = b.row(self.partial, first, LANES)
        return sum_rows(b, [b.load(b.at(rows, LANES * r, "f32"), F32, align=64) for r in range(LANES)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of heads in memory; the elements of a row lie side by side."""

    offsets: torch.Tensor  # int64 [heads], elements from the operand's address to the first row of each head
    stride: int  # elements from one row to the next
    count: int  # rows of a head

    def every(self, step: int) -> Rows:
        return Rows(offsets=self.offsets, stride=self.stride * step, count=-(-self.count // step))


class _Output(threading.local):
    """Addresses that one thread writes its figures to."""

    def __init__(self) -> None:
        self.reserve(1024)

    def reserve(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)


_output = _Output()


class RowStatisticsCall:
    """A compiled kernel, bound to where rows of one kind lie. figures: floats that it writes for a head. values: the
    parameters that are not in GIVEN."""

    def __init__(self, kernel: CompiledKernel, q: Rows, k: Rows, figures: int, **values: int):
        self.kernel, self.figures, self.places, self.heads = kernel, figures, (q, k), len(q.offsets)
        self.values = kernel.by_name({
            "items": self.heads, "q_offsets": q.offsets.data_ptr(), "k_offsets": k.offsets.data_ptr(),
            "q_stride": q.stride, "k_stride": k.stride, "n_q": q.count, "n_k": k.count, **values,
        })  # fmt: skip
        self.result, self.launchers = struct.Struct(f"{figures * self.heads}f"), dict[int, Launch]()

    def __call__(self, q: int, k: int, threads: int, *wanted: torch.Tensor) -> tuple[float, ...]:
        """The figures of all heads, one head after the other. q, k: addresses; wanted: tensors for what else the kernel
        writes, in the order of GIVEN."""
        output, threads = _output, max(1, min(threads, self.heads))
        if len(output.buffer) < self.result.size:
            output.reserve(self.result.size)
        if (launch := self.launchers.get(threads)) is None:
            launch = self.launchers[threads] = self.kernel.launcher(self.values, GIVEN, threads)
        launch((q, k, output.address, *([x.data_ptr() for x in wanted] or (0, 0, 0))))
        return self.result.unpack_from(output.buffer)


@functools.lru_cache(maxsize=128)
def code(kernel: Callable[..., Any], d: int, dtype: torch.dtype, *others: int) -> CompiledKernel:
    """The kernel for rows of d elements of one type, compiled once. Raises KernelCompilationError."""
    return CompiledKernel(kernel(d, MEMORY_TYPE[str(dtype)[6:]], *others).text())
