"""Tiles that another process measures: what reaches it, what it leaves, and what a tile that hangs or crashes costs."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton import apart
from fusion.codegen.triton.apart import Request
from fusion.codegen.triton.autotune import Tuner
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_gradients_as_exact_as_eager, case, draw

pytestmark = pytest.mark.usefixtures("interpreters_tiles")

SHAPE = {"B": 1, "H": 2, "Nq": 20, "Nk": 20}

CHILD = """
import os, time
from fusion.codegen.triton import apart, apart_process
from fusion.codegen.triton.variant import Variant

real, begin = Variant.launch, apart.begin
HANGS = "16 x 16, 4 warps, stages 1"

def begin_without_patience(state, kernel, tile):
    apart.TILE = 1 if str(tile) == HANGS else 60
    return begin(state, kernel, tile)

def launch(self, name, programs, tile, *rest):
    real(self, name, programs, tile, *rest)
    if str(tile) == "32 x 32, 4 warps, stages 1":
        os._exit(7)
    while str(tile) == HANGS:
        time.sleep(1)

apart.begin = begin_without_patience
Variant.launch = launch
apart_process.main()
"""


class Elsewhere(Tuner):
    """Asks another process, on CPUs too."""

    def measures(self, call) -> bool:
        return True


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Of both processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_a_tile_that_crashes_or_hangs_costs_that_tile(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(apart, "COMMAND", (sys.executable, str(tmp_path / "child.py")))
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Elsewhere())
    with caplog.at_level(logging.WARNING, logger="fusion"):
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    said = [record.getMessage() for record in caplog.records]
    assert any("16 x 16" in line and "no answer within 1 s" in line for line in said), said
    assert any("x 32" in line and "status 7" in line for line in said), said
    assert kernel.choice(sizes).measured


def test_kernels_of_the_backward_are_measured_elsewhere() -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    run = Differentiable(c.spec, tuner=Elsewhere())
    out, statistics = Differentiable(c.spec).outputs(operands, sizes)
    got = run.backward(out, out, statistics, operands, sizes, (True, True, True))
    assert_gradients_as_exact_as_eager(got, c, operands, out, (True, True, True))
    (path,) = apart.caching.directory().glob("tiles_*.json")
    measured = {name.partition(":")[0] for name in json.loads(path.read_text())["choices"]}
    assert {"attention_backward_keys", "attention_backward_queries"} <= measured


@pytest.mark.parametrize("command", [("/does/not/exist",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_where_no_process_measures_the_planned_tile_runs(command, monkeypatch, caplog) -> None:
    monkeypatch.setattr(apart, "COMMAND", command)
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Elsewhere())
    with caplog.at_level(logging.WARNING, logger="fusion"):
        for _ in range(2):
            assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert sum("no tiles are measured" in record.getMessage() for record in caplog.records) == 1, "tried once"


def test_tensors_arrive_as_they_were(tmp_path) -> None:
    memory = torch.randn(2, 5, 64).half()
    keys = torch.randn(2, 9, 8)
    tensors = [
        memory[:, 1:4, 3:40:2],
        keys,
        keys[..., :6],
        keys[1:, :2],
        torch.randn(4)[1:].expand(3, 3),
        torch.arange(9).as_strided((4, 3), (2, 1)),
        torch.randn(0, 3),
        torch.randn(3).to(torch.float8_e5m2),
        torch.tensor(True),
    ]
    sent = Request(spec="{}", operands=tensors[:5], sizes=(1, 2), backward=tensors[5:], needs=(True,))
    apart.save(sent, tmp_path / "request.pt")
    got = apart.load(tmp_path / "request.pt", "cpu")
    arrived = [*got.operands, *got.backward]
    assert (got.sizes, got.needs, len(got.operands)) == ((1, 2), (True,), 5)
    for one, other in zip(tensors, arrived, strict=True):
        assert one.stride() == other.stride() and one.dtype == other.dtype and one.shape == other.shape
        assert one.data_ptr() % 16 == other.data_ptr() % 16 or not one.numel()
        assert torch.equal(one.view(torch.uint8) if one.dtype.itemsize == 1 else one,
                           other.view(torch.uint8) if one.dtype.itemsize == 1 else other)  # fmt: skip
    assert arrived[1].data_ptr() == arrived[2].data_ptr(), "what shares memory shares it again"
