"""README.md: its program prints what the page says, and its figures are those of the result files.

README_PYTHON is the interpreter that runs the program: `.ci/dist` names that of an environment with the wheel alone,
where the program must end within three minutes.
"""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.docs import front_page

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)[0]
OUTPUT = README.partition("It prints\n\n")[2].partition("\n\n![")[0]


def portable(output: str) -> list[str]:
    """The lines of the program's output, without what depends on the machine: folders, the plan, times and errors."""
    output = re.sub(r"at( +)\S*?(attention\.py:)", r"at\1\2", output)
    report, _, measured = output.partition("    plan ")
    lines = [re.sub(r", \d+ % computed.*", "", line) for line in report.splitlines() if "verdict" not in line]
    return lines + [
        line.split()[0] for line in measured.splitlines() if re.match(r"measured|eager|inductor|fusion", line)
    ]


def test_the_program_prints_what_the_page_says(tmp_path: Path):
    (tmp_path / "attention.py").write_text(PROGRAM)
    python = os.environ.get("README_PYTHON")
    command = [python or sys.executable, "attention.py"]
    start, limit = time.perf_counter(), 180 if python else None
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=limit)
    print(f"README's program took {time.perf_counter() - start:.0f} s")
    assert run.returncode == 0, run.stderr
    assert portable(run.stdout) == portable(textwrap.dedent(OUTPUT))


def test_the_first_figures_are_those_of_the_output():
    claim = re.search(r"takes (.*?), in (.*?) of memory;\s+with\s+Inductor alone (.*?) and (.*?)\.\s", README)
    measured = re.findall(r"^ +(inductor|fusion) +(\d\S* \w+) +\S+x +(\d\S* \w+)", OUTPUT, flags=re.M)
    rows = {name: figures for name, *figures in measured}
    assert claim is not None and claim.groups() == (*rows["fusion"], *rows["inductor"])


@pytest.mark.parametrize("page", front_page.PAGES, ids=lambda page: page.name)
def test_the_tables_of_speeds_are_those_of_the_result_files(page: Path):
    written = page.read_text().partition(front_page.BEGIN)[2].partition(front_page.END)[0]
    assert written == front_page.PAGES[page](), "python -m benchmarks.docs.front_page --write"


def test_the_architectures_are_those_of_the_survey():
    """Tried, compared, with attention, attentions and wrong ones."""
    tried, compared, having, sites, _, share, wrong = totals("compatibility")
    claim = (r"([\d,]+) architectures of .*? (\d+) of them ran, .*?: none wrong, and (\d+) % of the ([\d,]+) attentions"
             r" in (\d+) of them fused")  # fmt: skip
    quoted = re.search(claim, " ".join(README.split()))
    assert quoted is not None and wrong == "0"
    percent = str(round(float(share.rstrip("%"))))
    assert [figure.replace(",", "") for figure in quoted.groups()] == [tried, compared, percent, sites, having]


def test_the_gradients_are_those_of_the_survey():
    tried, compared, *_, wrong = totals("compatibility-in-training")
    claim = r"Of (\d+) architectures .*? the gradients of (\d+) were .*?, and those of (\d+) are beyond the rule"
    quoted = re.search(claim, " ".join(README.split()))
    assert quoted is not None and quoted.groups() == (tried, compared, wrong)


def totals(page: str) -> list[str]:
    """The row of all packages in a survey's table."""
    row = re.search(r"^\| all \|(.*)\|$", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.M)
    assert row is not None
    return [cell.strip() for cell in row[1].split("|")]


def test_the_output_has_no_figure_of_a_kernels_text():
    """They change with every change of a kernel, and no test could tell."""
    assert "kernel   ... lines: report.sites[0].sources[0]\n" in OUTPUT
    assert not re.search(r"\d+ lines: report|\d+ loops", OUTPUT)
