"""Reports of GPU kernels: what will run, as far as it is known when they are read."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from fusion import caching
from fusion.codegen.triton.autotune import Tuner
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Choice, Tile
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.report.data import report_data
from tests.codegen.mlir.cases import case
from tests.numerics import assert_as_exact_as_eager


def attend(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def seconds(launch, device) -> float:
    """Of a launch in a tile: least with 16 rows and 32 keys."""
    (tile,) = launch.args
    return 1.0 + abs(math.log2(tile.rows / 16)) + abs(math.log2(tile.keys / 32))


@pytest.mark.parametrize("trained", [False, True])
def test_the_tile_that_was_measured_is_reported(
    trained: bool, monkeypatch, tmp_path, emits, interpreters_tiles
) -> None:
    monkeypatch.setattr(caching, "directory", lambda: tmp_path)
    tuner = Tuner(clock=seconds)
    emits(lambda spec: Kernel(spec, tuner=tuner), lambda spec: Differentiable(spec, tuner=tuner))
    q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=trained) for _ in range(3))
    texts: list[str] = []
    monkeypatch.setattr("fusion.backend.publish", lambda report: (texts.append(str(report)), reports.append(report)))
    reports: list[fusion.Report] = []
    torch._dynamo.reset()
    out = torch.compile(attend, backend="fusion", options={"inner": "eager", "strict": True})(q, k, v)
    assert_as_exact_as_eager(out, attend(q, k, v), attend(q.double(), k.double(), v.double()))
    assert "    runs     tiles of 32 x 16, 4 warps, stages 1\n" in texts[0], "before the call that measures"
    (site,) = reports[0].sites
    said = "tiles of 16 x 32, 4 warps, stages 1, measured"
    assert site.runs == (said,) and f"    runs     {said}\n" in str(reports[0])
    tile = site.plan.choice.tile
    assert (tile.rows, tile.keys, tile.stages) == (16, 32, 1)
    assert json.loads(json.dumps(report_data(reports[0])))["sites"][0]["attentions"][0]["runs"] == said
    assert said in reports[0].to_html(tmp_path / "report.html").read_text()


def test_words() -> None:
    tile = Tile(rows=16, keys=64, warps=4, stages=3)
    assert str(Choice(schedule="flash", tile=tile, keys=4096)) == "tiles of 16 x 64, 4 warps, stages 3"
    assert str(Choice(schedule="flash", tile=tile, keys=4096, splits=3)).startswith(
        "keys in 3 parts, tiles of 16 x 64, 4 warps"
    )


@pytest.mark.parametrize(("splits", "stages"), [(33, 3), (2, 1)])
def test_a_plan_of_what_runs(splits: int, stages: int) -> None:
    """With the stages and parts of the kernel."""
    choice = Choice(schedule="split_k", tile=Tile(rows=16, keys=64, warps=4, stages=stages), keys=16384, splits=splits)
    spec, sizes = case("plain", "bfloat16", 128).spec, {"B": 1, "H": 8, "Nq": 1, "Nk": 16384}
    found = plan(spec, "h200", sizes=sizes, choice=choice)
    assert (found.schedule, found.B_r, found.B_c) == ("split_k", 16, 64)
    assert found.choice == choice


def test_windows_of_a_long_cache_are_planned_in_parts() -> None:
    """By the keys that a window leaves alive, in traffic and in time."""
    sizes = {"n_q": 1, "n_k": 65536, "d": 128, "d_v": 128, "heads": 32, "heads_kv": 8, "dtype": "bfloat16"}
    window, every = Problem(**sizes, causal=True, diagonal=65535, window=4096), Problem(**sizes)
    found, whole = (plan(problem, "h200") for problem in (window, every))
    assert found.schedule == whole.schedule == "split_k"
    assert found.sizes["live"] < 0.07 and found.time < 0.5 * whole.time and found.io < 0.2 * whole.io
