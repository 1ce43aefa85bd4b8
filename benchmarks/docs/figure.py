"""Draws a result file of benchmarks/cpu/attention.py: the time of each attention variant in fusion and in its peers.

    python -m benchmarks.docs.figure benchmarks/results/2026-11-21-0822-cpu.json --output docs/figures/cpu.svg

One group of bars a variant, one bar a contestant, in milliseconds; a contestant that cannot express a variant has none.
The processor, the versions and the commit stand under the picture.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

CONTESTANTS = {
    "fusion": ("fusion", "#D55E00"),
    "sdpa": ("SDPA", "#0072B2"),
    "flex": ("FlexAttention", "#56B4E9"),
    "inductor": ("Inductor", "#7F7F7F"),
}
"""Name in the result file -> (name in the picture, colour of Okabe and Ito's set)."""
DARK = (
    "@media(prefers-color-scheme:dark){text{fill:#E4E6EA!important}"
    "[style*='stroke: #000000']{stroke:#E4E6EA!important}}"
)
"""Where the page is dark, so are text and axes; the background is that of the page."""


def chosen(document: dict, n: int, d: int, dtype: str) -> list[dict]:
    """The rows of one size and dtype, in the order of the file."""
    return [row for row in document["rows"] if (row["N"], row["d"], row["dtype"]) == (n, d, dtype)]


def draw(rows: list[dict], environment: dict, title: str, output: Path) -> None:
    """Write the picture as SVG, the same bytes for the same rows."""
    plt.rcParams.update({"svg.hashsalt": "fusion", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(8, 0.62 * len(rows) + 1.4))
    height = 0.8 / len(CONTESTANTS)
    for place, (key, (name, colour)) in enumerate(CONTESTANTS.items()):
        for group, row in enumerate(rows):
            if not row["entries"].get(key, {}).get("median"):
                axes.text(0, group + place * height, f" {name}: n/a", va="center", fontsize=7, color="#7F7F7F")
        medians = [row["entries"].get(key, {}).get("median") for row in rows]
        at = [group + place * height for group, median in enumerate(medians) if median]
        milliseconds = [1e3 * median for median in medians if median]
        bars = axes.barh(at, milliseconds, height, color=colour, label=name)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axes.set_yticks([group + 1.5 * height for group in range(len(rows))], [row["title"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (shorter is better)")
    axes.set_title(title, loc="left", pad=24)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(CONTESTANTS), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if name == "torch")
    where = f"{environment['cpu']}, {environment['threads']} threads; {versions}; commit {environment['commit']}"
    axes.annotate(where, (1, 0), (0, -44), "axes fraction", "offset points", ha="right", fontsize=7, color="#555555")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, bbox_inches="tight", metadata={"Date": None}, transparent=True)
    text = output.read_text().replace("</style>", DARK + "</style>", 1)
    output.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a result file of benchmarks/cpu/attention.py.")
    parser.add_argument("file", type=Path, help="a .json that benchmarks/cpu/attention.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="the .svg to write")
    parser.add_argument("--N", type=int, default=1024, help="length of the sequences")
    parser.add_argument("--d", type=int, default=64, help="head dimension")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    document = json.loads(options.file.read_text())
    rows = chosen(document, options.N, options.d, options.dtype)
    if not rows:
        parser.error(f"{options.file} has no row with N={options.N}, d={options.d}, {options.dtype}")
    title = f"{rows[0]['H']} heads of {options.d}, N = {options.N}, {options.dtype}"
    draw(rows, document["environment"], title, options.output)


if __name__ == "__main__":
    main()
