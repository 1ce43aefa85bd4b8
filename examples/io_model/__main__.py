"""The schedules of one attention problem on the two-level model: in numbers, in symbols, or as a plot against M.

python -m examples.io_model --N 4096 --d 64 --M 2000 [--backward]
python -m examples.io_model --symbolic [--schedule flash]
python -m examples.io_model --N 4096 --d 64 --sweep io.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fusion.cli.cost import elements
from fusion.errors import FusionError
from fusion.planning.plan import aligned, tile_text
from fusion.planning.problem import Problem

from . import SCHEDULES, schedule
from .bounds import BOUNDS
from .plots import plot_sweep, sweep
from .schedule import UnknownScheduleError
from .tiles import optimum
from .two_level import weigh


def table(problem: Problem, capacity: int, direction: str, features: int | None) -> str:
    """Every schedule at its best tile, the best one first."""
    rows = [("", "schedule", "kernel", "tile", "I/O", "/ bound")]
    reasons = []
    for number, item in enumerate(weigh(problem, capacity, direction, features)):
        name, kernels = item.schedule, ", ".join(SCHEDULES[item.schedule].kernels) or "none"
        if item.reason:
            rows.append(("", name, kernels, "does not fit", "-", "-"))
            reasons.append(item.reason)
        else:
            mark = "" if number else "*"
            rows.append((mark, name, kernels, tile_text(item.tile), f"{item.io:.4g}", f"{item.ratio:.2f}"))
    return "\n".join([f"{problem}: M = {capacity} elements", *aligned(rows, 4), *reasons])


def symbols(names: Sequence[str]) -> str:
    """Formulas, derived optima and bounds."""
    lines = []
    for item in map(schedule, names):
        lines.append(str(item))
        for phase in item.phases:
            indented = " " * len(phase.name)
            lines.append(f"  {phase.name}: reads {phase.reads}".replace("ceiling", "ceil"))
            lines.append(f"  {indented}  writes {phase.writes}; holds {phase.footprint}".replace("ceiling", "ceil"))
        lines.append(f"  I/O without ceilings: {item.leading}")
        try:
            found = optimum(item.name)
            short = len(str(found)) < 400
            lines.append(f"  best tile: {found}" if short else f"  leading order at the best tile: {found.leading}")
        except UnknownScheduleError:
            lines.append("  best tile: by search")
    return "\n".join([*lines, "lower bounds (orders; constant 1)", *(f"  {bound}" for bound in BOUNDS.values())])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--N", type=elements, default=4096, help="queries and keys (default %(default)s)")
    parser.add_argument("--d", type=int, default=64, help="head dimension (default %(default)s)")
    parser.add_argument("--causal", action="store_true", help="key j is live for query i where j <= i")
    parser.add_argument(
        "--M", type=elements, default=1 << 14, help="fast memory in elements, as 64K (default %(default)s)"
    )
    parser.add_argument("--features", type=int, help="polynomial features, to weigh the approximate schedule too")
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument("--symbolic", action="store_true", help="formulas in place of numbers")
    parser.add_argument("--schedule", help="with --symbolic: only this one")
    parser.add_argument("--sweep", metavar="FILE", help="plot the I/O of each schedule against M")
    given = parser.parse_args(words)
    direction = "backward" if given.backward else "forward"
    try:
        if given.symbolic:
            every = [name for name, item in SCHEDULES.items() if item.direction == direction]
            print(symbols([given.schedule] if given.schedule else every))
            return 0
        problem = Problem(n_q=given.N, n_k=given.N, d=given.d, d_v=given.d, causal=given.causal)
        if given.sweep:
            print(f"wrote {plot_sweep(sweep(problem, direction=direction), given.sweep)}")
        else:
            print(table(problem, given.M, direction, given.features))
    except FusionError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
