"""benchmarks/progress.py: which measurements it compares, and the page of those that are there."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import progress

    return progress


def result(folder: Path, day: int, commit: str, medians: dict, cpu: str = "a", n: int = 64) -> None:
    """A result file with one cell."""
    environment = {"date": f"2026-01-{day:02} 10:00 UTC", "commit": commit, "cpu": cpu, "threads": 2}
    entries = {name: {"median": median} for name, median in medians.items()}
    row = {"title": "causal", "B": 1, "H": 2, "N": n, "d": 16, "dtype": "fp32", "entries": entries}
    (folder / f"{day}.json").write_text(json.dumps({"environment": environment, "rows": [row]}))


def test_the_fastest_peer_of_the_same_run_counts(progress, tmp_path):
    result(tmp_path, 2, "second", {"fusion": 1.0, "sdpa": 3.0, "flex": None, "inductor": 9.0, "read": 0.1})
    result(tmp_path, 1, "first", {"fusion": 2.0, "sdpa": 3.0, "flex": 2.5, "eager": 1.0})
    ((name, entries),) = progress.again(progress.cells(tmp_path)).items()
    assert name == "causal, B = 1, H = 2, N = 64, d = 16, fp32"
    assert [(entry.commit, entry.ratio, entry.peer) for entry in entries] == [
        ("first", 1.25, "flex"), ("second", 3.0, "sdpa"),
    ]  # fmt: skip
    text = progress.page(progress.cells(tmp_path), "picture.svg")
    assert f"| {name} | 2026-01-01 first | 1.25x of flex | 2026-01-02 second | 3.00x of sdpa | +140 % |" in text


def test_other_machines_other_sizes_and_single_measurements_are_not_compared(progress, tmp_path):
    result(tmp_path, 1, "first", {"fusion": 1.0, "sdpa": 2.0})
    result(tmp_path, 2, "second", {"fusion": 1.0, "sdpa": 2.0}, cpu="b")
    result(tmp_path, 3, "third", {"fusion": 1.0, "sdpa": 2.0}, n=65)
    result(tmp_path, 4, "fourth", {"fusion": 1.0})
    result(tmp_path, 5, "fifth", {"fusion": None, "sdpa": 1.0})
    assert progress.again(progress.cells(tmp_path)) == {}
    assert "2 more cells were measured at one commit" in progress.page(progress.cells(tmp_path), "picture.svg")


def test_the_page_holds_measurements_that_are_in_the_files(progress):
    """It may be older than the newest file, but says nothing that no file says."""
    measured = progress.cells(ROOT / "benchmarks" / "results")
    rows = re.findall(r"^\| (.+?) \| \S+ (\S+) \| ([\d.]+)x of (.+?) \| \S+ (\S+) \| ([\d.]+)x of (.+?) \|",
                      (ROOT / "docs" / "progress.md").read_text(), flags=re.M)  # fmt: skip
    assert len(rows) > 10
    for name, *ends in rows:
        found = {(entry.commit, f"{entry.ratio:.2f}", entry.peer) for entry in measured[name] if entry.ratio}
        assert {tuple(ends[:3]), tuple(ends[3:])} <= found, name


def test_the_picture_is_drawn_the_same_way_twice(progress, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for day, ours in ((1, 2.0), (2, 1.0)):
        result(tmp_path, day, f"commit{day}", {"fusion": ours, "sdpa": 3.0})
    pictures = []
    for _ in range(2):
        command = ["progress", "--results", tmp_path, "--page", tmp_path / "page.md", "--figure", tmp_path / "p.svg"]
        monkeypatch.setattr(sys, "argv", [*map(str, command)])
        progress.main()
        pictures.append((tmp_path / "p.svg").read_text())
    assert pictures[0] == pictures[1] and "causal, N = 64, d = 16" in pictures[0] and "commit2" in pictures[0]
    assert "(p.svg)" in (tmp_path / "page.md").read_text()
