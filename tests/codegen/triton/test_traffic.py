"""What interpreted kernels read and write is what the cost model says of their schedules, to the element."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from examples.io_model import counts, schedule
from examples.io_model.schedule import phase_counts, sizes_of
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import JOINT, KEYS, KEYS_ALONE, QUERIES, VALUES_ALONE
from fusion.planning.gpu_model import PREPARE
from fusion.planning.problem import Problem, problem_of
from tests import emitters
from tests.codegen.mlir.cases import case, draw
from tests.codegen.triton.counting import count_traffic
from tests.codegen.triton.test_backward import Apart, Joined
from tests.passes import test_caches as caches

TILE = Tile(rows=32, keys=16, warps=4, stages=1)
SHAPES = [{"B": 2, "H": 3, "Nq": 96, "Nk": 80}, {"B": 1, "H": 2, "Nq": 70, "Nk": 75}]
D, D_V = 16, 32


def problem(name: str, n: dict[str, int]) -> Problem:
    return Problem(n_q=n["Nq"], n_k=n["Nk"], d=D, d_v=D_V, causal=name == "causal")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_forward(monkeypatch, name: str, described: bool, shape: dict[str, int]) -> None:
    """Tiles that are cut off by the mask are read as far as it says; by descriptors to their end."""
    traffic, c = count_traffic(monkeypatch), case(name, d=D, d_v=D_V)
    operands, sizes = draw(c, shape)
    Kernel(c.spec, dataclasses.replace(TILE, described=described))(operands, sizes)
    asked, heads = problem(name, shape), shape["B"] * shape["H"]
    share = asked.live_share(TILE.rows, TILE.keys if described else 1)
    expected = counts(
        "block_sparse", sizes_of(asked, 1 << 20, share), {"B_r": TILE.rows, "B_c": TILE.keys, "stages": 1}
    )
    assert traffic.reads["attention_forward"] == heads * round(float(expected.reads))
    # The model's statistics are for training.
    assert traffic.writes["attention_forward"] == heads * round(float(expected.writes) - asked.n_q)


WAYS = {
    "backward_split": (None, {PREPARE: "delta", QUERIES: "dQ", KEYS: "dK, dV"}),
    "backward_apart": (Apart(), {PREPARE: "delta", QUERIES: "dQ", KEYS_ALONE: "dK", VALUES_ALONE: "dV"}),
    "backward_fused": (Joined(), {PREPARE: "delta", JOINT: "dK, dV, dQ"}),
}
"""By the model's schedule: the policy that takes it, and the phase of each kernel."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(monkeypatch, interpreters_tiles, shape: dict[str, int], name: str) -> None:
    """The kernels keep a row's maximum and sum where the model has their log-sum-exp: one number more, of which the
    first kernel reads the one and writes its logarithm. What dQ is added to is filled with zeros before."""
    policy, phases = WAYS[name]
    traffic, c = count_traffic(monkeypatch), case("plain", d=D, d_v=D_V)
    operands, sizes = draw(c, shape)
    run = Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, policy, tile=TILE))
    out, statistics = run.outputs(operands, sizes)
    run.backward(torch.randn(out.shape), out, statistics, operands, sizes, (True, True, True))
    asked, heads = problem("plain", shape), shape["B"] * shape["H"]
    n, symbols = asked.n_q, sizes_of(asked, 1 << 20)
    tile = dict.fromkeys(("B_r", "B_o"), TILE.rows) | dict.fromkeys(("B_c", "B_p"), TILE.keys) | {"stages": 1}
    by_name = {phase.name: phase_counts(phase, symbols, tile) for phase in schedule(name).phases}
    by_keys = n * -(-asked.n_k // TILE.keys)
    more_reads, more_writes = {PREPARE: n, QUERIES: n}, {PREPARE: n, JOINT: -n * D}
    for kernel, phase in phases.items():
        expected = by_name.pop(phase)
        assert traffic.reads[kernel] == heads * (round(float(expected.reads)) + more_reads.get(kernel, by_keys)), kernel
        assert traffic.writes[kernel] == heads * (round(float(expected.writes)) + more_writes.get(kernel, 0)), kernel
    assert not by_name
    flash = counts("flash", symbols, tile)
    assert traffic.reads["attention_forward"] == heads * round(float(flash.reads))
    assert traffic.writes["attention_forward"] == heads * (round(float(flash.writes)) + n)


@pytest.mark.parametrize("splits", [2, 3])
def test_decoding(monkeypatch, splits: int) -> None:
    """Two statistics of each row and part again."""
    traffic, c = count_traffic(monkeypatch), case("plain", d=D, d_v=D_V)
    shape = {"B": 1, "H": 2, "Nq": 3, "Nk": 192}
    operands, sizes = draw(c, shape)
    Kernel(c.spec, dataclasses.replace(TILE, rows=16), splits=splits)(operands, sizes)
    asked, n = problem("plain", shape), shape["Nq"]
    tile = {"B_r": 16, "B_c": TILE.keys, "B_s": shape["Nk"] // splits, "stages": 1}
    parts, merge = (phase_counts(p, sizes_of(asked, 1 << 20), tile) for p in schedule("split_k").phases)
    assert traffic.reads["attention_split"] == 2 * round(float(parts.reads))
    assert traffic.writes["attention_split"] == 2 * (round(float(parts.writes)) + splits * n)
    assert traffic.reads["attention_combine"] == 2 * (round(float(merge.reads)) + splits * n)
    assert traffic.writes["attention_combine"] == 2 * round(float(merge.writes) - n)


@pytest.mark.parametrize("keys", caches.SPELLINGS, ids=lambda f: f.__name__)
def test_bytes_of_caches(monkeypatch, keys) -> None:
    """Of quantised and paged caches: packed elements, scales, zero points and tables."""
    traffic, specs = count_traffic(monkeypatch), []

    def make(spec):
        specs.append(spec)
        return Kernel(spec, dataclasses.replace(TILE, rows=16))

    given = caches.draw(torch.float32)
    with emitters.interpreted(make):
        caches.run(keys, given)
    asked = problem_of(specs[0], {"B0": caches.B, "B1": caches.H, "Nq": 1, "Nk": caches.N})
    heads = caches.B * caches.H
    of_keys = asked.n_k * (asked.d + asked.d_v) * asked.key_bytes
    assert traffic.bytes["attention_forward"] == heads * round(of_keys + 4 * asked.d)
