"""Plans of backwards: the kernels that run, I/O and bound against counts over the dense mask, and their texts."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

import fusion
from fusion.cli import main
from fusion.ir.request import Request
from fusion.planning.choice import Tile
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.planning.schedules import lower_bound
from fusion.runtime import kernels
from tests.numerics import assert_same_in_float64

PROBLEM = Problem(n_q=512, n_k=512, d=64, d_v=32, heads=4, heads_kv=4)
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 100}}


def visited(live: torch.Tensor, rows: int, keys: int, by_keys: bool) -> int:
    """Queries that blocks of keys meet, or keys that blocks of queries meet, in tiles that are whole."""
    met = 0
    for i in range(0, live.shape[0], rows):
        for j in range(0, live.shape[1], keys):
            tile = live[i : i + rows, j : j + keys]
            met += bool(tile.any()) * tile.shape[0 if by_keys else 1]
    return met


@pytest.mark.parametrize("form", ["fused", "split", "apart"])
@pytest.mark.parametrize("mask", MASKS)
def test_io_is_what_the_kernels_loops_move(mask, form):
    """Here all tiles are whole."""
    problem = replace(PROBLEM, **MASKS[mask])
    choice = plan(problem, "h200", backward=True).choice
    beside = {"fused": (), "split": ("dQ",), "apart": ("dV", "dQ")}[form]
    tiles = {"dQ": Tile(rows=64, keys=128), "dV": Tile(rows=32, keys=64)}
    choice = replace(
        choice, schedule=f"backward_{form}", tile=Tile(rows=32, keys=128), beside=tuple((n, tiles[n]) for n in beside)
    )
    found = plan(problem, "h200", choice=choice)
    i, j = torch.arange(512)[:, None], torch.arange(512)
    live = torch.ones(512, 512, dtype=torch.bool)
    live &= (j <= i) if problem.causal else True
    live &= (i - j < 100) if problem.window else True
    d, e, n = 64, 32, 512
    moved = 2 * n * e + n  # dO and O, delta
    met = visited(live, 32, 128, by_keys=True)
    if form == "fused":
        moved += 2 * n * (d + e) + met * (d + e + 2 + 2 * d) + n * d  # dQ is read and written, and begins with zeros
    if form == "split":
        moved += 2 * n * (d + e) + met * (d + e + 2)
    if form == "apart":
        moved += n * (d + e) + n * d + met * (d + e + 2)
        moved += n * d + n * e + visited(live, 32, 64, by_keys=True) * (d + e + 1)
    if form != "fused":
        moved += n * (d + e + 2) + n * d + visited(live, 64, 128, by_keys=False) * (d + e)
    assert_same_in_float64(found.io, 4 * moved)
    assert found.backward and found.ratio >= 1 and found.time > 0


@pytest.mark.parametrize("mask", MASKS)
def test_the_bound_is_what_gradients_need(mask):
    problem = replace(PROBLEM, heads_kv=2, n_k=700, diagonal=-100 if mask != "full" else 0, **MASKS[mask])
    i, j = torch.arange(512)[:, None], torch.arange(700)
    live = torch.ones(512, 700, dtype=torch.bool)
    live &= (j <= i - 100) if problem.causal else True
    live &= (i - j - 100 < 100) if problem.window else True
    rows, keys = live.any(1).sum().item(), live.any(0).sum().item()
    read = 4 * rows * (64 + 32) + 2 * keys * (64 + 32)
    written = 4 * 512 * 64 + 2 * 700 * (64 + 32)
    assert_same_in_float64(lower_bound(problem, math.inf, backward=True), read + written)


@pytest.mark.parametrize("name", ["cpu", "h200", "a100", "mi300x"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_machine_has_a_plan(name, dtype):
    for mask in MASKS.values():
        problem = replace(PROBLEM, heads_kv=2, dtype=dtype, **mask)
        forward, backward = plan(problem, name), plan(problem, name, backward=True)
        assert backward.ratio >= 1 and backward.time > 0 and backward.flops > forward.flops
        assert dict(backward.resources).keys() >= {"delta", "launch"} and "in turn: delta" in backward.explain()


@pytest.mark.parametrize("name", ["cpu", "h200", "4090"])
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 4096), (300, 7)], ids=str)
@pytest.mark.parametrize("d", [8, 512])
def test_empty_and_lopsided_calls_have_plans(name, sizes, d):
    problem = Problem(n_q=sizes[0], n_k=sizes[1], d=d, d_v=d, dtype="bfloat16")
    assert plan(problem, name, backward=True).ratio >= 1


def test_deterministic_algorithms_have_no_sums_in_no_certain_order():
    torch.use_deterministic_algorithms(True)
    try:
        found = plan(PROBLEM, "mi300x", backward=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.schedule in ("backward_split", "backward_apart") and "dQ in tiles of" in found.runs


def attend(q, k, v):
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.mT / 8).masked_fill(~causal, -math.inf), -1) @ v


@pytest.mark.parametrize("options", [{}, {"reproducible": True}])
def test_a_report_of_training_shows_the_kernels_that_run(options):
    q, k, v = (torch.randn(1, 2, 300, 32, requires_grad=True) for _ in range(3))
    report = fusion.explain(attend, q, k, v, options=options)
    (attention,) = report.sites[0].attentions
    found = attention.backward()
    text = str(report)
    assert f"backward schedule   {found.schedule} " in text and text.count("predicted, limited by") == 2
    kernel = kernels.differentiable(attention.spec.to_json(), "cpu", str(Request())).kernel
    sizes = tuple(attention.sizes.values())
    operands = [q.detach(), k.detach(), v.detach()]
    out, statistics = kernel.outputs(operands, sizes)
    kernel.backward(torch.ones_like(out), out, statistics, operands, sizes, (True, True, True))
    (derived,) = kernel.derived.values()
    ran = {kind.name for (kind, _) in derived.launchers} & {"queries", "keys", "fused"}
    assert len(ran) == len(found.choice.beside) + 1, (ran, found.schedule)


def test_the_page_of_training_has_both_plans(tmp_path):
    given = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    report = fusion.explain(attend, *given)
    page = report.to_html(tmp_path / "page.html").read_text()
    assert page.count("<h3>Plan</h3>") == page.count("<h3>Plan of the backward</h3>") == 1
    assert "predicted, their backward" in page and "What the words mean" in page
    assert report.data["sites"][0]["attentions"][0]["backward_plan"]["schedule"].startswith("backward_")
    with torch.no_grad():
        other = fusion.explain(attend, *given)
    assert "    backward " not in str(other) and other.data["sites"][0]["attentions"][0]["backward_plan"] is None


def test_a_report_says_where_no_kernel_computes_gradients():
    given = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    text = str(fusion.explain(attend, *given, options={"emitter": "reference"}))
    assert "    backward by the reference interpreter: there is no kernel for them" in text


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_the_command_prints_the_plan_of_a_backward(capsys, name):
    command = ["cost", "--N", "512", "--d", "64", "--heads", "4", "--causal", "--backward", "--machine", name]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert re.search(r"^schedule   backward_\w+ B_c=\d+", text, flags=re.M) and "bound      " in text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["io_elements"] >= found["bound_elements"] > 0 and found["runs"].endswith(
        text.split("runs       ")[1].strip()
    )


def test_a_backward_goes_without_options_of_forwards(capsys):
    for more in (["--M", "64K"], ["--bound", "1"], ["--devices", "4"]):
        assert main(["cost", "--N", "512", "--backward", *more]) == 2
        assert "--backward goes with neither --M, --bound nor --devices" in capsys.readouterr().err
