"""Features beside the way of a graph: without the files of one, and the lines that name it, the rest works.

What remains without all of them is the core. `python -m tests.test_rooms` counts the lines of its files: those of
fusion/ and passes/ of which a function runs while plain, masked, biased and grouped attention are compiled, proved and
run, in inference and in training, on a CPU; and those lines without the functions that do not run. (Functions that run
when a module is imported, to make its tables, do not count.)
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "rows that nothing reads": (["passes/prepare/unread_rows.py"], ["skip_unread_rows"]),
    "tables by distance": (["passes/prepare/distances.py"], ["read_by_distance"]),
    "divisions behind the product": (["passes/prepare/late_division.py"], ["move_divisions"]),
    "repeated calls": (["passes/trace/repeats.py"], ["copy_repeated_calls"]),
    "rewritten operations": (
        ["passes/trace/rewrites.py"], ["rewrites", "make_by_size", "fill_by_masks", "write_products", "read_floats"],
    ),
    "nested tensors": (["passes/tensors/nested.py", "fusion/integrations/nested_tensors.py"], ["nested"]),
    "DTensors": (
        ["passes/tensors/dtensor.py", "fusion/runtime/dtensor.py"],
        [r"(?<!marks\.)dtensor", r"torch\.distributed\.tensor"],
    ),
    "graphs in the graph": (
        ["fusion/subgraphs.py", "passes/subgraphs.py"],
        ["subgraphs", "fuse_transformed", "fuse_checkpointed"],
    ),
    "keys selected for a row": (["passes/specify/gathered_keys.py"], ["read_sets", "with_merged_heads"]),
    "auxiliary outputs": (
        ["passes/specify/aux_outputs.py"], ["split_extrema", "aux_outputs import", "uses_of", r"materialize\(graph"],
    ),
    "maps of tiles": (["passes/specify/tile_maps.py"], ["map_tiles", r"specify\.tile_maps"]),
    "sharded sequences": (["fusion/sequences"], ["sequences"]),
    "pictures of regions": (["fusion/report/drawings.py", "fusion/report/page.py"], ["drawings"]),
    "writes in place": (["passes/trace/inplace.py"], ["write_to_the_whole", "make_functional"]),
    "casts": (["passes/trace/autocast.py"], ["write_casts", "cast_before_expansions"]),
    "linear layers": (["fusion/linear"], [r"linear(?=\.|,|$)"]),
    "caches of keys and values": (["passes/pullback/caches.py"], ["behind_cache"]),
}  # fmt: skip
"""By name: its files, and the words (regular expressions) by which lines of the doors name it."""
DOORS = (
    "fusion/__init__.py", "fusion/backend.py", "fusion/decide.py", "fusion/inner_compiler.py",
    "passes/replace.py", "passes/trace/normalize.py",
    "passes/pullback/operands.py", "passes/specify/calls.py", "passes/specify/specify.py", "fusion/runtime/dtensor.py",
)  # fmt: skip
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
    """A module without the statements of one line that name one of these, and without their names in its imports."""
    named = re.compile(rf"\b({'|'.join(words)})(\b|_)")
    lines = []
    for line in text.splitlines(keepends=True):
        start, several, names = line.partition(" import ")
        if several and not named.search(start) and "," in names:
            names = ", ".join(name for name in names.strip().split(", ") if not named.search(name)) + "\n"
            line = f"{start} import {names}" if names.strip() else ""
        lines.append("" if named.search(line) else line)
    return "".join(lines)


TRACED = """
import os, sys, threading
folder, ran = os.getcwd(), set()
def note(frame, event, _):
    place = frame.f_code.co_filename, frame.f_code.co_firstlineno
    if event == "call" and place[0].startswith(folder) and place not in ran:
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == "<string>":
            ran.add(place)
threading.setprofile(note)
sys.setprofile(note)
"""
"""Program before `CORE` that notes the functions that run: file and first line, that of a decorator if there is one."""


def emptied(folder: Path, names: list[str]) -> None:
    """Copy the product to a folder, without these rooms."""
    for top in ("fusion", "passes", "codegen"):
        shutil.copytree(ROOT / top, folder / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (file for name in names for file in ROOMS[name][0]):
        shutil.rmtree(folder / file) if (folder / file).is_dir() else (folder / file).unlink()
    for door in filter(Path.exists, map(folder.__truediv__, DOORS)):
        door.write_text(without([word for name in names for word in ROOMS[name][1]], door.read_text()))


def run(folder: Path, program: str, **environment: str) -> str:
    """Output of a program that imports the product of a folder."""
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | environment
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in ROOMS), "all of them"])
def test_the_core_works_without(name: str, tmp_path: Path) -> None:
    emptied(tmp_path, list(ROOMS) if name == "all of them" else [name])
    assert run(tmp_path, CORE).endswith("passed\n")


def core() -> dict[str, tuple[int, int]]:
    """Lines of the core, by file: all, and those without the functions that do not run."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as cache:
        folder = Path(name).resolve()
        emptied(folder, list(ROOMS))
        program = f"{TRACED}\n{CORE}\nsys.setprofile(None)\nfor place in ran: print(*place)"
        ran: dict[Path, set[int]] = {}
        for line in run(folder, program, TORCHINDUCTOR_CACHE_DIR=cache).splitlines()[1:]:
            name, _, first = line.rpartition(" ")
            ran.setdefault(Path(name).resolve(), set()).add(int(first))
        counts = {path.relative_to(folder).as_posix(): _lines(path, firsts) for path, firsts in ran.items()}
    return {name: count for name, count in sorted(counts.items()) if not name.startswith("codegen/")}


def _lines(path: Path, ran: set[int]) -> tuple[int, int]:
    """Lines of a file, and those without its functions of which no line in `ran` is the first."""
    text = path.read_text()
    everything, idle = len(text.splitlines()), set[int]()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            own = range(first, (function.end_lineno or first) + 1)
            idle |= set() if ran & set(own) else set(own)
    return everything, everything - len(idle)


if __name__ == "__main__":
    counted = core()
    for name, (everything, run_lines) in counted.items():
        print(f"{everything:5} {run_lines:5} {name}")
    totals = [sum(column) for column in zip(*counted.values(), strict=True)]
    print(f"{totals[0]} lines in {len(counted)} files, {totals[1]} without the functions that do not run")
