"""Facts of the generated GPU kernels that need no GPU, as a Markdown table: shared memory, registers, spills, matrix
instructions.

    python -m benchmarks.offline.triton_versions [--targets sm_90 gfx942] [--out benchmarks/results]

Run it after every update of Triton and compare: the same source can spill, or lose an instruction, in another version.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from rich.progress import track

from benchmarks.common.results import environment
from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.facts import Facts, OfflineCompilationError, facts_of
from benchmarks.offline.static_cells import Cell
from fusion.machine import of_target

HEAD = ("kernel", "program", "d", "target", "shared B", "registers", "spills B", "products", "notes", "s")

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]

SCHEDULES: dict[str, dict[str, int]] = {"described": {"described": True}}
"""Ways for the forward to go about its tiles on sm_90 that only autotune chooses, as changes of the table's tile."""


def row(name: str, d: int, facts: Facts, schedule: str = "") -> str:
    """A line of the table."""
    notes = [*facts.warnings, *(f"lost {kind}" for kind in facts.lost)]
    if not facts.fits:
        notes.append(f"over {of_target(facts.target).shared_memory} B")
    products = ", ".join(f"{count} {kind}" for kind, count in facts.matrix.items() if count)
    kernel = facts.kernel.removeprefix("attention_") + (f", {schedule}" if schedule else "")
    cells = (kernel, name, d, facts.target, facts.shared, facts.registers, facts.spills)
    return "| " + " | ".join(map(str, (*cells, products, ", ".join(notes), f"{facts.seconds:.1f}"))) + " |"


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument(
        "--rows", nargs="+", default=["full", "causal", "alibi", "softcap", "bias"], choices=list(GPU_ROWS)
    )
    parser.add_argument("--out", type=Path, help="folder for the table; otherwise it is only printed")
    options = parser.parse_args()
    lines = [
        f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today()}, "
        f"commit {environment()['commit'] or 'unknown'}",
        "bfloat16, tiles for 4096 queries and keys",
        "",
    ]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    cases = [(n, d, t) for n in options.rows for d in options.widths for t in options.targets]
    for name, d, target in track(cases, "Compiling"):
        try:
            spec = Cell(name=name, d=d).spec
            lines += [row(name, d, facts) for facts in facts_of(spec, target, training=True)]
            for schedule, changed in SCHEDULES.items() if target == "sm_90" and d <= 128 else ():
                lines += [row(name, d, facts, schedule) for facts in facts_of(spec, target, changed=changed)]
        except OfflineCompilationError as error:
            lines.append(f"| - | {name} | {d} | {target} | | | | | {str(error).splitlines()[0]} | |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"triton-{triton.__version__}.md").write_text(text)


if __name__ == "__main__":
    main()
