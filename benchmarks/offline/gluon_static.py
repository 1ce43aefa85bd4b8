"""What hand-written loops in Gluon are predicted to be worth on Hopper, beside ours and FlexAttention's, as a Markdown
table from machine code alone.

    python -m benchmarks.offline.gluon_static [--out FILE]

The kernels are those of `gluon_loops` and `gluon_latent`; the model of clocks is `offline.timeline`'s. Of kernels whose
groups of warps work independently there are two rates: with the groups apart, one's exponentials beside the other's
products, and in step, as if all warps did the same at once. FlashAttention-3's published rates lie between the two of
its loop. Of two groups whose code differs, the longer loop is shown. Needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.common import results
from benchmarks.offline import gluon_latent, gluon_loops
from benchmarks.offline.disassembly import Loop
from benchmarks.offline.peer_loops import FLEX, PEERS, compiled_peer
from benchmarks.offline.static_cells import Cell, compiled, flop_of_trip, tile_of
from benchmarks.offline.static_facts import StaticFacts, static_facts
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning.choice import Tile

HEAD = (
    "kernel", "columns", "tile", "shared B", "registers", "instructions", "products", "exp under", "spills",
    "clocks tensor / issue / special / shared", "trip", "Tflop/s, groups apart", "in step",
)  # fmt: skip
TARGET = "sm_90"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A kernel in Gluon. tile: as text; warps: of its first group; trip: keys of a trip of the loop."""

    name: str
    function: Any
    constants: Mapping[str, int]
    tile: str
    warps: int
    trip: int
    columns: tuple[int, int]

    def compiled(self):
        """Triton's compiled kernel."""
        from triton.backends.compiler import GPUTarget

        types = {"scale": "fp32", "N": "i32"}
        names = self.function.arg_names
        signature = {name: "constexpr" if name in self.constants else types.get(name, "*bf16") for name in names}
        pointers = [place for place, name in enumerate(names) if name.endswith("_at")]
        attributes = {(place,): [["tt.divisibility", 16]] for place in pointers}
        source = GluonASTSource(self.function, signature, dict(self.constants), attributes)
        return triton.compile(source, target=GPUTarget("cuda", int(TARGET[3:]), 32), options={"num_warps": self.warps})


def forwards() -> Iterator[Written]:
    """Kernels of 64 and 128 columns."""
    tiles = {128: ((64, 3), (128, 2)), 64: ((64, 3), (128, 3))}
    for d, shapes in tiles.items():
        for roles in (False, True):
            for ahead in (False, True):
                for keys, stages in shapes:
                    yield Written(
                        name=f"Gluon {'ahead' if ahead else 'late'}{', in turns' if roles else ''}",
                        function=gluon_loops.forward,
                        constants={"D": d, "ROWS": 128, "KEYS": keys, "STAGES": stages, "AHEAD": ahead, "ROLES": roles},
                        tile=f"128 x {keys}, {'2 x 4 + 1' if roles else 8} warps, stages {stages}",
                        warps=4 if roles else 8,
                        trip=keys,
                        columns=(d, d),
                    )


def latents() -> Iterator[Written]:
    """Kernels of 576 and 512 columns."""
    each = {"ROWS": 64, "KEYS": 64}
    yield Written(
        name="Gluon, a tile each", function=gluon_latent.tile_each, constants=each, tile="64 x 2 x 64, 2 x 4 + 1 warps",
        warps=4, trip=128, columns=(576, 512),
    )  # fmt: skip
    for keys, stages in ((64, 2), (32, 4)):
        yield Written(
            name="Gluon, one tile", function=gluon_latent.one_tile,
            constants={"ROWS": 64, "KEYS": keys, "STAGES": stages}, tile=f"64 x {keys}, 8 warps, stages {stages}",
            warps=8, trip=keys, columns=(576, 512),
        )  # fmt: skip


