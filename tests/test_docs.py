"""What the pages claim about the code that can be checked by reading: links, options, make targets."""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import fusion
from fusion.options import Options
from fusion.report.data import ATTENTION, SITE

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_links_are_headings(page: Path) -> None:
    """Where the site gives a heading its anchor: words in small letters, between hyphens."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), flags=re.M)
        anchors = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
        assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_options_page_lists_the_options() -> None:
    lines = (ROOT / "docs" / "options.md").read_text().splitlines()
    listed = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in lines if line.startswith("| `"))}
    assert set(listed) == {field.name for field in fields(Options)}
    for field in fields(Options):
        assert listed[field.name][3].strip() in {f"`{field.default!r}`", f'`"{field.default}"`'}, field.name
        hint = get_type_hints(Options)[field.name]
        for choice in get_args(hint) if get_origin(hint) is Literal else ():
            written = f'`"{choice}"`' if isinstance(choice, str) else f"`{choice!r}`"
            assert written in listed[field.name][2], f"{field.name}: {choice}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        blocks = re.findall(r"(?:`|^    )make ([a-z ]+?)(?=`| ARGS| *#|$)", page.read_text(), flags=re.M)
        named = {word for block in blocks for word in block.split()}
        assert named <= targets, f"{page.name} names make targets that do not exist: {sorted(named - targets)}"


def test_a_name_is_defined_in_the_file_that_a_page_names() -> None:
    """`name` (`file.py`), `name` in `file.py`, `file.py` (`name`)."""
    for page in PAGES:
        text = page.read_text()
        places = re.findall(r"`([\w.]+)`,?\s+(?:\(|in\s+)`((?:passes|codegen|fusion)/[\w/]+\.py)`", text)
        places += [(name, file) for file, name in re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`", text)]
        for name, file in places:
            plain = name.rpartition(".")[2]
            defined = rf"^ *(?:def|class) {plain}\b|^(?:\w+, )*{plain}(?:, \w+)*(?::.*)? \|?= |\"{plain}\""
            assert re.search(defined, (ROOT / file).read_text(), flags=re.M), f"{page.name}: {name} in {file}"


def test_every_label_of_a_report_is_explained() -> None:
    words = {*SITE.values(), *ATTENTION.values()}
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    assert len(words) > 10
    assert {word for word in words if f"**{word}" not in page} == set()


def test_reasons_that_the_page_explains_are_given() -> None:
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    given = "".join(file.read_text() for part in ("passes", "fusion/runtime") for file in (ROOT / part).rglob("*.py"))
    reasons = re.findall(r'^\| "([^"]+)"', page, flags=re.M)
    assert len(reasons) > 5 and [reason for reason in reasons if reason not in given] == []


def test_the_api_page_lists_what_the_package_offers() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.M)
    assert sorted(name.rpartition(".")[2] for name in listed) == sorted(fusion.__all__)
    for path in listed:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is getattr(fusion, name)


def test_the_site_has_every_page_and_leads_nowhere_outside(tmp_path: Path) -> None:
    """mkdocs itself warns of pages without a place and of links and anchors that do not exist."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        built = tmp_path / ("" if page.stem == "index" else page.stem) / "index.html"
        assert not re.search(r'href="?(?:\.\./)+(?:benchmarks|tests|README)', built.read_text()), page.name
