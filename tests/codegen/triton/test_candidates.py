"""Which other tiles than the table's a GPU kernel may run in, and what the cost model says of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.candidates import candidates, fits, smaller
from fusion.machine import machine, of_target
from fusion.planning.choice import Choice, Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import BACKWARD, FORWARD, work_of
from fusion.planning.gpu_model import tile_clocks
from fusion.planning.plan import plan
from tests.codegen.mlir.cases import case


def test_smaller_tiles_end_at_the_smallest() -> None:
    tile, met = Tile(rows=128, keys=256, warps=8, stages=3), []
    while (reduced := smaller(tile)) is not None:
        assert reduced.rows * reduced.keys * reduced.stages < tile.rows * tile.keys * tile.stages or (
            reduced.warps < tile.warps
        )
        tile = reduced
        met.append(tile)
    assert met[-1] == Tile(rows=16, keys=16, warps=1, stages=1)
    assert Tile(rows=16, keys=16, warps=4, stages=1) in met


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates(target: str, d: int, dtype: str) -> None:
    spec = case("bias", dtype, d).spec
    machine = of_target(target)
    planner = GpuPlanner(spec, machine)
    tables = {"attention_forward": planner.tile_for(4096, 4096, d, d), **planner.backward(d, d)}
    for kernel, table in tables.items():
        found = candidates(kernel, spec, (4096, 4096, d, d), table, machine)
        assert found[0] == table and len(set(found)) == len(found)
        if kernel in BACKWARD or kernel == FORWARD:
            assert all(fits(work_of(spec, kernel, d, d), tile, machine) for tile in found[1:])
        if d <= 128:
            assert len(found) > 1, (kernel, found)
    few = candidates("attention_forward", spec, (1, 4096, d, d), replace(table, rows=16, keys=64), machine)
    assert {tile.rows for tile in few} == {16}


@pytest.mark.parametrize("name", ["a100", "h200", "b200", "mi300x"])
def test_the_model_has_a_time_for_every_candidate(name: str) -> None:
    c = case("causal", "bfloat16", 128)
    sizes = [{"B": 4, "H": 16, "Nq": 4096, "Nk": 4096}[size] for size in c.spec.sizes]
    times = tile_clocks(c.spec, machine(name))
    for kernel in ("attention_forward", "attention_split", "attention_backward_queries", "attention_backward_keys"):
        tiles = [Tile(rows=rows, keys=64, warps=8, stages=2) for rows in (16, 64, 128)]
        slow, middle, fast = times(kernel, sizes, tiles)
        assert 0 < fast < slow and middle < slow
    assert times("attention_backward_prepare", sizes, tiles) == [0.0] * 3


@pytest.mark.parametrize("tile", [(64, 32), (128, 64), (512, 16)])
def test_a_plan_has_the_tile_of_the_kernel(tile: tuple[int, int]) -> None:
    c = case("causal", "bfloat16", 128)
    sizes = {"B": 4, "H": 16, "Nq": 4096, "Nk": 4096}
    choice = Choice(schedule="block_sparse", tile=Tile(rows=tile[0], keys=tile[1], warps=8), keys=4096)
    found = plan(c.spec, "h200", sizes=sizes, choice=choice)
    assert (found.B_r, found.B_c) == tile and math.isfinite(found.time)
