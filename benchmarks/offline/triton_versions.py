"""Facts of the generated GPU kernels that need no GPU, as a Markdown table: shared memory, registers, spills, matrix
instructions.

    python -m benchmarks.offline.triton_versions [--targets sm_90 gfx942] [--out benchmarks/results]

Run it after every update of Triton and compare: the same source can spill, or lose an instruction, in another version.
"""

from __future__ import annotations

import argparse
import datetime
import math
from pathlib import Path

from rich.progress import track

from benchmarks.common import results
from benchmarks.offline.facts import Facts, OfflineCompilationError, facts_of
from fusion.codegen.triton.candidates import may_specialize
from fusion.ir import AttentionSpec, MaskFacts, Normalizer, Operand, Output, integers
from fusion.ir.expr import SCORE, C, E, Expr, I, J, Kind, const, coord, load, size
from fusion.ir.ops import apply, where
from fusion.machine import of_target

HEAD = ("kernel", "program", "d", "target", "shared B", "registers", "spills B", "products", "notes", "s")

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]

SCHEDULES: dict[str, dict[str, int]] = {
    "described": {"described": True},
    "specialized": {"specialized": True, "rotated": False, "warps": 4, "stages": 2},
    "specialized, rotated": {"specialized": True, "rotated": True, "warps": 4, "stages": 2},
}
"""Ways for the forward to go about its tiles on sm_90 that only autotune chooses, as changes of the table's tile."""


def programs() -> dict[str, tuple[Expr, MaskFacts | None, tuple[Operand, ...]]]:
    """Score programs by name, with their masks and captured tensors; scores come in scaled."""
    live = apply("ile", J, I)
    causal = MaskFacts(
        live=live, key_hi=integers.add(coord("i1"), 1), full_hi=integers.add(coord("i0"), 1), fill=-math.inf
    )
    distance = apply("to_float", integers.sub(J, I))
    slope = load(3, (coord("b1"),), Kind.FLOAT)
    alibi = where(live, apply("fadd", SCORE, apply("fmul", slope, distance)), const(-math.inf))
    capped = apply("fmul", apply("tanh", apply("div", SCORE, const(50.0))), const(50.0))
    bias = apply("fadd", SCORE, load(3, (coord("b1"), I, J), Kind.FLOAT))
    return {
        "full": (SCORE, None, ()),
        "causal": (where(live, SCORE, const(-math.inf)), causal, ()),
        "alibi": (alibi, causal, (Operand(dtype="float32", rank=1, name="slope"),)),
        "soft_cap": (capped, None, ()),
        "bias": (bias, None, (Operand(dtype="bfloat16", rank=3, name="bias"),)),
    }


def spec_of(name: str, d: int, dtype: str = "bfloat16", group: int = 1) -> AttentionSpec:
    """An attention over [B, H, N, d] with one of the programs."""
    score, mask, extra = programs()[name]
    from fusion.ir.expr import substitute

    score = substitute(score, {SCORE: apply("fmul", SCORE, const(d**-0.5))})
    batch, head = coord("b0"), coord("b1")
    shared = head if group == 1 else integers.floordiv(head, group)
    return AttentionSpec(
        sizes=("B", "H", "Nq", "Nk"),
        batch=(size("B"), size("H")),
        n_q=size("Nq"),
        n_k=size("Nk"),
        d=const(d),
        d_v=const(d),
        operands=(*(Operand(dtype=dtype, rank=4, name=n) for n in "qkv"), *extra),
        q=(batch, head, I, C),
        k=(batch, shared, J, C),
        v=(batch, shared, J, E),
        score=score,
        mask=mask,
        normalizer=Normalizer.SOFTMAX,
        dtype=dtype,
        out_dtype=dtype,
        output=Output(dims=("b0", "b1", "i", "e"), order=("b0", "b1", "i", "e")),
    )


def row(name: str, d: int, facts: Facts, schedule: str = "") -> str:
    """A line of the table."""
    notes = [*facts.warnings, *(f"lost {kind}" for kind in facts.lost)]
    if facts.specialized:
        notes.append("warps with roles")
    if not facts.fits:
        notes.append(f"over {of_target(facts.target).shared_memory} B")
    products = ", ".join(f"{count} {kind}" for kind, count in facts.matrix.items() if count)
    cells = (
        facts.kernel.removeprefix("attention_") + (f", {schedule}" if schedule else ""),
        name,
        d,
        facts.target,
        facts.shared,
        facts.registers,
        facts.spills,
    )
    return "| " + " | ".join(map(str, (*cells, products, ", ".join(notes), f"{facts.seconds:.1f}"))) + " |"


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--programs", nargs="+", default=list(programs()), choices=list(programs()))
    parser.add_argument("--out", type=Path, help="folder for the table; otherwise it is only printed")
    options = parser.parse_args()
    lines = [
        f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today()}, "
        f"commit {results.environment({})['commit'] or 'unknown'}",
        "bfloat16, tiles for 4096 queries and keys",
        "",
    ]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    cases = [(n, d, t) for n in options.programs for d in options.widths for t in options.targets]
    for name, d, target in track(cases, "Compiling"):
        try:
            spec = spec_of(name, d)
            lines += [row(name, d, facts) for facts in facts_of(spec, target, training=True)]
            for schedule, changed in SCHEDULES.items() if target == "sm_90" and d <= 128 else ():
                if "specialized" not in changed or may_specialize(spec, d, d):
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
