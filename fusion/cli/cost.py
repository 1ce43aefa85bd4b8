"""`fusion cost`: what kernels do for one attention problem on a machine, and what that is predicted to cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from fusion.errors import NoFittingTileError, ProblemError
from fusion.machine import Machine, machine
from fusion.planning.cpu_planner import CpuPlanner
from fusion.planning.plan import Plan, number_text, plan, tile_text
from fusion.planning.problem import Problem, attention_of

EVERY = 1 << 10
"""More choices than a planner has."""

HELP = "Schedule, tile, I/O, lower bound and predicted time of one attention problem."

MACHINES = (
    "cpu (this computer, the default), a100, h100, h200, b200, mi300x, 4090, a target of Triton (sm_89), or a GPU by "
    "its figures: sm_89:cores=128,clock=2.52e9,flops=165e12,l2=75e6,memory=24e9,bandwidth=1.008e12"
)

EXAMPLES = """examples:
  fusion cost --N 4096 --d 64
  fusion cost --N 4096 --d 128 --heads 32 --heads-kv 8 --dtype bf16 --causal --machine h200
  fusion cost --N 4096 --d 128 --dtype bf16 --machine sm_89:cores=128,clock=2.52e9,flops=165e12,bandwidth=1.008e12
  fusion cost --N 4096 --d 64 --M 64K
  fusion cost --N 4096 --d 64 --heads 12 --causal --backward
  fusion cost --N 8192 --d 16 --bound 1 --epsilon 1e-2
  fusion cost --N 1048576 --d 128 --heads 32 --causal --dtype bf16 --machine h200 --devices 8 --link 450e9"""


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
    parser.add_argument("--causal", action="store_true", help="key j is live for query i where j <= i + offset")
    parser.add_argument("--window", type=int, help="keys j > i + offset - window; with --causal a sliding window")
    parser.add_argument(
        "--offset", type=int, help="position of the first query (default Nk - N, at least 0: queries are the last)"
    )
    parser.add_argument(
        "--density", type=float, default=1.0, help="share of live tiles of any other mask (default %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="element type (default %(default)s)")
    parser.add_argument("--machine", "--target", help=MACHINES)
    parser.add_argument("--backward", action="store_true", help="the gradients of Q, K and V in place of the output")
    parser.add_argument("--M", type=elements, help="fast memory of a core of a CPU in elements, as 64K")
    parser.add_argument("--bound", type=float, help="B, with |score| <= B: weigh the polynomial that this allows, too")
    parser.add_argument(
        "--epsilon", type=float, default=1e-2, help="error of the weights, with --bound (default %(default)s)"
    )
    parser.add_argument("--devices", type=int, default=1, help="shard the sequence over so many (default %(default)s)")
    parser.add_argument("--link", type=float, help="bytes/s that a device sends (default 450e9 of a GPU, 1e9 of a CPU)")


def _problem(arguments: argparse.Namespace) -> Problem:
    """The problem of a command line. Raises ProblemError."""
    n_k = arguments.N if arguments.Nk is None else arguments.Nk
    if arguments.offset is not None and not arguments.causal and arguments.window is None:
        raise ProblemError(f"--offset {arguments.offset} moves no mask; give --causal or --window with it")
    offset = max(0, n_k - arguments.N) if arguments.offset is None else arguments.offset
    problem = Problem(
        n_q=arguments.N,
        n_k=n_k,
        d=arguments.d,
        d_v=arguments.d if arguments.dv is None else arguments.dv,
        batch=arguments.batch,
        heads=arguments.heads,
        heads_kv=arguments.heads if arguments.heads_kv is None else arguments.heads_kv,
        dtype=arguments.dtype,
        causal=arguments.causal,
        diagonal=offset if arguments.causal or arguments.window is not None else 0,
        window=arguments.window,
        density=arguments.density,
    )
    for name in ("n_q", "n_k", "d", "d_v", "batch", "heads", "heads_kv"):
        if getattr(problem, name) < 1:
            raise ProblemError(f"{name}={getattr(problem, name)}: there is nothing to move; give a positive size")
    return problem


def run(arguments: argparse.Namespace) -> int:
    problem = _problem(arguments)
    target = machine(arguments.machine)
    if problem.dtype in ("float64", "tfloat32") or target.kind == "cpu" and problem.element_bytes == 1:
        raise ProblemError(
            f"dtype {problem.dtype}: products of kernels take float32 (as tf32 where torch's switches allow it), "
            "bfloat16, float16 and, on GPUs alone, float8, which CPUs widen as they read it; give one of these"
        )
    if arguments.backward and not (arguments.M is arguments.bound is None and arguments.devices == 1):
        raise ProblemError(
            "--backward goes with neither --M, --bound nor --devices, which plan a forward; python -m "
            "examples.io_model --M 64K --backward goes by no machine"
        )
    if arguments.M is not None:
        target = _with_fast_memory(target, problem, arguments.M)
    chosen = plan(problem, target, backward=arguments.backward) if arguments.M is None else _fitting(problem, target)
    crossing = "" if arguments.bound is None else _crossing(problem, target, arguments.bound, arguments.epsilon)
    if arguments.devices < 1 or arguments.link is not None and not arguments.link > 0:
        raise ProblemError(f"--devices {arguments.devices} --link {arguments.link}: give positive numbers")
    sharded = _sharded(problem, target, arguments) if arguments.devices > 1 else None
    if arguments.json:
        found = {**chosen.to_dict(), "problem": str(problem), "runs": str(chosen.choice)}
        found |= {} if sharded is None else sharded[0]
        print(json.dumps(found, indent=2))
        return 0
    print(f"{chosen.explain()}\nruns       {chosen.choice}")
    if sharded is not None:
        print(sharded[1])
    if crossing:
        print(f"polynomial {crossing}")
    return 0


def elements(text: str) -> int:
    """Number of elements, as 65536 or 64K (of 1024; M: of 1024 squared)."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def _with_fast_memory(target: Machine, problem: Problem, count: int) -> Machine:
    if target.kind == "gpu" or count < 1:
        raise ProblemError(
            f"--M {count} with --machine {target.name}: M is a positive number, and of a CPU, as kernels of a GPU are "
            "planned for the memory that it has; python -m examples.io_model --M 64K goes by no machine"
        )
    level = replace(target.level(target.fast), capacity=count * problem.element_bytes)
    return replace(target, levels=tuple(level if each.name == level.name else each for each in target.levels))


