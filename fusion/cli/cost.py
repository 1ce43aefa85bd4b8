"""`fusion cost`: schedules of one attention problem side by side, in numbers, in symbols, or as a plot against M."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusion.errors import ProblemError
from fusion.machine import Machine, machine

if TYPE_CHECKING:
    from fusion.planning.candidate import Candidate
    from fusion.planning.plan import Plan
    from fusion.planning.problem import Problem

HELP = """I/O, lower bound, predicted time and tile of every schedule for one attention problem.

Give --M for the two-level model of the theory (I/O alone decides), or --machine for a processor (time decides)."""

EXAMPLES = """examples:
  fusion cost --N 4096 --d 64 --M 16384
  fusion cost --N 4096 --d 128 --heads 32 --heads-kv 8 --dtype bf16 --causal --machine h200
  fusion cost --N 8192 --d 16 --bound 1 --epsilon 1e-2
  fusion cost --schedule flash --symbolic
  fusion cost --N 4096 --d 64 --sweep M --output io.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--N", type=int, default=4096, help="queries, and keys unless --Nk is given (default %(default)s)"
    )
    parser.add_argument("--Nk", type=int, help="keys")
    parser.add_argument("--d", type=int, default=64, help="head dimension of Q and K (default %(default)s)")
    parser.add_argument("--dv", type=int, help="head dimension of V (default d)")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default %(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="query heads (default %(default)s)")
    parser.add_argument("--heads-kv", type=int, help="key heads (default as many as query heads)")
    parser.add_argument("--causal", action="store_true", help="key j is live for query i where j <= i")
    parser.add_argument("--window", type=int, help="sliding window: and j > i - window")
    parser.add_argument(
        "--density", type=float, default=1.0, help="share of live tiles of any other mask (default %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="element type (default %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--M", type=_elements, help="fast memory of the two-level model, in elements (64K is 65536)")
    where.add_argument("--machine", help="cpu (this computer), a100, h100, h200, b200, mi300x (default cpu)")
    parser.add_argument("--schedule", help="only this schedule, with its plan explained")
    parser.add_argument("--features", type=int, help="polynomial features, to weigh the approximate schedule too")
    parser.add_argument("--bound", type=float, help="B, with |score| <= B: weigh the polynomial that this allows")
    parser.add_argument(
        "--epsilon", type=float, default=1e-2, help="error of the weights, with --bound (default %(default)s)"
    )
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument(
        "--symbolic", action="store_true", help="print formulas, derived optima and bounds instead of numbers"
    )
    parser.add_argument("--sweep", choices=["M"], help="plot the I/O of each schedule against M")
    parser.add_argument("--output", help="file of the plot (default io-against-M.png)")


def _elements(text: str) -> int:
    """A number of elements: 4000, 64K, 1M (of 1024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        return int(number) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements; give 65536, 64K or 1M") from None


def run(arguments: argparse.Namespace) -> int:
    if arguments.symbolic:
        return _symbolic(arguments)
    from fusion.planning.plan import Problem

    problem = Problem(
        n_q=arguments.N,
        n_k=arguments.N if arguments.Nk is None else arguments.Nk,
        d=arguments.d,
        d_v=arguments.d if arguments.dv is None else arguments.dv,
        batch=arguments.batch,
        heads=arguments.heads,
        heads_kv=arguments.heads if arguments.heads_kv is None else arguments.heads_kv,
        dtype=arguments.dtype,
        causal=arguments.causal,
        window=arguments.window,
        density=arguments.density,
    )
    for name in ("n_q", "n_k", "d", "d_v", "batch", "heads", "heads_kv"):
        if getattr(problem, name) < 1:
            raise ProblemError(f"{name}={getattr(problem, name)}: there is nothing to move; give a positive size")
    if arguments.sweep:
        return _sweep(arguments, problem)
    target = Machine.two_level(arguments.M, problem.dtype) if arguments.M is not None else machine(arguments.machine)
    return _table(arguments, problem, target)


def _direction(arguments: argparse.Namespace) -> str:
    return "backward" if arguments.backward else "forward"


def _approximation(arguments: argparse.Namespace, problem: Problem, target: Machine) -> str:
    """With --bound: sets the number of features, and says where exact and polynomial attention cross."""
    from fusion.approximate import cost
    from fusion.codegen.mlir import polynomial as kernels

    split = target.kind == "gpu" or (target.kind == "cpu" and kernels.supports(target) is None)
    least = math.exp(-arguments.bound) if problem.causal else 1.0
    choice = cost.choose(problem.d, arguments.bound, arguments.epsilon, False, split, least=least)
    text = cost.crossing_text(target, problem, arguments.bound, arguments.epsilon, split, timed=target.kind != "model")
    if choice is None:
        return text
    arguments.features = choice.features
    n = cost.io_crossing(target, problem, choice.features)
    return text + (f"\nby I/O alone from N = {n} on" if n else "\nby I/O alone never")


def _table(arguments: argparse.Namespace, problem: Problem, target: Machine) -> int:
    from fusion.planning.plan import compare, plan
    from fusion.planning.texts import aligned

    crossing = "" if arguments.bound is None else _approximation(arguments, problem, target)
    options = {"direction": _direction(arguments), "features": arguments.features}
    chosen = plan(problem, target, arguments.schedule, **options)
    choice = chosen.choice
    weighed = [chosen if item.schedule == chosen.schedule else item for item in compare(problem, target, **options)]
    weighed.sort(key=lambda item: (bool(item.reason), item.time, item.io))
    if arguments.schedule:
        weighed = [chosen]
    if arguments.json:
        print(json.dumps(_as_json(problem, target, chosen, weighed), indent=2))
        return 0
    if arguments.schedule:
        print(chosen.explain() + (f"\nruns       {choice}" if choice else ""))
        return 0
    print(
        f"{problem}\n{target.name}: M = {chosen.capacity} elements; lower bound {chosen.bound:.4g} elements moved"
        f" ({chosen.bound_text})\n"
    )
    rows = [("", "schedule", "kernel", "tile", "I/O", "bytes", "/ bound", "predicted")]
    rows += [_row(item, chosen, problem, target) for item in weighed]
    print("\n".join(aligned(rows, 4)))
    for item in weighed:
        if item.reason:
            print(f"\n{item.schedule} does not fit: {item.reason}")
    print(f"\n* chosen: {chosen}" + (f"\n  runs {choice}" if choice else ""))
    if crossing:
        print(f"\npolynomial, {crossing}")
    if target.kind != "model" and any(item.ideal for item in weighed):
        print(">= no model of a kernel's time: the time if the busiest resource were never idle")
    return 0


def _row(item: Candidate, chosen: Plan, problem: Problem, target: Machine) -> tuple[str, ...]:
    from fusion.planning.candidate import find_schedule
    from fusion.planning.texts import bytes_text, tile_text

    mark = "*" if item.schedule == chosen.schedule else ""
    kernel = ", ".join(find_schedule(item.schedule).kernels) or "none"
    if item.reason:
        return mark, item.schedule, kernel, "does not fit", "-", "-", "-", "-"
    moved = bytes_text(item.io * problem.element_bytes)
    time = "-" if target.kind == "model" else item.time_text
    io, ratio = f"{item.io:.4g}", f"{item.io / chosen.bound:.2f}"
    return mark, item.schedule, kernel, tile_text(item.tile), io, moved, ratio, time


def _as_json(problem: Problem, target: Machine, chosen: Plan, weighed: Sequence[Candidate]) -> dict[str, Any]:
    from fusion.planning.candidate import find_schedule

    schedules = [
        {
            "schedule": item.schedule,
            "kernels": find_schedule(item.schedule).kernels,
            "tile": dict(item.tile),
            "io": None if item.reason else item.io,
            "seconds": None if item.reason or target.kind == "model" else item.time,
            "ratio": None if item.reason else item.io / chosen.bound,
            "reason": item.reason or None,
        }
        for item in weighed
    ]
    return {
        "problem": str(problem),
        "machine": target.name,
        "M": chosen.capacity,
        "bound": chosen.bound,
        "chosen": chosen.schedule,
        "runs": None if chosen.choice is None else str(chosen.choice),
        "formula": chosen.formula,
        "schedules": schedules,
    }


def _symbolic(arguments: argparse.Namespace) -> int:
    from fusion.errors import UnknownScheduleError
    from fusion.planning.bounds import BOUNDS
    from fusion.planning.optimum import optimum
    from fusion.planning.schedules import SCHEDULES, schedule

    chosen = [item for item in SCHEDULES.values() if item.direction == _direction(arguments)]
    for item in [schedule(arguments.schedule)] if arguments.schedule else chosen:
        print(f"{item}")
        for phase in item.phases:
            print(f"  {phase.name}: reads {phase.reads}")
            print(
                f"  {' ' * len(phase.name)}  writes {phase.writes}; holds {phase.footprint}".replace("ceiling", "ceil")
            )
        print(f"  I/O without ceilings: {item.leading}")
        try:
            found = optimum(item.name)
            if len(str(found)) < 400:
                print(f"  best tile: {found}")
            else:
                print(f"  leading order at the best tile: {found.leading}")
        except UnknownScheduleError:
            print("  best tile: by search")
        print()
    print("lower bounds (orders; constant 1)")
    for bound in BOUNDS.values():
        print(f"  {bound}")
    return 0


def _sweep(arguments: argparse.Namespace, problem: Any) -> int:
    from fusion.planning.plots import plot_sweep, sweep

    path = plot_sweep(sweep(problem, direction=_direction(arguments)), arguments.output or "io-against-M.png")
    print(f"wrote {path}")
    return 0
