"""A sample of the test suite with other versions of torch, each in an environment that is made once and kept.

    python .ci/torches.py 2.11.0 2.15.0                 both; fails where a test does
    python .ci/torches.py --write 2.11.0 2.13.0         and the second table of docs/versions.md
    python .ci/torches.py --gpu 2.11.0                  in place of the sample, tests on a GPU that is not there;
                                                        --only "readme or vit": those of these names

torch chooses its Triton; the rest is as in constraints.txt. An environment takes some 5 GB, since the registry's torch
brings the libraries of CUDA, and lies in the checkout, or in the folder that TORCHES names. Constraints that a machine
sets for pip do not count for it. What is there is used as it is unless pyproject.toml or constraints.txt has changed.
"""

import argparse
import datetime
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from version_table import release, with_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
OLDEST, NEWEST = "2.11.0", "2.15.0"
OF_TORCH = ("torch", "triton", "torchvision", "setuptools")
"""Packages that torch itself asks for in versions of its own, which constraints.txt would contradict."""
SAMPLE = (
    "tests/fusion/torch_private", "tests/fusion/test_backend.py", "tests/fusion/test_versions.py",
    "tests/fusion/validation/test_other_versions.py", "tests/passes/test_ties.py",
    "tests/passes/test_special_gradients.py", "tests/passes/test_varlen.py", "tests/passes/test_nested.py",
    "tests/passes/test_integer_widths.py", "tests/passes/test_vmap.py", "tests/passes/test_normalize.py",
    "tests/passes/test_checkpointing.py::test_numbers_of_a_module", "tests/codegen/test_primitives.py",
    "tests/fuzz/test_fuzz.py::test_random_functions_are_as_exact_as_eager",
)  # fmt: skip
"""Tests of what torch decides: its private parts, derivatives at special points, how it writes graphs, what operations
it admits; and random functions."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="*", default=[OLDEST, NEWEST], help=f"versions; {OLDEST} and {NEWEST} without")
    parser.add_argument("--write", action="store_true", help="write what passed into docs/versions.md")
    parser.add_argument("--gpu", action="store_true", help="tests/gpu_stand_in; needs g++ and a torch for CUDA 13")
    parser.add_argument("--only", default="", help="with --gpu: an expression of pytest's -k")
    parser.add_argument("--jobs", default="2", help="how many tests run at a time")
    arguments = parser.parse_args()
    failed = False
    for version in arguments.torch:
        if arguments.gpu:
            command = [environment(version), "-m", "tests.gpu_stand_in", "-q", "-k", arguments.only]
            failed |= bool(subprocess.run(command, cwd=ROOT).returncode)
            continue
        outcome = tried(version, environment(version), arguments.jobs)
        print(" | ".join(outcome.values()), flush=True)
        failed |= outcome["failed"] != "0" or outcome["passed"] == "0"
        if arguments.write:
            PAGE.write_text(with_row(PAGE.read_text(), outcome, lambda cells: release(cells[0])))
    return int(failed)


def environment(version: str) -> Path:
    """The interpreter of the environment of a version of torch, which is made or brought up to date."""
    place = Path(os.environ.get("TORCHES") or ROOT) / f".venv-torch-{version}"
    own, stamp = place / "bin" / "python", place / ".installed"
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256("\n".join([str(ROOT), *texts]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return own
    if not own.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
        lines = texts[1].splitlines()
        kept.write("\n".join(line for line in lines if line.partition("==")[0] not in OF_TORCH))
        kept.flush()
        for wish in ([f"torch=={version}", "-e", ".[test]"], ["--no-deps", "timm"]):
            pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", kept.name]
            clean = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
            subprocess.run([*pip, *wish], check=True, cwd=ROOT, env=clean)
    stamp.write_text(wanted)
    return own


def tried(version: str, own: Path, jobs: str) -> dict[str, str]:
    """A row of the table."""
    asked = "import torch, triton; print(torch.__version__, triton.__version__)"
    torch, triton = run(own, "-c", asked).stdout.split()[-2:]
    parallel = ["-n", jobs, "--dist", "loadfile", "--no-loadscope-reorder"]
    done = run(own, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *parallel, *SAMPLE)
    summary = next((line for line in reversed(done.stdout.splitlines()) if re.search(r"\d+ \w+.* in \d", line)), "")
    counts = {kind.rstrip("s"): n for n, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", summary)}
    wrong = int(counts.get("failed", 0)) + int(counts.get("error", 0))
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], file=sys.stderr)
        wrong = max(wrong, 1)
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)", done.stdout, flags=re.M)
    return {
        "torch": torch, "triton": triton, "tests": str(sum(map(int, counts.values()))),
        "passed": counts.get("passed", "0"), "failed": str(wrong),
        "skipped": f"{counts.get('skipped', '0')}{': ' if skipped else ''}{'; '.join(dict.fromkeys(skipped))}",
        "day": datetime.date.today().isoformat(),
    }  # fmt: skip


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