def _fitting(problem: Problem, target: Machine) -> Plan:
    """The plan of least time whose tile fits the fast memory. Raises NoFittingTileError."""
    choices = CpuPlanner(attention_of(problem), target).best((), EVERY)
    plans = [plan(problem, target, choice=choice) for choice in choices]
    if fitting := [each for each in plans if each.footprint <= each.capacity]:
        return fitting[0]
    least = min(plans, key=lambda each: each.footprint)
    raise NoFittingTileError(
        f"--M {least.capacity}: the smallest tile that kernels have here, {tile_text(least.tile)}, holds "
        f"{number_text(least.footprint)} elements; give at least as many, or python -m examples.io_model --M "
        f"{least.capacity}, which goes by no machine's tiles"
    )


def _sharded(problem: Problem, target: Machine, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Cost of the schedules between devices: as data, and as text."""
    from fusion.sequences import cost, schedules  # torch.distributed: not where it is not asked for

    traffic = schedules.across(problem, arguments.devices)
    given = traffic, target, problem.dtype, arguments.link
    bound = traffic.bound()
    across = {"across": cost.rows(*given), "across_devices": arguments.devices}
    across["across_bound_bytes"] = None if bound is None else bound * traffic.element_bytes
    return across, cost.table(*given)


def _crossing(problem: Problem, target: Machine, bound: float, epsilon: float) -> str:
    """The length from which on polynomial attention is predicted to be faster than exact."""
    from fusion.approximate import cost
    from fusion.codegen.cpu import polynomial as kernels

    split = target.kind == "gpu" or kernels.supports(target) is None
    return cost.crossing_text(target, problem, bound, epsilon, split)
