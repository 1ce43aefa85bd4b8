"""The GPU benchmark rehearsed: every section runs on CPU tensors, and what keeps a crash from costing a run."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.numerics import assert_within

pytest.importorskip("triton", reason="its kernels need triton")
pytest.importorskip("transformers", reason="its models need transformers")

ROOT = Path(__file__).parents[1]
CHILD = """
import pathlib, sys, time
state = pathlib.Path(sys.argv[1])
for step in ("good", "crash", "hang", "last"):
    if step in state.read_text().split():
        continue
    with state.open("a") as file:
        file.write(step + " ")
    if step == "crash":
        sys.exit(7)
    while step == "hang":
        time.sleep(1)
"""


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path_factory):
    """Compiled code stays in a folder of the test's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


def rehearse(monkeypatch, *arguments):
    """In this process: what is started as another one there is called here."""
    from benchmarks.gpu import __main__ as gpu

    def here(command, *others):
        monkeypatch.setattr(sys, "argv", command[2:])
        gpu.main()

    monkeypatch.setattr(gpu, "run_restarting", here)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--rehearse", *arguments])
    gpu.main()


def found_in(folder):
    return json.loads(next(folder.glob("*-rehearsal.json")).read_text())


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rehearsal(everything, monkeypatch, tmp_path, capsys):
    """Every phase, one after the other in calls of their own, as on a device that is lent for minutes."""
    given = ["--rows", "bias", *([] if everything else ["--no-models"])]
    rehearse(monkeypatch, *given, "--phase", "check", "tiles", "--out", str(tmp_path))
    found = found_in(tmp_path)
    assert found["rehearsal"] and not found["failed"] and found["tried"] == found["planned"]
    assert found["checks"] == {"bias d=16 bfloat16": [], "dropout": []}
    assert [(each["title"].split()[1], each["kernel"]) for each in found["tuned"]] == [
        ("forward", "forward"), ("backward", "backward_keys"), ("backward", "backward_queries")]  # fmt: skip
    for each in found["tuned"]:
        assert each["table"] in each["seconds"] and len(each["seconds"]) == 2 and not each["failed"]
    rehearse(monkeypatch, *given, "--phase", "time", "--continue", str(next(tmp_path.glob("*.json"))))
    found = found_in(tmp_path)
    assert not found["failed"] and found["tried"] == found["planned"] and len(found["checks"]) == 2
    assert [cell["place"]["direction"] for cell in found["cells"]] == ["forward", "backward"]
    for cell in found["cells"]:
        assert cell["seconds"]["fusion"] > 0
        assert (cell["predicted"] is not None) == (cell["place"]["direction"] == "forward")  # no plan of gradients
        assert cell["notes"]["sdpa cudnn"] == "needs a GPU"
    for model in found["models"]:
        assert model["seconds"].keys() == {"fusion", "eager", "inductor", "inductor, sdpa"} and not model["notes"]
    assert bool(found["models"]) == everything
    assert found["losses"][0]["losses"].keys() == {"eager", "fusion", "seed 1", "seed 2"}
    assert found["kernels"] and found["memory"]
    page = next(tmp_path.glob("*-rehearsal.md")).read_text()
    assert "no figure on this page means anything" in page and "losses: distance from eager's" in page
    assert "No time for: nothing." in page
    assert "no figure on this page means anything" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["check", "tiles", "time"])
