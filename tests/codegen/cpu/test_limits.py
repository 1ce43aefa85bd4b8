"""What kernels have no room for is refused, under `python -O` too, and plans do not follow the clock of the moment."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import launch
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.builder import PTR, Builder, Value
from fusion.codegen.mlir.rows import SLOTS, PackedRows
from fusion.errors import KernelCompilationError, UnsupportedSizeError
from fusion.ir.expr import const
from fusion.ir.ranges import LARGEST_SIZE
from fusion.machine import cpu
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import HERE, case


@pytest.mark.parametrize("kind", [Kernel, TrainingKernel])
def test_static_batches_beyond_what_indices_hold(kind: type) -> None:
    c = case("plain", d=16)
    spec = replace(c.spec, sizes=("Nq", "Nk"), batch=(const(1), const(LARGEST_SIZE)))
    kernel = kind(spec, tilings_for(spec, HERE), HERE)
    operands = [torch.zeros(1, 1, 1, 16).expand(1, LARGEST_SIZE, 1, 16) for _ in range(3)]
    with pytest.raises(UnsupportedSizeError, match=f"a size of {LARGEST_SIZE} was met"):
        kernel(operands, [1, 1]) if kind is Kernel else kernel.outputs(operands, [1, 1])


def test_more_work_items_than_portions_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels multiply them by the square of the number of portions."""
    monkeypatch.setattr(launch, "get_num_threads", lambda: 1024)
    c, many = case("plain", d=16), 1 << 24
    spec = replace(c.spec, sizes=("Nq", "Nk"), batch=(const(many), const(many)))
    operands = [torch.zeros(1, 1, 1, 16).expand(many, many, 1, 16) for _ in range(3)]
    with pytest.raises(UnsupportedSizeError, match="portions were asked for; split the batch"):
        Kernel(spec, tilings_for(spec, HERE), HERE)(operands, [1, 1])


def test_more_coordinates_than_a_thread_keeps() -> None:
    b = Builder()
    reader = SimpleNamespace(identity=lambda: range(SLOTS - 1))
    with pytest.raises(KernelCompilationError, match="a kernel has room for 62: give them fewer batch dimensions"):
        PackedRows(b, Value("%state", PTR), 1).note([reader])  # type: ignore[list-item]


def test_the_clock_is_that_of_the_processor() -> None:
    assert cpu._clock({"cpu MHz": "2596.096"}) == cpu._clock({"cpu MHz": "2603.9"})
