"""README.md: its program prints what the page says, and its figures are those of the result files.

README_PYTHON is the interpreter that runs the program: `.ci/dist` names that of an environment with the wheel alone.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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
    python = os.environ.get("README_PYTHON", sys.executable)
    run = subprocess.run([python, "attention.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert portable(run.stdout) == portable(textwrap.dedent(OUTPUT))


def test_the_first_figures_are_those_of_the_output():
    claim = re.search(r"takes (.*?), in (.*?) of memory;\s+with\s+Inductor alone (.*?) and (.*?)\.\n", README)
    measured = re.findall(r"^ +(inductor|fusion) +(\d\S* \w+) +\S+x +(\d\S* \w+)", OUTPUT, flags=re.M)
    rows = {name: figures for name, *figures in measured}
    assert claim is not None and claim.groups() == (*rows["fusion"], *rows["inductor"])


def test_the_table_of_speeds_is_that_of_the_result_files():
    page = README.partition(front_page.BEGIN)[2].partition(front_page.END)[0]
    assert page == front_page.table(), "python -m benchmarks.docs.front_page --write"


def test_the_architectures_are_those_of_the_survey():
    """Compared, attentions and wrong ones."""
    total = re.search(r"^\| all \|(.*)\|$", (ROOT / "docs" / "compatibility.md").read_text(), flags=re.M)
    assert total is not None
    _, compared, _, sites, _, share, wrong = (cell.strip() for cell in total[1].split("|"))
    claim = r"(\d+) architectures of .*?, (\d+) % of ([\d,]+) attentions fused,\s+(\w+)\s+wrong"
    quoted = re.search(claim, README, flags=re.S)
    assert quoted is not None and quoted[1] == compared and quoted[3].replace(",", "") == sites
    assert int(quoted[2]) == round(float(share.rstrip("%"))) and quoted[4] == "none" and wrong == "0"
