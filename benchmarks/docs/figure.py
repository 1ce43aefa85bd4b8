"""Draws a result file of benchmarks/cpu/attention.py: the time of each attention variant in fusion and in its peers.

    python -m benchmarks.docs.figure benchmarks/results/2026-11-21-0822-cpu.json --output docs/figures/cpu.svg

One group of bars a variant, one bar a contestant, in milliseconds; a contestant that cannot express a variant has none.
The processor, the versions and the commit stand under the picture.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.common import results

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
    parser = results.parser(__doc__)
    parser.add_argument("file", type=Path, help="a .json that benchmarks.cpu.attention wrote")
    parser.add_argument("--output", type=Path, required=True, help="the .svg to write")
    options = parser.parse_args()
    document = json.loads(options.file.read_text())
    rows = [row for row in document["rows"] if (row["N"], row["d"], row["dtype"]) == (1024, 64, "fp32")]
    draw(rows, document["environment"], f"{rows[0]['H']} heads of 64, N = 1024, fp32", options.output)


if __name__ == "__main__":
    main()