def test_what_a_phase_needs_is_compiled_ahead(phase, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rehearse(
        monkeypatch, "--rows", "causal", "--no-models", "--no-training", "--work", phase, "--part", "0", "--ahead", "1"
    )
    assert capsys.readouterr().out == "", "nothing failed"
    kernels = {path.stem for path in tmp_path.rglob("*.cubin")}
    wanted = {"attention_forward", "attention_backward_keys", "attention_backward_queries"}
    assert kernels == (wanted if phase == "tiles" else set()), "elsewhere, the interpreter runs"


def test_a_run_without_time_writes_its_report(monkeypatch, tmp_path):
    rehearse(monkeypatch, "--rows", "full", "--no-models", "--no-training", "--minutes", "0", "--out", str(tmp_path))
    found = found_in(tmp_path)
    assert not found["tried"] and "check full d=16 bfloat16" in next(tmp_path.glob("*.md")).read_text()


def test_a_tile_with_other_results_is_not_timed(monkeypatch):
    from dataclasses import replace

    from benchmarks.gpu.cells import Place
    from benchmarks.gpu.device import Rehearsal, running
    from benchmarks.gpu.tuning import take, trials
    from fusion.codegen.triton.variant import Variant

    device, tuned, launch = Rehearsal(), [], Variant.launch
    place = Place(row="full", direction="forward", B=1, H=1, N=40, d=16, dtype="float32")

    def spoilt(variant, name, programs, tile, fixed, arguments):
        launch(variant, name, programs, tile, fixed, arguments)
        if tile == wrong.tile:
            arguments[2]["out"].mul_(1.01)

    with running(device):
        first = next(trials(place, device))
        wrong = replace(first, tile=replace(first.tile, rows=16))
        monkeypatch.setattr(Variant, "launch", spoilt)
        take(wrong, tuned, device)
        take(first, tuned, device)
    (found,) = tuned
    assert list(found.seconds) == [str(first.tile)] and list(found.failed) == [str(wrong.tile)]


def test_a_rehearsal_is_never_kept_among_the_results(capsys):
    from benchmarks.gpu import __main__ as gpu

    with pytest.raises(SystemExit):
        gpu.parse(["--rehearse", "--out", str(ROOT / "benchmarks" / "results")])
    assert "another folder" in capsys.readouterr().err


def test_targets_take_the_worst_figure():
    from benchmarks.gpu.report import Target

    assert Target(title="speed", needed=1.1, values={"here": 1.5, "there": 1.0}).met is False
    assert Target(title="speed", needed=1.1, values={"here": 1.5}).line()[-1] == "met"
    assert Target(title="noise", needed=1, at_most=True, values={"here": 0.2, "there": 2.0}).worst == ("there", 2.0)
    assert Target(title="speed", needed=1.1, values={}).line()[-1] == "not measured"
    assert Target(title="noise", needed=1, at_most=True, values={"here": float("nan")}).met is False


def test_findings_survive_in_a_file(tmp_path):
    from benchmarks.gpu.cells import Cell, Place
    from benchmarks.gpu.findings import Findings
    from benchmarks.gpu.models import Losses, Memory

    place = Place(row="full", direction="forward", B=1, H=2, N=8, d=16, dtype="bfloat16")
    found = Findings(environment={"versions": {}}, device="none", rehearsal=False)
    found.cells.append(Cell(place=place, flop=1.0, bytes=2.0, seconds={"fusion": 1.0}))
    found.losses.append(Losses(model="llama", steps=1, losses={"eager": [1.0]}))
    found.memory.append(Memory(model="llama", bytes={"fusion": {1024: 10, 2048: 40}}))
    found.write(tmp_path / "found.json")
    assert Findings.read(tmp_path / "found.json") == found
    assert found.memory[0].growth("fusion") == 2


def test_a_crash_and_a_hang_cost_one_step_each(tmp_path):
    from fusion.codegen.triton.apart import run_restarting

    state, child, reasons = tmp_path / "state", tmp_path / "child.py", []
    state.write_text("")
    child.write_text(CHILD)
    run_restarting([sys.executable, "-S", str(child), str(state)], state, time.time() + 60, lambda: 1.0, reasons.append)
    assert reasons == ["the process ended with status 7", "no answer within 1 s"]
    assert state.read_text().split() == ["good", "crash", "hang", "last"]


def test_rounding_of_weights_is_to_a_neighbour_and_fair():
    import torch

    from benchmarks.gpu.models import stochastically_rounded

    weights = torch.full((20000,), 1.0 + 2**-9)  # a quarter of the way between two neighbours
    for dtype, share in ((torch.bfloat16, 0.25), (torch.float16, 0.0)):
        rounded = stochastically_rounded(weights, dtype, torch.Generator().manual_seed(0))
        assert torch.equal(rounded, rounded.to(dtype).float())
        assert_within(rounded.sub(weights).abs(), torch.finfo(dtype).eps)
        assert abs((rounded > weights).float().mean() - share) < 0.02


@pytest.mark.parametrize("gradients", [False, True])
def test_a_kernel_that_fails_is_not_replaced(monkeypatch, gradients):
    """Elsewhere the reference interpreter steps in; here it would be measured."""
    import torch

    from benchmarks.common.rows import GPU_ROWS, Problem
    from benchmarks.gpu.check import draw
    from benchmarks.gpu.device import Rehearsal, failures_raised, interpreted
    from fusion.codegen.triton.variant import Variant

    def broken(*arguments):
        raise RuntimeError("out of registers")

    device = Rehearsal()
    operands, _ = draw("full", Problem(H=1, N=5, d=16, dtype=torch.float32), device)
    operands = tuple(x.requires_grad_(gradients) for x in operands)
    torch._dynamo.reset()
    with interpreted(), failures_raised():
        monkeypatch.setattr(Variant, "launch", broken)
        with pytest.raises(RuntimeError, match="out of registers"):
            device.compiled(GPU_ROWS["full"].plain, "fusion")(*operands)
