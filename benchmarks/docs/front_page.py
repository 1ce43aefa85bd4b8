"""The table of speeds on README.md and that of whole models on docs/performance.md, from result files: prints them, or
puts them there.

    python -m benchmarks.docs.front_page [--write]

A row of the first is an attention on a processor; its figures are those of the newest result file that has them
(`SOURCES`). The same figures are checked by tests/test_readme.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks/docs/front_page.py -->\n", "<!-- end -->\n"

ZEN5, AMX = "2026-11-28-zen5", "2026-11-30-0333-cpu"
SOURCES = (
    ("Zen 5, AVX-512", "float32", ZEN5, "AVX-512 without bf16 instructions", ""),
    ("Zen 5, AVX-512", "bfloat16", ZEN5, "bf16 pairs", ""),
    ("Zen 5, held to AVX2", "float32", ZEN5, "AVX2", ""),
    ("Xeon with AMX", "float32", AMX, "Attention variants", "fp32"),
    ("Xeon with AMX", "bfloat16", AMX, "Attention variants", "bf16"),
)
"""Processor, dtype, result file, its section, and the dtype by which that section names it, if it has several."""

VARIANTS = ("full", "causal")
PEERS = ("SDPA", "FlexAttention", "Inductor")
N, D = "4096", "64"


def tables(name: str) -> dict[str, list[dict[str, str]]]:
    """Tables of a result file by the heading above them, as rows by column; of several the first."""
    found: dict[str, list[dict[str, str]]] = {}
    heading, columns = "", None
    for line in (RESULTS / f"{name}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("#"):
            heading, columns = line.strip("# "), None
        elif not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells
        elif not set(line) <= set("|-: "):
            found.setdefault(heading, []).append(dict(zip(columns, cells, strict=False)))
    return found


def row_of(source: tuple[str, ...], variant: str) -> dict[str, str]:
    """The row of a variant in a source's table."""
    _, _, name, section, dtype = source
    wanted = {"variant": variant, "N": N, "d": D} | ({"dtype": dtype} if dtype else {})
    (row,) = [row for row in tables(name)[section] if all(row.get(key) == value for key, value in wanted.items())]
    return row


def table() -> str:
    """The table of README.md, in Markdown."""
    lines = [
        "| processor | dtype | attention | fusion, ms | of peak | " + " | ".join(PEERS) + " |",
        "|---|---|---|---:|---:|" + "---:|" * len(PEERS),
    ]
    for source in SOURCES:
        processor, dtype, name, *_ = source
        for variant in VARIANTS:
            row = row_of(source, variant)
            peers = [row.get(peer, "") or "" for peer in PEERS]
            link = f"[{processor}](benchmarks/results/{name}.md)"
            lines.append("| " + " | ".join([link, dtype, variant, row["fusion ms"], row["of peak"], *peers]) + " |")
    return "\n".join(lines) + "\n"


MODELS = {
    "2026-11-29-models-batches": {
        "float32": ("fusion", "fusion+tf32", "openvino", "zentorch", "onnxruntime"),
        "bfloat16": ("fusion", "openvino", "zentorch"),
    },
    "2026-11-30-packed-models": {
        "float32": ("fusion", "fusion+packed", "openvino", "onnxruntime"),
        "bfloat16": ("fusion", "fusion+packed", "openvino"),
    },
    "2026-12-01-models-amx": {
        "float32": ("Inductor", "fusion", "fusion+packed", "openvino", "onnxruntime"),
        "bfloat16": ("Inductor", "fusion", "fusion+packed", "openvino"),
    },
}
"""Result files, and the runtimes of their columns by dtype."""
LEADS = ("\nOn a Xeon with AMX:\n\n", "\nThe same processor, longer texts, on a host with other tenants:\n\n")
"""Words before the tables after the first."""
NAMES = {"fusion+tf32": "fusion, tf32 allowed", "fusion+packed": "fusion, packed", "openvino": "OpenVINO",
         "onnxruntime": "ONNX Runtime"}  # fmt: skip


def models() -> str:
    """The tables of docs/performance.md, in Markdown."""
    return "".join(lead + _models(*entry) for lead, entry in zip(("", *LEADS), MODELS.items(), strict=True))


def _models(file: str, runtimes: dict[str, tuple[str, ...]]) -> str:
    """A table of a result file: milliseconds, the least of a row and dtype in bold, and "!" where the error is more
    than the rule allows, which is not counted."""
    rows: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in tables(file)["Whole models beside other runtimes"]:
        rows.setdefault((row["model"], row["B x N"]), {})[row["dtype"]] = row
    heads = [f"{NAMES.get(name, name)}, {dtype}" for dtype, names in runtimes.items() for name in names]
    lines = [f"| model | B x N | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for (title, sizes), row in rows.items():
        texts: list[str] = []
        for dtype, names in runtimes.items():
            cells = [row.get(dtype, {}).get(name, "").partition(" ") for name in names]
            times = [time + "!" * (float(share.strip("()") or 0) > 1) for time, _, share in cells]
            right = [time for time in times if time.replace(".", "").isdigit()]
            least = min(right, key=float) if len(right) > 1 else None
            texts += [f"**{time}**" if time == least else time for time in times]
        lines.append(f"| {title} | {sizes} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


PAGES: dict[Path, Callable[[], str]] = {README: table, PERFORMANCE: models}


def main() -> None:
    """Prints the tables, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    write = parser.parse_args().write
    for page, made in PAGES.items():
        before, _, rest = page.read_text().partition(BEGIN)
        if write:
            page.write_text(before + BEGIN + made() + END + rest.partition(END)[2])
        else:
            print(made())


if __name__ == "__main__":
    main()
