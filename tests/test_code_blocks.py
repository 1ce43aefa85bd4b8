"""Every code block of README and docs runs: Python as it stands, `fusion` commands through the command line."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusion
from fusion.cli import COMMANDS, main, parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / 4, -1) @ v

attend = Model()

def inputs():
    return tuple(torch.randn(1, 2, 33, 16) for _ in range(3))

batch = dict(zip("qkv", inputs()))

def gram(x):
    return torch.softmax(x @ x.mT, -1) @ x
"""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> list[str]:
    """Lines of indented blocks that call `fusion`, without their comments."""
    found = re.findall(r"^    (?:\$ )?(fusion [a-z].*)$", page.read_text(), flags=re.M)
    return [line.partition("  #")[0].strip() for line in found]


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / 4, -1) @ v


@pytest.fixture
def space(tmp_path: Path, monkeypatch) -> Iterator[dict]:
    """What the pages take for granted: a model, its inputs, and the imports. Files go to an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("model.py", "data.py", "package/model.py"):
        (tmp_path / name).write_text(MODEL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    model, inputs = Model(), tuple(torch.randn(1, 2, 33, 16) for _ in range(3))
    yield {"torch": torch, "fusion": fusion, "model": model, "inputs": inputs, "pipeline": lambda text: model(*inputs)}


ELSEWHERE = ("README.md", "integrations.md")
"""Pages whose blocks run elsewhere: tests/test_readme.py, and tests/integrations/, which has models for them."""


@pytest.mark.parametrize(
    "page", [p for p in PAGES if python_blocks(p) and p.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_python_blocks_run_in_order(page: Path, space: dict, tmp_path: Path) -> None:
    if page.name == "extending.md":
        space |= vars(__import__("fusion.passes.pullback.pointwise", fromlist=["_"]))
        space["BUILDERS"] = dict(space["BUILDERS"])  # the page adds to it
    for number, block in enumerate(python_blocks(page)):
        file = tmp_path / f"block_{number}.py"
        file.write_text(block)  # so that reports can show its lines
        with torch.set_grad_enabled(".backward()" in block):
            exec(compile(block, str(file), "exec"), space)


@pytest.mark.parametrize("line", dict.fromkeys(line for page in PAGES for line in commands(page)))
def test_a_command_runs(line: str, space: dict, capsys) -> None:
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_every_option_of_a_command(name: str) -> None:
    """In a line that the test above runs."""
    (found,) = [action.choices for action in parser()._actions if isinstance(action.choices, dict)]
    options = {option for action in found[name]._actions for option in action.option_strings} - {"-h", "--help"}
    lines = [line.split() for line in commands(ROOT / "docs" / "command-line.md")]
    used = {word for line in lines if line[1] == name for word in line}
    assert options - used == set()


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """A fence in another language would be a block that nothing executes."""
    for page in PAGES:
        fences = re.findall(r"^```(\w*)$", page.read_text(), flags=re.M)
        assert set(fences) <= {"python", ""} and fences.count("python") == fences.count(""), page.name


def test_examples_that_pages_name_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"(?:python3? |\()(?:\.\./)?((?:examples|benchmarks)/\w+\.py)", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_the_near_miss_of_the_page_is_what_is_printed(space: dict, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "reading-a-report.md"
    block = next(block for block in python_blocks(page) if "tanh(w)" in block)
    (tmp_path / "model.py").write_text(block)
    exec(compile(block, str(tmp_path / "model.py"), "exec"), space)
    printed = capsys.readouterr().out
    shown = page.read_text().split("and what to do:\n\n")[1].split("\n\n")[0]
    for line in shown.splitlines():
        assert line.removeprefix("    ") in printed, line
