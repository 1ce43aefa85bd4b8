"""The table of speeds on README.md, from result files: prints it, or puts it there.

    python -m benchmarks.docs.front_page [--write]

A row is an attention on a processor; its figures are those of the newest result file that has them (`SOURCES`). The
same figures are checked by tests/test_readme.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks/docs/front_page.py -->\n", "<!-- end -->\n"

ZEN5, AMX = "2026-11-28-zen5", "2026-11-21-0822-cpu"
SOURCES = (
    ("Zen 5, AVX-512", "float32", ZEN5, "AVX-512 without bf16 instructions", ""),
    ("Zen 5, AVX-512", "bfloat16", ZEN5, "bf16 pairs", ""),
    ("Zen 5, held to AVX2", "float32", ZEN5, "AVX2", ""),
    ("Xeon with AMX", "float32", AMX, "Attention variants", "fp32"),
    ("Xeon with AMX", "bfloat16", AMX, "Attention variants", "bf16"),
)
"""Processor, dtype, result file, its section, and the dtype by which that section names it, if it has several."""

VARIANTS = {"full": "full", "causal": "causal"}
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
        for variant, label in VARIANTS.items():
            row = row_of(source, variant)
            peers = [row.get(peer, "") or "" for peer in PEERS]
            link = f"[{processor}](benchmarks/results/{name}.md)"
            lines.append("| " + " | ".join([link, dtype, label, row["fusion ms"], row["of peak"], *peers]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
