"""FUSION_DUMP and the artifacts of TORCH_TRACE."""

import logging
import subprocess
import sys
from pathlib import Path

import torch

import fusion
from fusion.report.dump import attributes
from fusion.report.scripts import graph_program
from tests.numerics import assert_as_exact_as_eager, assert_same, wide


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        s = torch.where(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), q @ k.mT, float("-inf"))
        return torch.softmax(s, -1) @ v


def attend(q):
    return torch.softmax(q @ q.mT, -1) @ q


def test_every_stage_is_a_program_that_runs_and_gives_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path / "dump"))
    with torch.no_grad():
        fusion.explain(Model(), torch.randn(2, 9, 16))
    (folder,) = (tmp_path / "dump").iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "00_dynamo.py", "01_normalized.py", "02_rewritten.py", "03_attention_0.py", "04_plan_0.txt", "05_kernel_0.mlir",
        "06_report.txt",
    ]  # fmt: skip
    results, exact = [], []
    for name in names[:3]:
        space: dict = {"__name__": "dumped", "__file__": str(folder / name)}
        exec(compile((folder / name).read_text(), name, "exec"), space)
        results.append(space["Graph"]()(*space["inputs"]())[0])
        exact.append(space["Graph"]().double()(*wide(space["inputs"]()))[0] if name == names[0] else None)
    assert_same(results[1], results[0])
    assert_as_exact_as_eager(results[2], results[0], exact[0])
    assert "fusion.attention" in (folder / "02_rewritten.py").read_text()
    assert "func.func @attention" in (folder / "05_kernel_0.mlir").read_text()
    assert "bound" in (folder / "04_plan_0.txt").read_text()
    assert "1 of 1" in (folder / "06_report.txt").read_text()


def test_a_dumped_file_runs_by_itself(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    fusion.explain(attend, torch.randn(1, 3, 4))
    file = tmp_path / "graph_000" / "02_rewritten.py"
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor(")


def test_every_graph_has_a_folder_of_its_own(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    for n in (3, 4):
        fusion.explain(attend, torch.randn(1, n, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph_000", "graph_001"]


def test_sizes_that_vary_are_filled_in(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    options = {"inner": "eager"}
    compiled = torch.compile(attend, backend="fusion", dynamic=True, options=options)
    compiled(torch.randn(1, 7, 4))
    space: dict = {"__name__": "dumped", "__file__": str(tmp_path)}
    exec((tmp_path / "graph_000" / "02_rewritten.py").read_text(), space)
    (q,) = (x for x in space["inputs"]() if isinstance(x, torch.Tensor))
    (result,) = space["Graph"]()(*space["inputs"]())
    assert q.shape == (1, 7, 4)
    assert_as_exact_as_eager(result, attend(q), attend(q.double()))


def test_tensors_of_the_graph_lie_next_to_it(tmp_path: Path):
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 2)))

    held = attributes(traced)
    torch.save(held, tmp_path / "w.pt")
    space: dict = {"__name__": "dumped", "__file__": str(tmp_path / "x.py")}
    exec(graph_program(traced, "w.pt", held), space)
    x = torch.randn(4, 3)
    assert_same(space["Graph"]()(x), traced(x))


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FUSION_DUMP", str(file))
    report = fusion.explain(attend, torch.randn(1, 3, 4))
    assert report.fused == 1
    assert "nothing was written" in caplog.text and "name a folder that can be written" in caplog.text


def test_report_plans_and_kernels_reach_the_structured_trace():
    from torch._logging._internal import trace_log

    class Keep(logging.Handler):
        records: list = []

        def emit(self, record):
            self.records.append(record)

    keeper = Keep()
    trace_log.addHandler(keeper)
    level = trace_log.level
    trace_log.setLevel(logging.DEBUG)
    try:
        fusion.explain(attend, torch.randn(1, 3, 4))
    finally:
        trace_log.removeHandler(keeper)
        trace_log.setLevel(level)
    artifacts = [r.metadata["artifact"]["name"] for r in keeper.records if "artifact" in r.metadata]
    ours = [name for name in artifacts if name.startswith("fusion_")]
    assert ours == ["fusion_plan_0", "fusion_kernel_0", "fusion_report"]


def test_a_failure_is_one_line_on_the_log_with_its_details_in_the_dump(tmp_path: Path, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("a defect\nof two lines")

    monkeypatch.setattr("fusion.backend.find_sites", broken)
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fusion"):
        fusion.explain(Model(), torch.randn(2, 9, 16))
    (record,) = [record for record in caplog.records if "left to the inner compiler" in record.getMessage()]
    assert record.exc_info is None and "\n" not in record.getMessage()
    assert record.getMessage().endswith(f"RuntimeError: a defect; details in {tmp_path}")
    (text,) = (file.read_text() for file in tmp_path.rglob("*failure.txt"))
    assert "Traceback" in text and "of two lines" in text
