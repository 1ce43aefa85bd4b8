"""Writes the gallery of attention variants: program, what fusion finds in it, which keys are seen, and speed.

    python -m benchmarks.docs.gallery        # docs/gallery.md and docs/figures/gallery-*.svg

Programs are those of `common.rows`, times those of result files of `cpu.attention`. Nothing is timed here.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import torch

import fusion
from benchmarks.common.rows import GPU_ROWS, Problem, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
PROBLEM = Problem(H=4, N=1024, d=128, dtype=torch.float32)
TILES = 16  # a side of the picture
SHADES = ("#E5E5E5", "#B9D7EA", "#7FB8DA", "#3F93C4", "#0072B2")
DARK = "<style>@media(prefers-color-scheme:dark){.s0{fill:#2E323A}.s1{fill:#274B66}.s2{fill:#2F6C96}}</style>"
FILES = ("2026-11-21-0822-cpu.json", "2026-11-21-2145-cpu.json")
"""Result files of `cpu.attention` with the times of the page, all of one processor."""
PEERS = {"sdpa": "SDPA", "flex": "FlexAttention", "inductor": "Inductor"}

HEAD = """# Gallery

Attention variants as people write them in plain PyTorch, what fusion finds in each, and how fast it is. Written by
`python -m benchmarks.docs.gallery`. `_scores(q, k)` is `q @ k.mT / sqrt(d)`; helpers and constants are in
[benchmarks/common/rows.py](../benchmarks/common/rows.py).

Pictures: a row of squares is a block of queries, a column a block of keys; the bluer, the more pairs have a weight.
Grey squares are not visited. Without a picture every query sees every key. Times: two cores of one processor, float32,
medians of turns in one process; how many times as long a peer takes. An empty cell: the peer cannot express the
variant. A variant without times was not measured there.
"""


def page(measured: dict[str, dict]) -> str:
    """The page. measured: of rows, by name."""
    sections = [section(name, row, measured.get(name)) for name, row in GPU_ROWS.items()]
    return "\n".join([HEAD, *sections])


def section(name: str, row: Row, measured: dict | None) -> str:
    """One variant."""
    title = row.title[0].upper() + row.title[1:]
    parts = [f"## {title}", textwrap.indent(inspect.getsource(row.plain).strip(), "    ")]
    parts.append(found(row, measured["d"] if measured else PROBLEM.d))
    if is_drawn(row):
        parts.append(f"![Which keys the queries of '{row.title}' see](figures/{file_of(name)})")
    if measured is not None:
        parts.append(speed(measured))
    return "\n\n".join(parts) + "\n"


def is_drawn(row: Row) -> bool:
    """Whether some pairs have no weight."""
    return row.mask is not None and not row.latent


def file_of(name: str) -> str:
    return f"gallery-{name.replace(' ', '-')}.svg"


def found(row: Row, d: int) -> str:
    """The lines of the report that say what the program is, without what depends on this machine's tiles."""
    operands = replace(PROBLEM, d=d).tensors(row)
    with fusion.collect_reports() as reports, torch.no_grad():
        torch._dynamo.reset()
        options = {"inner": "eager", "emitter": "reference", "verify": False}
        torch.compile(row.plain, backend="fusion", dynamic=False, options=options)(*operands)
    lines = re.findall(r"^ +(program|reads|mask) +(.*)$", str(reports[0]), flags=re.M)
    of_tiles = r", [0-9]+ % computed(; (a|no) tile [^;]*)?"
    return "\n".join(f"- {kind}: `{re.sub(of_tiles, '', text)}`" for kind, text in lines)


def shares(row: Row) -> torch.Tensor:
    """[TILES, TILES]: the share of pairs in a tile that the variant's mask leaves alive."""
    assert row.mask is not None
    _, _, _, *extras = PROBLEM.tensors(row)
    places = torch.arange(PROBLEM.N)
    live = row.mask(*extras)(0, 0, places[:, None], places)
    return torch.nn.functional.avg_pool2d(live.float()[None, None], PROBLEM.N // TILES)[0, 0]


def picture(tiles: torch.Tensor) -> str:
    """An SVG of squares, a path for each shade."""
    shade = (tiles * (len(SHADES) - 1)).ceil().long()
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="160" height="160" viewBox="0 0 {TILES} {TILES}">', DARK]
    for number, colour in enumerate(SHADES):
        places = (shade == number).nonzero().tolist()
        if places:
            squares = "".join(f"M{j} {i}h.9v.9h-.9z" for i, j in places)
            lines.append(f'<path class="s{number}" fill="{colour}" d="{squares}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def newest() -> dict[str, dict]:
    """The float32 result of each variant at the length that shows most (1024, or 16384 for one query); of a file the
    narrower heads count, and of several files the last."""
    results = {}
    for name in FILES:
        document = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        for entry in sorted(document["rows"], key=lambda entry: -entry["d"]):
            if (entry["dtype"], entry["N"]) == ("fp32", 16384 if GPU_ROWS[entry["row"]].queries else 1024):
                results[entry["row"]] = entry | {"file": name, "cpu": document["environment"]["cpu"]}
    return results


def speed(entry: dict) -> str:
    """Our time and the peers' as multiples of it."""
    entries = entry["entries"]
    own = entries["fusion"]["median"]
    times = [entries.get(peer, {}).get("median") for peer in PEERS]
    cells = [f"{time / own:.1f}x" if time and math.isfinite(time) else "" for time in times]
    return "\n".join([
        f"| N = {entry['N']}, d = {entry['d']} | fusion | {' | '.join(PEERS.values())} |",
        f"| --- | ---: |{' ---: |' * len(PEERS)}",
        f"| [{entry['cpu']}](../benchmarks/results/{entry['file']}) | {1e3 * own:.3g} ms | {' | '.join(cells)} |",
    ])  # fmt: skip


def main() -> None:
    PAGE.write_text(page(newest()))
    for name, row in GPU_ROWS.items():
        if is_drawn(row):
            (ROOT / "docs" / "figures" / file_of(name)).write_text(picture(shares(row)))


if __name__ == "__main__":
    main()
