"""Where a run was made, the tables it prints, and the dated files it leaves: JSON with everything, Markdown to read."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "results"
What = TypeVar("What")
Result = TypeVar("Result")
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    name = found.get("model name", platform.machine())
    return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name


def environment(peaks: dict[str, float]) -> dict:
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
        "peaks": peaks,
    }


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g}"


def _ratio(entries: dict, peer: str) -> str:
    """Peer's median over fusion's (above 1: fusion is faster), or why there is none."""
    entry, ours = entries.get(peer), entries.get("fusion", {}).get("median")
    if entry is None:
        return ""
    if entry["median"] is None:
        return "n/a" if entry["note"] == "cannot express it" else "fails"
    mark = "!" if entry["note"].startswith("wrong") else ""
    return f"{entry['median'] / ours:.2f}x{mark}" if ours else f"{_milliseconds(entry['median'])} ms{mark}"


def _note(entries: dict) -> str:
    note = entries.get("fusion", {}).get("note", "")
    return re.sub(r"\s+", " ", note)[:60]


def row_table(cells: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of attention variants."""
    header = ["variant", "N", "d", "dtype", "fusion ms", "GFLOP/s", "of peak", "vs full"]
    header += ["eager", "Inductor", "SDPA", "FlexAttention", "note"]
    rate = {}
    for cell in cells:
        if ours := cell["entries"].get("fusion", {}).get("median"):
            rate[cell["row"], cell["N"], cell["d"], cell["dtype"]] = cell["flop"] / ours
    lines = []
    for cell in cells:
        where = (cell["N"], cell["d"], cell["dtype"])
        speed, full = rate.get((cell["row"], *where)), rate.get(("full", *where))
        lines.append(
            [
                cell["title"],
                *map(str, where),
                _milliseconds(cell["entries"].get("fusion", {}).get("median")),
                f"{speed / 1e9:.0f}" if speed else "–",
                f"{speed / 1e9 / cell['peak']:.0%}" if speed else "–",
                f"{speed / full:.2f}" if speed and full else "–",
                *(_ratio(cell["entries"], peer) for peer in ("eager", "inductor", "sdpa", "flex")),
                _note(cell["entries"]),
            ]
        )
    return header, lines


LEGEND = (
    "Columns with a peer's name: the peer's median time over fusion's, both from turns in one process (above 1: fusion "
    "is faster; `!`: the peer's result is wrong; n/a: it cannot express the variant). GFLOP/s count the live query-key "
    "pairs only; `vs full` is that speed over full attention's own; the peak is the best multiply-add rate of these "
    "cores for the dtype, measured in turns with the kernels."
)


def heading(title: str) -> str:
    """The head of a page of figures: what was measured, where, with which versions and by which command."""
    where = environment({})
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    spec = sys.modules["__main__"].__spec__
    command = " ".join(["python", "-m", spec.name if spec else sys.argv[0], *sys.argv[1:]])
    return (
        f"# {title}\n\n{where['date']}, {where['cpu']}, {where['cores']} cores, Python {where['python']}, {versions}, "
        f"commit {where['commit']}.\n`{command}`\n\n"
    )


def measured(
    todo: Iterable[tuple[What, Callable[[], Result]]], console: Console, title: Callable[[What], str]
) -> Iterator[tuple[What, Result]]:
    """What was measured and what came of it, one after the other behind a progress bar.

    todo: pairs of what is to be measured, and the call that does it. An interrupted run ends early, without an error.
    """
    todo = list(todo)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=len(todo))
        try:
            for what, measure in todo:
                bar.update(task, description=title(what))
                yield what, measure()
                bar.advance(task)
        except KeyboardInterrupt:
            console.print("[red]interrupted: what has been measured so far follows")


def show(console: Console, title: str, header: list[str], lines: list[list[str]]) -> None:
    """Print a table to the terminal."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 or name == "note" else "right", no_wrap=name != "note")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def table(header: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *escaped])


def markdown(data: dict) -> str:
    """The result file as a page."""
    where = data["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    peaks = ", ".join(f"{name} {rate:.0f}" for name, rate in where["peaks"].items())
    parts = [
        f"# CPU benchmark, {where['date']}",
        f"{where['cpu']}, {where['threads']} threads on {where['cores']} cores; {where['system']}, "
        f"Python {where['python']}; {versions}; commit {where['commit'] or 'unknown'}.",
        f"Multiply-add peaks at the start, in GFLOP/s: {peaks}.",
        LEGEND,
    ]
    parts += ["## Attention variants", table(*row_table(data["rows"]))]
    return "\n\n".join(parts) + "\n"


def _key(cell: dict) -> tuple:
    return cell["row"], cell["N"], cell["d"], cell["dtype"]


def merged(old: dict, new: dict) -> dict:
    """`new` over `old`: cells measured again replace the earlier ones, all others stay."""
    if old["environment"]["cpu"] != new["environment"]["cpu"]:
        raise SystemExit(f"--append: that file is from another machine ({old['environment']['cpu']}); write a new one")
    again = {_key(cell) for cell in new["rows"]}
    rows = [cell for cell in old["rows"] if _key(cell) not in again] + new["rows"]
    return {"environment": new["environment"], "rows": rows}


def save(data: dict, append: Path | None) -> Path:
    """Write the JSON file and its Markdown beside it; returns the JSON file's path."""
    if append is not None:
        path = append
        if path.exists():
            data = merged(json.loads(path.read_text()), data)
    else:
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
        path = FOLDER / f"{stamp}-cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(data))
    return path
