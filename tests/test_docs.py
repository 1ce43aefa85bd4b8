"""What the pages claim about the code that can be checked by reading: links, options, make targets."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fusion.options import Options

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_options_page_lists_the_options() -> None:
    lines = (ROOT / "docs" / "options.md").read_text().splitlines()
    listed = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in lines if line.startswith("| `"))}
    assert set(listed) == {field.name for field in fields(Options)}
    for field in fields(Options):
        assert listed[field.name][3].strip() in {f"`{field.default!r}`", f'`"{field.default}"`'}, field.name
        for choice in get_args(get_type_hints(Options)[field.name]):
            written = f'`"{choice}"`' if isinstance(choice, str) else f"`{choice!r}`"
            assert written in listed[field.name][2], f"{field.name}: {choice}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        blocks = re.findall(r"(?:`|^    )make ([a-z ]+?)(?=`| ARGS| *#|$)", page.read_text(), flags=re.M)
        named = {word for block in blocks for word in block.split()}
        assert named <= targets, f"{page.name} names make targets that do not exist: {sorted(named - targets)}"
