"""How fast the generated GPU kernels are predicted to be, from their machine code alone, as a Markdown table.

    python -m benchmarks.offline.triton_static [--target sm_90] [--rows full causal] [--widths 64 128] [--out FOLDER]

The specs are those that the passes find in the variants' plain functions; what is compiled is what a call compiles on a
device of that capability (`offline.absent`). Of each inner loop: instructions by unit, matrix products by
shape, exponentials under products, spills, redundancy of layouts, clocks by resource. `offline.timeline`
has the model and the published figures that it was fitted to, which the first lines of the table repeat. Needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.peer_loops import PEERS, compiled_peer
from benchmarks.offline.static_cells import Cell, compiled, flop_of_trip, tile_of
from benchmarks.offline.static_facts import StaticFacts, static_facts
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning.gpu_clocks import BACKWARD, JOINT, work_of
from fusion.planning.gpu_model import USUAL, extent_of, rounded_bytes

HEAD = (
    "kernel", "variant", "tile", "loop", "shared B", "registers", "programs", "redundant", "instructions",
    "fma / alu / special / memory", "products", "exp under", "spills", "clocks tensor / issue / special / shared",
    "trip", "Tflop/s",
)  # fmt: skip
FORWARD_ONLY = {"decode", "float8 decode", "latent decode", "latent"}


def lines_of(kernel: str, variant: str, tile: str, facts: StaticFacts, flop: float) -> Iterator[str]:
    """A line for each inner loop, the fastest first."""
    for number, loop in enumerate(sorted(facts.loops, key=lambda loop: len(loop.body))):
        clocks, units = facts.clocks(loop), loop.units
        every, under = loop.exponentials
        cells = (
            kernel.removeprefix("attention_"), variant, tile, "masked" if number else "main", facts.shared,
            facts.registers, facts.residents, f"x {facts.redundancy:g}", len(loop.body),
            " / ".join(str(units.get(unit, 0)) for unit in ("fma", "alu", "special", "memory")),
            ", ".join(f"{count} {shape}" for shape, count in loop.products.items())
            + (", serialised" if loop.serialised else ""),
            f"{under} of {every}", loop.spills,
            " / ".join(f"{each:.0f}" for each in (clocks.tensor, clocks.issue, clocks.special, clocks.shared)),
            f"{clocks.trip:.0f}", f"{facts.rate(flop, loop) / 1e12:.0f}",
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"


def peers(device: Machine) -> Iterator[str]:
    """Lines of the peers' loops, and what their backwards make as a whole."""
    seconds: dict[tuple[str, int], float] = {}
    for peer in PEERS:
        facts = static_facts(compiled_peer(peer, int(device.architecture[3:])), device)
        rows, keys, warps, stages = peer.tile
        text = f"{rows} x {keys}, {warps} warps, stages {stages}"
        flop = 2.0 * peer.products * rows * keys * peer.d
        yield from lines_of(str(peer), f"full, d = {peer.d}", text, facts, flop)
        if peer.what == "backward_queries":
            seconds[peer.name, peer.d] = peer.products / facts.rate(flop)
        if peer.what == "backward_keys":
            total = seconds[peer.name, peer.d] + peer.products / facts.rate(flop)
            yield whole_backward(f"{peer.name} backward", f"full, d = {peer.d}", 5.0 / total)


def whole_backward(kernel: str, variant: str, rate: float) -> str:
    """The line of a backward's kernels together, whose rate is that of five products."""
    return f"| {kernel}, all kernels | {variant} |" + " |" * (len(HEAD) - 3) + f" {rate / 1e12:.0f} |"


def rounding(cell: Cell, device: Machine) -> float:
    """Seconds for each score of long sequences that go to dQ's way through memory in float32."""
    extent = extent_of(cell.spec, JOINT, 1, USUAL, USUAL)
    work = work_of(cell.spec, JOINT, cell.spec.d.integer, cell.spec.d_v.integer)
    return rounded_bytes(work) / device.main.bandwidth / (USUAL / 2 if extent.triangle else USUAL)


def cell_lines(cell: Cell, device: Machine) -> list[str]:
    """Lines of a cell's kernels, and what the backward makes as a whole."""
    names = [Forward.name] if cell.name in FORWARD_ONLY else [Forward.name, *BACKWARD]
    found = compiled(cell, device, names)
    lines, seconds = [], {}
    for name in names:
        if name not in found or not found[name].loops:
            continue
        tile, facts = tile_of(cell, name, device), found[name]
        flop = flop_of_trip(cell, name, tile)
        lines += lines_of(name, str(cell), str(tile), facts, flop)
        seconds[name] = flop / facts.rate(flop) / (tile.rows * tile.keys)
        if name == JOINT:
            seconds[name] += rounding(cell, device)
    if backward := [seconds[name] for name in BACKWARD if name in seconds]:
        d, d_v = int(cell.spec.d.attr), int(cell.spec.d_v.attr)  # type: ignore[arg-type]
        rate = 5.0 * (d + d_v) / sum(backward)
        lines.append(whole_backward("backward", str(cell), rate))
    return lines


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="sm_90", choices=("sm_80", "sm_90"))
    parser.add_argument("--rows", nargs="+", default=[n for n in GPU_ROWS if "decode" not in n], choices=list(GPU_ROWS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--out", type=Path, help="folder for the table; otherwise it is only printed")
    options = parser.parse_args()
    device = of_target(options.target)
    lines = [
        f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today()}, "
        f"commit {results.environment({})['commit'] or 'unknown'}",
        f"{options.target}, {device.cores} multiprocessors, bfloat16, traced specs; "
        "predicted by `offline.timeline`, not measured. "
        "Rates are of the loop's own products; of a whole backward, those of five products.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *peers(device),
    ]
    widths = {name: [576] if "latent" in name else options.widths for name in options.rows}
    cells = [Cell(name=name, d=d) for name in options.rows for d in widths[name]]
    for cell in track(cells, "Compiling"):
        try:
            lines += cell_lines(cell, device)
        except Exception as error:
            lines.append(f"| - | {cell} | {type(error).__name__}: {str(error).splitlines()[0][:200]} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"triton-static-{triton.__version__}-{options.target}.md").write_text(text)


if __name__ == "__main__":
    main()
