"""The tiles that the model chooses for GPU kernels, by what compiling has shown and where nothing was compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion.machine import Machine, machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu import Extents
from fusion.planning.gpu_clocks import BACKWARD, FORWARD, Work, redundancy, shared_bytes, work_of
from fusion.planning.gpu_facts import Fact
from fusion.planning.gpu_feasible import estimated, fact_of, slowed
from fusion.planning.gpu_model import TileModel
from tests.codegen.mlir.cases import case
from tests.codegen.triton.whole import whole

HOPPER = machine("h100")
MODEL = TileModel()


def tiles(name: str, d: int, device: Machine, dtype: str = "bfloat16") -> Iterator[tuple[Work, Tile]]:
    """What a training step runs."""
    spec = case(name, dtype, d).spec
    spec = whole(spec) if name == "causal" else spec
    found = {FORWARD: MODEL.forward(spec, device, Extents(64, 4096, 4096, d, d)), **MODEL.backward(spec, device, d, d)}
    for kernel in found.keys() & {FORWARD, *BACKWARD}:
        yield work_of(spec, kernel, d, d), found[kernel]


def known() -> Iterator[tuple[Work, Tile, Fact]]:
    """The data of Hopper."""
    for (architecture, kernel, program, d, d_v), facts in gpu_facts.FACTS.items():
        if architecture != HOPPER.architecture:
            continue
        work = Work(
            kernel=kernel, d=d, d_v=d_v, size=2, score_bytes=2 if program == "matrix" else 0, instructions=0.0,
            specials=0.0, masked=program != "plain", program=program, loaded=d if d > d_v else d + d_v,
        )  # fmt: skip
        for (rows, keys, warps, stages, order), fact in facts.items():
            form = {} if order == "plain" else {order: True}
            yield work, Tile(rows=rows, keys=keys, warps=warps, stages=stages, **form), fact


def test_estimates_are_below_what_is_known() -> None:
    """A tile that the estimate takes for feasible is, where it was compiled."""
    taken = [(work, tile, fact) for work, tile, fact in known() if estimated(work, tile, HOPPER)]
    assert len(taken) > 10
    for work, tile, fact in taken:
        assert fact.slowed < 1.2 and fact.shared <= shared_bytes(work, tile) + 4096, (work, tile, fact)


@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_tiles_on_hopper_are_known_to_be_good(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, without spills that count, and no score is computed twice."""
    monkeypatch.setattr(gpu_facts, "FACTS", gpu_facts.read(gpu_facts.NEWEST))
    for work, tile in tiles(name, d, HOPPER):
        fact = fact_of(work, tile, HOPPER)
        assert fact is not None and fact.slowed < 1.1, (work, tile)
        assert redundancy(work, tile, HOPPER) == 1, (work, tile)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "target", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100"]
)
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "soft_cap", "documents"])
def test_every_device_has_tiles_that_are_expected_to_fit(name: str, target: str) -> None:
    device = of_target(target)
    for dtype in ("bfloat16", "float32"):
        for d in (16, 64, 128, 256):
            for work, tile in tiles(name, d, device, dtype):
                smallest = tile.rows * tile.keys == 16 * 16 and tile.stages == 1
                smallest |= target == "gfx1100" and d == 256 and work.kernel in BACKWARD  # all spill
                assert slowed(work, tile, device) < math.inf or smallest, (work, tile)


def test_a_version_takes_the_nearest_ones_facts_of_kernels_that_it_has_none_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_facts, "file_of", lambda version: tmp_path / f"gpu_facts-{version}.json")
    tile, cells = (128, 64, 8, 2, "plain"), {t: (t, FORWARD, "plain", 64, 64) for t in ("sm_80", "sm_90", "sm_100")}
    for version, targets in {"3.6.0": ["sm_80", "sm_90"], "3.7.1": ["sm_80"], "3.9.0": ["sm_90", "sm_100"]}.items():
        facts = {cells[target]: {tile: Fact(0, int(version[2]), 0, 0, False)} for target in targets}
        gpu_facts.file_of(version).write_text(gpu_facts.to_json(facts))

    def taken(version: str) -> list[int]:
        found = gpu_facts.counting_for(version)
        assert [gpu_facts.source(version, target) for target in cells] == [
            next(v for v in gpu_facts.nearest(version) if int(v[2]) == found[cell][tile].registers)
            for cell in cells.values()
        ]
        return [found[cell][tile].registers for cell in cells.values()]

    assert [taken(version) for version in ("3.5.0", "3.6.0", "3.7.1", "3.9.0", "3.10.2", "4.0.0")] == [
        [6, 6, 9], [6, 6, 9], [7, 6, 9], [7, 9, 9], [7, 9, 9], [7, 9, 9],
    ]  # fmt: skip


def test_few_queries_have_small_blocks() -> None:
    spec = case("plain", "bfloat16", 128).spec
    for n_q in (1, 7, 16, 40):
        assert MODEL.forward(spec, HOPPER, Extents(64, n_q, 8192, 128, 128)).rows <= max(16, 2 * n_q)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("d", [64, 128])
def test_loads_of_a_decoding_step_are_in_flight_beside_products(target: str, d: int) -> None:
    """Memory takes the time there, so that tiles of any number of stages are predicted to be equally fast."""
    spec = case("plain", "bfloat16", d).spec
    assert MODEL.forward(spec, of_target(target), Extents(128, 1, 8192, d, d)).stages >= 2
