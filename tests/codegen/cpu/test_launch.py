"""Which tile a call gets, and how work is dealt to threads."""

import ctypes
import platform
import sys

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.calling import LARGE, PATIENCE, ThreadMemory, memory
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.machine import Machine
from fusion.planning.cpu import FEW_BLOCKS, before, one_by_one, portions
from fusion.planning.cpu_planner import WORTH_COMPILING, CpuPlanner
from fusion.planning.register_tiles import ByRows, Tiling, tilings_for
from tests.codegen.mlir.cases import TARGETS, assert_as_exact_as_eager, case, draw


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 96])
@pytest.mark.parametrize("blocks", [1, 2, FEW_BLOCKS, FEW_BLOCKS + 1, 64])
@pytest.mark.parametrize("heads", [1, 2, 7, 12, 13, 96])
def test_portions_hold_every_item_once_and_become_smaller(heads: int, blocks: int, threads: int) -> None:
    items = heads * blocks
    count, unit = portions(heads, blocks, min(threads, items))
    assert items % unit == 0
    edges = [unit * before(number, items // unit, count) for number in range(count + 1)]
    sizes = [high - low for low, high in zip(edges, edges[1:], strict=False)]
    assert edges[0] == 0 and edges[-1] == items and min(sizes) >= 0
    assert all(later <= size + unit for size, later in zip(sizes, sizes[1:], strict=False))  # but for rounding
    assert sum(size > 0 for size in sizes) >= min(threads, items)
    if threads > 1:
        assert max(sizes) <= max(unit, items / (2 * threads) + unit)


@pytest.mark.parametrize("items", [1, 2, 3, 100, 1024])
def test_parts_of_keys_are_taken_one_by_one(items: int) -> None:
    count, unit = one_by_one(items)
    edges = [before(number, items, count) for number in range(count + 1)]
    assert unit == 1 and edges[0] == 0 and edges[-1] == items
    assert {high - low for low, high in zip(edges, edges[1:], strict=False)} <= {0, 1}


def test_the_cost_model_chooses_the_tile_and_a_compiled_one_is_kept() -> None:
    c, target = case("causal"), TARGETS["best"]
    base = tilings_for(c.spec, target)
    rows, keys = target.register_tile(base[0].planes)
    small, large = (rows, 2 * keys), (3 * rows, 4 * keys)
    seconds = {small: 1.0, large: 2.0}
    planner = CpuPlanner(c.spec, Machine.detect(), lambda sizes, more: seconds)
    run = Kernel(c.spec, base, target, planner)

    def check(n: int) -> set[tuple[int, int]]:
        operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": n, "Nk": n})
        assert_as_exact_as_eager(run(operands, sizes), c, operands)
        return {
            (t.groups * target.lanes, t.keys)
            for *_, t in run._variants
            if isinstance(t, Tiling) and t.planes == base[0].planes
        }

    assert not run._variants  # nothing is compiled before sizes are known
    assert check(150) == {small}
    seconds[large] = 1.0 - WORTH_COMPILING / 2
    assert check(200) == {small}
    seconds[large] = 1.0 - 2 * WORTH_COMPILING
    assert check(150) == {small}  # a call that was met before runs as before
    assert check(300) == {small, large}
    assert check(5) == {small, large} and (64, 64, ByRows(rows_at_once=4)) in run._variants


def denormals_met() -> bool:
    """Whether the thread's processor met one since the last call: a bit of its register MXCSR."""
    environment, bit, libm = (ctypes.c_uint32 * 8)(), 2, ctypes.CDLL("libm.so.6")
    libm.fegetenv(environment)
    met = bool(environment[7] & bit)
    environment[7] &= ~bit
    libm.fesetenv(environment)
    return met


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="reads a register of x86 by Linux's libm"
)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [5, 16, 49])
@pytest.mark.parametrize("target", ["multiply-add", "avx2", "generic"])
def test_products_meet_no_denormal_number_that_lay_in_memory(target: str, n: int) -> None:
    """Products take more groups of queries than there are, and are many times slower with such numbers."""
    c = case("plain", "float32", 64)
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": n, "Nk": n})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(2):  # the first call makes the kernels and the memory
            memory.own.workspace.view(torch.int32).fill_(0x00010001)
            denormals_met()
            out, statistics = run.outputs(operands, sizes)
            memory.own.workspace.view(torch.int32).fill_(0x00010001)
            run.backward(torch.ones_like(out), out, statistics, operands, sizes, (True,) * 3)
        assert not denormals_met()
    finally:
        torch.set_num_threads(threads)


def test_a_large_workspace_is_given_back_where_calls_no_longer_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ThreadMemory()
    own.reserve(2 * LARGE)
    for size in [1000] * (PATIENCE - 1) + [LARGE] + [1000] * (PATIENCE - 1):
        own.reserve(size)
        assert own.workspace.numel() >= 2 * LARGE, "one call that needs much of it keeps it"
    own.reserve(1000)
    assert 1000 <= own.workspace.numel() < 2000
    for _ in range(2 * PATIENCE):
        place = own.reserve(10)
        assert place % 64 == 0 and own.workspace.data_ptr() <= place <= own.workspace.data_ptr() + 64
    assert own.workspace.numel() >= 1000, "small ones stay"

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        full = torch.empty
        patch.setattr(torch, "empty", lambda *size, **more: refuse() if size != (0,) else full(*size, **more))
        with pytest.raises(MemoryError):
            own.reserve(5000)
    own.reserve(100)
    assert own.workspace.numel() >= 100
