"""The diffs of docs/extending.md, applied to a copy of the package and run."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.numerics import assert_same_in_float64

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def diff(heading: str) -> str:
    """The diff of a section. Blank lines of an indented block are lines of context."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    block = re.findall(r"(?:    .*\n|\n)+", section[section.index("    --- a/") :])[0]
    lines = textwrap.dedent(block).rstrip("\n").splitlines()
    return "\n".join(line or " " for line in lines) + "\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and of the examples."""
    for name in ("fusion", "passes", "codegen", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def applied(package: Path, heading: str, *options: str) -> list[str]:
    """Files that the diff of a section changes, in the copy."""
    text = diff(heading)
    subprocess.run(["git", "apply", *options, "-"], input=text, text=True, check=True, cwd=package)
    return re.findall(r"^\+\+\+ b/(.*)$", text, flags=re.M)


def run(package: Path, *arguments: str) -> str:
    """What Python prints, run on the copy."""
    done = subprocess.run([sys.executable, *arguments], cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


COUNTED = """
from examples.io_model.__main__ import main
for line in ("--N 4096 --M 40000", "--symbolic --schedule two_pass"):
    assert main(line.split()) == 0
    print("next")
import numpy as np
from examples.io_model import counts
from examples.simulate.schedules import run
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=shape) for shape in ((13, 5), (22, 5), (22, 3)))
tile = {"B_r": 4, "B_c": 6}
memory = run("two_pass", q, k, v, capacity=10**4, tile=tile)
found = counts("two_pass", {"N_q": 13, "N_k": 22, "d": 5, "d_v": 3, "M": 10**4, "live": 1, "r": 1}, tile)
weights = np.exp(q @ k.T / np.sqrt(5))
assert (memory.loads, memory.stores) == (found.reads, found.writes) and memory.peak <= found.footprint
print(abs(memory.result("O") - weights / weights.sum(1, keepdims=True) @ v).max())
"""


def test_a_schedule_takes_two_places_and_its_kernel_is_the_third(package):
    assert len(applied(package, "A schedule")) == 2
    table, text, error = run(package, "-c", COUNTED).split("next\n")
    (row,) = [line.split() for line in table.splitlines() if line.split()[:1] == ["two_pass"]]
    assert row[1] == "none"
    assert "two_pass: statistics first" in text and "; no kernel (" in text and "B_r* = " in text
    assert_same_in_float64(float(error) + 1, 1)


UNDERSTOOD = """
import math
from fusion.ir.expr import SCORE, I, J, const
from fusion.ir.integers import add
from fusion.ir.ops import apply, where
from fusion.passes.specify.masks import understand
live = apply("ilt", J, apply("imax", add(I, 1), const(7)))
print(understand(where(live, SCORE, const(-math.inf))).key_hi)
"""


def test_a_predicate_that_bounds_keys_takes_one_place(package):
    """The page shows one that is there: without it the mask bounds nothing."""
    assert run(package, "-c", UNDERSTOOD) == "max(i1 + 1, 7)\n"
    assert applied(package, "A mask fact", "-R") == ["passes/specify/masks.py"]
    assert run(package, "-c", UNDERSTOOD) == "None\n"
