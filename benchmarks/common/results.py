"""Pages of figures: where they were made, tables, and the files they are written to."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from fusion.machine.cpu import cpuinfo

FOLDER = Path(__file__).resolve().parents[1] / "results"
VERSIONS = ("torch", "torch-mlir", "triton", "transformers", "numpy")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """The processor's name, with family and model where the name alone says little (virtual machines)."""
    found = cpuinfo()
    name = found.get("model name", platform.processor() or platform.machine())
    return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name


def environment(peaks: dict[str, float] | None = None) -> dict:
    """Machine, versions, commit (with `+` if the tree differs from it) and the measured peaks in GFLOP/s."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in VERSIONS},
        "commit": commit + ("+" if changed else ""),
        "peaks": peaks or {},
    }


def heading(title: str) -> str:
    """The head of a page of figures: what was measured, where, with which versions and by which command."""
    where = environment()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    spec = sys.modules["__main__"].__spec__
    command = " ".join(["python", "-m", spec.name if spec else sys.argv[0], *sys.argv[1:]])
    return (
        f"# {title}\n\n{where['date']}, {where['cpu']}, {where['cores']} cores, Python {where['python']}, {versions}, "
        f"commit {where['commit']}.\n`{command}`\n\n"
    )


def table(header: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *escaped])


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that prints a module's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def publish(title: str, text: str, output: Path | None) -> None:
    """Print a page of figures, and write it to a file if one is named."""
    print(page := f"{heading(title)}{text}\n")
    if output:
        output.write_text(page)
