"""Facts of the generated GPU kernels that need no GPU, as a Markdown table: shared memory, registers, spills, matrix
instructions.

    python -m benchmarks.offline.triton_versions [--targets sm_90 gfx942] [--output FILE.md]

Run it after every update of Triton and compare: the same source can spill, or lose an instruction, in another version.
"described": read by tensor descriptors, which only autotune chooses, on sm_90.
"""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.facts import Facts, OfflineCompilationError, facts_of
from benchmarks.offline.tile_choices import Cell
from fusion.machine import of_target

HEAD = ["kernel", "program", "d", "target", "shared B", "registers", "spills B", "products", "notes", "s"]
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]


def line(name: str, d: int, facts: Facts, form: str = "") -> list[str]:
    """A line of the table."""
    notes = [*facts.warnings, *(f"lost {kind}" for kind in facts.lost)]
    if not facts.fits:
        notes.append(f"over {of_target(facts.target).shared_memory} B")
    products = ", ".join(f"{count} {kind}" for kind, count in facts.matrix.items() if count)
    kernel = facts.kernel.removeprefix("attention_") + form
    numbers = map(str, (facts.shared, facts.registers, facts.spills))
    return [kernel, name, str(d), facts.target, *numbers, products, ", ".join(notes), f"{facts.seconds:.1f}"]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument(
        "--rows", nargs="+", default=["full", "causal", "alibi", "softcap", "bias"], choices=list(GPU_ROWS)
    )
    parser.add_argument("--output", type=Path, help="a file for the page")
    options = parser.parse_args()
    cases, lines = [(n, d, t) for n in options.rows for d in options.widths for t in options.targets], []
    for name, d, target in track(cases, "Compiling"):
        try:
            spec = Cell(name=name, d=d).spec
            lines += [line(name, d, facts) for facts in facts_of(spec, target, training=True)]
            if target == "sm_90" and d <= 128:
                described = facts_of(spec, target, changed={"described": True})
                lines += [line(name, d, facts, ", described") for facts in described]
        except OfflineCompilationError as error:
            lines.append(["-", name, str(d), target, "", "", "", "", str(error).splitlines()[0], ""])
    title = "GPU kernels, compiled: bfloat16, tiles for 4096 queries and keys"
    results.publish(title, results.table(HEAD, lines), options.output)


if __name__ == "__main__":
    main()
