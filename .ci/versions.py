"""The wheel in new environments with other versions of Python and torch, and the table of docs/versions.md.

    python .ci/versions.py build/dist/*.whl                           every combination below whose Python is found
    python .ci/versions.py WHEEL --only 3.10:2.11.0                   one; the table keeps the rows of the others
    python .ci/versions.py WHEEL --only 3.12:2.12.1 --tests tests/passes/test_rewrite.py   tests of the checkout, too

Each environment takes some gigabytes and minutes: torch from the registry brings the libraries of CUDA. It is removed
afterwards. What is tried, in an empty folder: .ci/smoke.py, and README's program (tests/test_readme.py), whose output
is that of README. torch chooses its Triton. With a build of torch for CPUs: --only 3.11:2.13.0+cpu.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from version_table import release, with_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
COMBINATIONS = ("3.10:2.11.0", "3.11:2.13.0", "3.12:2.12.1", "3.13:2.13.0")
"""Python:torch. The oldest of both, the newest that is supported, and between; `make test` runs what is pinned."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", action="append", metavar="PYTHON:TORCH", help="may be given several times")
    parser.add_argument("--tests", action="append", default=[], metavar="FILE", help="tests to run as well")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments are made, and left")
    arguments = parser.parse_args()
    failed = False
    for combination in arguments.only or COMBINATIONS:
        python, _, torch = combination.partition(":")
        folder = arguments.keep or Path(tempfile.mkdtemp(prefix="fusion-versions-"))
        try:
            outcome = tried(
                python, torch, arguments.wheel.resolve(), arguments.tests, folder / combination.replace(":", "-")
            )
        finally:
            if arguments.keep is None:
                shutil.rmtree(folder)
        print(combination, outcome, flush=True)
        failed |= not outcome["result"].startswith("right")
        PAGE.write_text(with_row(PAGE.read_text(), outcome, key))
    return int(failed)


def interpreter(version: str) -> str:
    """The program of a version of Python, in PATH. Raises SystemExit where there is none."""
    found = shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no python{version} in PATH: install it, or leave it out with --only")
    return found


def tried(python: str, torch: str, wheel: Path, tests: list[str], place: Path) -> dict[str, str]:
    """A row of the table. `place` is the environment; one that is there is used as it is."""
    if not place.exists() and (made := run(interpreter(python), "-m", "venv", place)).returncode:
        raise SystemExit(f"python{python} makes no environment: {made.stderr.strip()}")
    own = place / "bin" / "python"
    wanted = [f"torch=={torch}", *(["pytest", "hypothesis", "transformers"] if tests else [])]
    installed = run(own, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted, wheel)
    if installed.returncode:
        lines = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return row({"python": python, "torch": torch}, f"not installed: {lines[0]}")
    with tempfile.TemporaryDirectory() as empty:
        shutil.copy(ROOT / ".ci" / "smoke.py", empty)
        done = run(own, "smoke.py", cwd=empty)
    found = dict(re.findall(r"^(python|torch|triton|torch-mlir) +(\S+)$", done.stdout, flags=re.M))
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        return row(
            {"python": python, "torch": torch} | found, f"wrong: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    environment = {**os.environ, "README_PYTHON": str(own)}
    done = run(sys.executable, "-m", "pytest", "-q", "tests/test_readme.py", "-k", "program", cwd=ROOT, env=environment)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        return row(found, "wrong: README's program prints something else")
    told = "right"
    if tests:
        done = run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=ROOT)
        told += f"; tests: {done.stdout.strip().splitlines()[-1].strip('= ')}"
        print(done.stdout[-4000:], file=sys.stderr)
    return row(found, told)


def run(
    *command: object, cwd: Path | str | None = None, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in env.items() if name != "PYTHONPATH"}  # it would find the checkout
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=clean)


def row(found: dict[str, str], result: str) -> dict[str, str]:
    day = datetime.date.today().isoformat()
    names = ("python", "torch", "triton", "torch-mlir")
    return {**{name: found.get(name, "") for name in names}, "result": result.replace("|", "/"), "day": day}


def key(cells: list[str]) -> tuple:
    """Rows are told apart by Python's minor version and torch."""
    return release(cells[0])[:2], release(cells[1])


if __name__ == "__main__":
    sys.exit(main())
