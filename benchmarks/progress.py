"""Draws how measurements changed over commits, from the result files, as docs/progress.md and its picture.

    python benchmarks/progress.py                      every .json in benchmarks/results
    python benchmarks/progress.py --results FOLDER --page page.md --figure picture.svg

A cell (one attention or model at one size) counts where at least two commits measured it. Its number is the time of the
fastest of the others over ours, both from one run: how busy a machine was cancels to a large part. One that is not
measured again says nothing; `make bench` measures, and this page draws what is there.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("sdpa", "flex", "inductor", "inductor, sdpa")


@dataclass(frozen=True, order=True)
class Measured:
    """One cell at one commit. ratio: time of the fastest peer over ours, or None without a peer. seconds: ours."""

    date: str
    commit: str
    seconds: float
    ratio: float | None
    peer: str
    where: str


def cells(folder: Path) -> dict[str, list[Measured]]:
    """Every cell of the result files by its name, its measurements in order of time."""
    found: dict[str, list[Measured]] = {}
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text())
        for cell in (cell for part in ("rows", "models", "cells") for cell in document.get(part, ())):
            if (measured := _measured(cell, document["environment"])) is not None:
                found.setdefault(_name(cell), []).append(measured)
    return {name: sorted(entries) for name, entries in sorted(found.items())}


def _measured(cell: dict, environment: dict) -> Measured | None:
    medians = {name: entry.get("median") for name, entry in cell.get("entries", {}).items()}
    if not medians.get("fusion"):
        return None
    peers = {name: medians[name] for name in PEERS if medians.get(name)}
    peer = min(peers, key=peers.__getitem__, default="")
    return Measured(
        date=environment["date"],
        commit=environment["commit"],
        seconds=medians["fusion"],
        ratio=peers[peer] / medians["fusion"] if peer else None,
        peer=peer,
        where=f"{environment['cpu']}, {environment['threads']} threads",
    )


def _name(cell: dict) -> str:
    """What was measured, in words: what it is, its heads and sizes, its dtype."""
    parts = [cell.get(key) for key in ("part", "title", "what", "model") if key != "model" or "title" not in cell]
    sizes = [f"{letter} = {cell[letter]}" for letter in ("B", "H", "N", "d") if letter in cell]
    return ", ".join([*(str(part) for part in parts if part), *sizes, str(cell.get("dtype", ""))])


def again(found: dict[str, list[Measured]]) -> dict[str, list[Measured]]:
    """Those that at least two commits measured on equal machines against a peer."""
    kept = {name: [entry for entry in entries if entry.ratio is not None] for name, entries in found.items()}
    kept = {name: [entry for entry in entries if entry.where == entries[-1].where] for name, entries in kept.items()}
    return {name: entries for name, entries in kept.items() if len({entry.commit for entry in entries}) > 1}


def page(found: dict[str, list[Measured]], figure: str) -> str:
    """The page, in Markdown."""
    repeated = again(found)
    lines = [
        "# Progress",
        "",
        "Drawn by `python benchmarks/progress.py` from the files in `benchmarks/results`: every cell that more than",
        "one commit measured, as the time of the fastest of SDPA, FlexAttention and Inductor over ours, both of one",
        "run. Above 1 fusion is faster. Two runs of one commit differ by some per cent; a `+` is a tree with changes.",
        "",
        f"![The fastest peer's time over fusion's, by commit]({figure})",
        "",
        "| cell | first | | last | | change |",
        "|---|---|---:|---|---:|---:|",
    ]
    for name, entries in repeated.items():
        first, last = entries[0], entries[-1]
        change = f"{100 * (last.ratio / first.ratio - 1):+.0f} %"  # pyright: ignore[reportOperatorIssue]
        ends = " | ".join(f"{e.date[:10]} {e.commit} | {e.ratio:.2f}x of {e.peer}" for e in (first, last))
        lines.append(f"| {name} | {ends} | {change} |")
    once = len(found) - len(repeated)
    lines += ["", f"{once} more cells were measured at one commit, or without a peer.", *_machines(repeated.values())]
    return "\n".join(lines) + "\n"


def _machines(measurements: Iterable[list[Measured]]) -> Iterator[str]:
    for where in sorted({entry.where for entries in measurements for entry in entries}):
        yield f"Measured on: {where}."


def draw(found: dict[str, list[Measured]], output: Path) -> None:
    """Write the picture as SVG, the same bytes for the same measurements: a line per cell, a panel per dtype."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "fusion", "svg.fonttype": "none", "font.size": 8})
    repeated = again(found)
    dtypes = sorted({name.rpartition(", ")[2] for name in repeated})
    dates = sorted({(entry.date, entry.commit) for entries in repeated.values() for entry in entries})
    figure, panels = plt.subplots(max(1, len(dtypes)), 1, figsize=(8, 4.5 * max(1, len(dtypes))), squeeze=False)
    for panel, dtype in zip(panels[:, 0], dtypes, strict=False):
        shown = {name: entries for name, entries in repeated.items() if name.endswith(f", {dtype}")}
        places = _apart({name: entries[-1].ratio or 1 for name, entries in shown.items()})
        for name, entries in shown.items():
            at = [dates.index((entry.date, entry.commit)) for entry in entries]
            (line,) = panel.plot(at, [entry.ratio for entry in entries], marker="o", markersize=3, linewidth=1)
            panel.text(len(dates) - 0.8, places[name], _short(name), fontsize=6.5, va="center", color=line.get_color())
        panel.axhline(1, color="#999999", linewidth=0.8)
        panel.set_yscale("log", base=2)
        panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5x", "1x", "2x", "4x", "8x"])
        panel.set_xticks(range(len(dates)), [f"{date[5:10]}\n{commit}" for date, commit in dates], fontsize=7)
        panel.set_xlim(-0.2, len(dates) + 0.8)
        panel.set_title(f"{dtype}: the fastest peer's time over fusion's", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _short(name: str) -> str:
    """A cell's name without what all cells share."""
    what = re.sub(r" ?[(\[:].*", "", name.split(", B = ")[0])
    return f"{what}, " + ", ".join(re.findall(r"[Nd] = \d+", name))


def _apart(ratios: dict[str, float], factor: float = 1.09) -> dict[str, float]:
    """Where labels go on a logarithmic axis: at their ratio, or above the label below by `factor`."""
    places: dict[str, float] = {}
    lowest = 0.0
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        places[name] = lowest = max(ratio, lowest * factor)
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "progress.md")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "progress.svg")
    options = parser.parse_args()
    found = cells(options.results)
    draw(found, options.figure)
    options.page.write_text(page(found, options.figure.relative_to(options.page.parent).as_posix()))
    print(f"{len(again(found))} cells at several commits: {options.page}")


if __name__ == "__main__":
    main()
