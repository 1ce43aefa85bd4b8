"""Docstrings of the product, those of its constants among them, begin with a noun or a verb of the field, which a
stranger understands at first reading."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("fusion", "passes", "codegen") for path in (ROOT / folder).rglob("*.py")
               if not {"passes", "codegen"} & set(path.relative_to(ROOT / folder).parts[:-1]))  # fmt: skip

RIDDLE = re.compile(r"(What|Of|How|Where|Which|As|The same|Likewise)\b")


def riddles(text: str) -> Iterator[str]:
    """First lines of a file's docstrings that begin with another word than a noun or verb. A string that stands alone
    is a docstring: of a module, a class, a function, or the assignment before it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if RIDDLE.match(docstring := node.value.value.strip()):
                yield docstring.splitlines()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_begin_with_a_noun_or_a_verb(path: Path) -> None:
    assert list(riddles(path.read_text())) == []


def test_riddles_are_seen() -> None:
    assert list(riddles('def f():\n    """Of rows: their scale."""')) == ["Of rows: their scale."]
    assert list(riddles('"""What it is.\n\nMore."""\nclass A:\n    """As before."""')) == ["What it is.", "As before."]
    assert list(riddles('A = 1\n"""How many there are."""')) == ["How many there are."]
    assert not list(riddles('"""Offsets of rows."""\ndef f():\n    """Scale of rows, whatever it is."""'))
    assert len(FILES) > 200