def line(kernel: str, columns: str, tile: str, facts: StaticFacts, loop: Loop, flop: float) -> str:
    clocks, (every, under) = facts.clocks(loop), loop.exponentials
    step = replace(facts, groups=1).rate(flop, loop) if facts.groups > 1 else 0.0
    shapes = ", ".join(f"{count} {shape}" for shape, count in loop.products.items())
    cells = (
        kernel, columns, tile, facts.shared, facts.registers, len(loop.body),
        shapes + (", serialised" if loop.serialised else ""), f"{under} of {every}", loop.spills,
        " / ".join(f"{each:.0f}" for each in (clocks.tensor, clocks.issue, clocks.special, clocks.shared)),
        f"{clocks.trip:.0f}", f"{facts.rate(flop, loop) / 1e12:.0f}", f"{step / 1e12:.0f}" if step else "",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def written(device: Machine) -> Iterator[str]:
    """Lines of the kernels in Gluon, each of its group with the longest loop."""
    for kernel in (*forwards(), *latents()):
        rows, (d, d_v) = kernel.constants["ROWS"], kernel.columns
        try:
            facts = static_facts(kernel.compiled(), device)
        except Exception as error:
            yield f"| {kernel.name} | {d} / {d_v} | {kernel.tile} | {type(error).__name__}: {str(error)[:200]!r} |"
            continue
        loop = max(facts.loops, key=lambda loop: len(loop.body))
        yield line(kernel.name, f"{d} / {d_v}", kernel.tile, facts, loop, 2.0 * rows * kernel.trip * (d + d_v))


def ours(device: Machine) -> Iterator[str]:
    """Lines of our emitter's kernels: in the tile that is chosen, described, and specialised."""
    described = {"described": True, "rotated": True, "warps": 8}
    special = {"specialized": True, "warps": 4}
    tiles: dict[int, list[Tile]] = {
        128: [
            Tile(rows=128, keys=128, stages=2, **described),
            Tile(rows=128, keys=64, stages=3, **special),
            Tile(rows=128, keys=64, stages=3, rotated=True, **special),
            Tile(rows=128, keys=128, stages=2, **special),
        ],
        64: [
            Tile(rows=128, keys=128, stages=3, **described),
            Tile(rows=128, keys=64, stages=3, rotated=True, **special),
            Tile(rows=128, keys=128, stages=2, **special),
            Tile(rows=128, keys=128, stages=2, rotated=True, **special),
        ],
        576: [],
    }
    for d, others in tiles.items():
        cell = Cell(name="latent" if d == 576 else "full", d=d)
        for tile in (None, *others):
            facts = compiled(cell, device, [Forward.name], {Forward.name: tile} if tile else None)[Forward.name]
            taken = tile or tile_of(cell, Forward.name, device)
            flop = flop_of_trip(cell, Forward.name, taken)
            name = "ours, chosen" if tile is None else "ours"
            yield line(name, f"{d} / {512 if d == 576 else d}", str(taken), facts, facts.main, flop)


def peers(device: Machine) -> Iterator[str]:
    forwards = [peer for peer in PEERS if peer.what == "forward"]
    flex = next(peer for peer in forwards if peer.name == FLEX)
    for peer in (*forwards, replace(flex, d=64, published="")):
        rows, keys, warps, stages = peer.tile
        facts = static_facts(compiled_peer(peer, int(TARGET[3:])), device)
        tile = f"{rows} x {keys}, {warps} warps, stages {stages}"
        yield line(str(peer), f"{peer.d} / {peer.d}", tile, facts, facts.main, 4.0 * rows * keys * peer.d)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the table; otherwise it is only printed")
    options = parser.parse_args()
    device = of_target(TARGET)
    lines = [
        f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today()}, "
        f"commit {results.environment({})['commit'] or 'unknown'}",
        f"{TARGET}, {device.cores} multiprocessors, bfloat16, without a mask; predicted by `offline.timeline`, not "
        "measured.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *peers(device),
        *ours(device),
        *written(device),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
