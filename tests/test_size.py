"""Files and functions of the product that a person can take in: at most 400 lines a file, 40 a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("fusion", "passes", "codegen") for path in (ROOT / folder).rglob("*.py")
               if not {"passes", "codegen"} & set(path.relative_to(ROOT / folder).parts[:-1]))  # fmt: skip
MOST_LINES, MOST_OF_A_FUNCTION = 400, 40


def too_long(text: str) -> Iterator[str]:
    """What is too long in a file, and how long it is."""
    if (lines := len(text.splitlines())) > MOST_LINES:
        yield f"the file: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
            if (lines := node.end_lineno - first + 1 if node.end_lineno else 0) > MOST_OF_A_FUNCTION:
                yield f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_and_its_functions_are_short(path: Path) -> None:
    assert list(too_long(path.read_text())) == []


def test_long_ones_are_seen() -> None:
    body = "    pass\n" * 40
    assert list(too_long(f"def f():\n{body}")) == ["f: 41 lines"]
    assert list(too_long("x = 1\n" * 401)) == ["the file: 401 lines"]
    assert not list(too_long(f"def f():\n{body[9:]}"))
    assert len(FILES) > 200
