"""Features beside the way of a graph: without the files of one, and the lines that name it, the rest works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "rows that nothing reads": (["passes/prepare/unread_rows.py"], "skip_unread_rows"),
    "tables by distance": (["passes/prepare/distances.py"], "read_by_distance"),
    "divisions behind the product": (["passes/prepare/late_division.py"], "MOVE_DIVISIONS"),
    "cascades": (["passes/prepare/cascades.py"], "cascades"),
    "sharded sequences": (["fusion/sequences"], "sequences"),
}
"""By name: its files, and the word by which lines of the doors name it."""
DOORS = ("fusion/backend.py", "fusion/decide.py", "fusion/runtime/dtensor.py")
CORE = """
import torch
import torch.distributed.tensor  # so that the rule of DTensors is there, too
import fusion
from tests.numerics import assert_as_exact_as_eager, wide

def plain(q, k, v): return torch.softmax(q @ k.mT / 8, -1) @ v
def masked(q, k, v):
    i, j = torch.arange(70)[:, None], torch.arange(70)
    return torch.softmax((q @ k.mT / 8).masked_fill(j > i, float("-inf")), -1) @ v
def biased(q, k, v): return torch.softmax(q @ k.mT / 8 + q.sum(-1, keepdim=True) * torch.arange(70.0), -1) @ v
def grouped(q, k, v): return plain(q, k[:, :1].repeat_interleave(2, 1), v[:, :1].repeat_interleave(2, 1))

for function in (plain, masked, biased, grouped):
    for trained in (False, True):
        inputs = [torch.randn(1, 2, 70, 64, requires_grad=trained) for _ in range(3)]
        with fusion.collect_reports() as reports:
            out = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})(*inputs)
        assert sum(report.fused for report in reports) == 1, reports
        exactly = [x.requires_grad_(trained) for x in wide(inputs)]
        eager, exact = function(*inputs), function(*exactly)
        assert_as_exact_as_eager(out, eager, exact)
        if trained:
            ends = ((out, inputs), (eager, inputs), (exact, exactly))
            for gradients in zip(*(torch.autograd.grad(y.sum(), xs) for y, xs in ends)):
                assert_as_exact_as_eager(*gradients)
print("passed")
"""


def without(words: list[str], text: str) -> str:
    """A module without the statements of one line that name one of these, and the import of it."""
    named = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not named.search(line))


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in ROOMS), "all of them"])
def test_the_core_works_without(name: str, tmp_path: Path) -> None:
    for top in ("fusion", "passes", "codegen"):
        shutil.copytree(ROOT / top, tmp_path / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    rooms = list(ROOMS.values()) if name == "all of them" else [ROOMS[name]]
    for files, _ in rooms:
        for file in files:
            shutil.rmtree(tmp_path / file) if (tmp_path / file).is_dir() else (tmp_path / file).unlink()
    for door in map(tmp_path.__truediv__, DOORS):
        door.write_text(without([word for _, word in rooms], door.read_text()))
    run = subprocess.run(
        [sys.executable, "-c", CORE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.stdout.endswith("passed\n"), run.stderr[-2000:]
