"""Which tile a call gets, and how work is dealt to threads."""

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.mlir.launch import CHUNKS_PER_THREAD, FEW_BLOCKS, Kernel, chunks_of
from fusion.codegen.mlir.strategy import tilings_for
from fusion.codegen.mlir.work_items import ByRows, Tiling
from fusion.machine import Machine
from fusion.planning.cpu_planner import WORTH_COMPILING, CpuPlanner
from tests.codegen.mlir.cases import TARGETS, assert_as_exact_as_eager, case, draw


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 2, FEW_BLOCKS, FEW_BLOCKS + 1, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 12, 13, 96])
def test_every_thread_has_work_and_short_heads_stay_whole(count: int, blocks: int, threads: int) -> None:
    threads = min(threads, count * blocks)
    chunks = chunks_of(count, blocks, threads)
    assert threads <= chunks <= max(1, min(count * blocks, CHUNKS_PER_THREAD * threads))
    edges = [count * blocks * k // chunks for k in range(chunks + 1)]
    assert all(low < high for low, high in zip(edges, edges[1:], strict=False))
    divisors = [n for n in range(threads, CHUNKS_PER_THREAD * threads + 1) if count % n == 0]
    if blocks <= FEW_BLOCKS and divisors and threads > 1:
        assert all(edge % blocks == 0 for edge in edges)


def test_the_cost_model_chooses_the_tile_and_a_compiled_one_is_kept() -> None:
    c, target = case("causal"), TARGETS["best"]
    base = tilings_for(c.spec, target)
    rows, keys = target.register_tile(base[0].planes)
    small, large = (rows, 2 * keys), (3 * rows, 4 * keys)
    seconds = {small: 1.0, large: 2.0}
    planner = CpuPlanner(c.spec, Machine.detect(), lambda sizes, multiples, more: seconds)
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
    assert check(5) == {small, large} and (64, 64, ByRows(alone=False)) in run._variants
