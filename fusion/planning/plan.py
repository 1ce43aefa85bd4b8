"""Plan of an attention on a machine, with its predicted cost.

    >>> from fusion import Problem, plan
    >>> problem = Problem(n_q=4096, n_k=4096, d=128, d_v=128, heads=32, heads_kv=8, dtype="bfloat16", causal=True)
    >>> print(plan(problem, machine="h200"))

A planner makes the choice, `Choice`, which kernels take; a `Plan` adds the elements that its schedule moves, a lower
bound on them, and the seconds that it takes.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusion.errors import ProblemError
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, in_use
from fusion.machine import machine as find_machine
from fusion.machine.processors import bytes_text, flops_text, seconds_text
from fusion.planning import planner_for
from fusion.planning.choice import Choice
from fusion.planning.counted import with_counts
from fusion.planning.cpu import Times
from fusion.planning.cpu_planner import MOST_ROWS
from fusion.planning.problem import Problem, attention_of, problem_of
from fusion.planning.register_tiles import planes_of, target_for
from fusion.planning.schedules import SCHEDULES, elements, lower_bound


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows of cells as lines, the first `left` columns flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([(str.ljust if k < left else str.rjust)(cell, widths[k]) for k, cell in enumerate(row)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def number_text(value: float) -> str:
    """A number with as many digits as a formula needs to give its integer again."""
    return f"{int(value)}" if float(value).is_integer() else f"{value:.10g}"


def tile_text(tile: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={size}" for name, size in tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one attention problem, with its predicted cost.

    choice: what its kernel is given.
    io, bound: elements moved for the whole problem, and a lower bound on them for a fast memory of `capacity` elements.
    compulsory: the bound is what every schedule must move (inputs that somebody needs, outputs), and exact; otherwise
        it is an order, with the constant 1.
    footprint: elements held in the fast memory.
    heads: whose elements the schedule's formula counts; query heads whose rows share a block, and so read keys once,
        are one.
    sizes: values of the formula's symbols.
    computed: share of the scores that lie in tiles which the kernel computes.
    time: s.
    resources: seconds that each is busy.
    """

    problem: Problem
    machine: Machine = field(repr=False)
    choice: Choice
    io: float
    bound: float
    compulsory: bool
    footprint: float
    heads: int
    sizes: Mapping[str, float] = field(repr=False, hash=False)
    computed: float
    time: float
    resources: tuple[tuple[str, float], ...]

    @property
    def schedule(self) -> str:
        """The name of the schedule, one of `SCHEDULES`."""
        return self.choice.schedule

    @property
    def tile(self) -> tuple[tuple[str, int], ...]:
        """Sizes of the schedule's tile, by the names of its formula."""
        formulas = SCHEDULES[self.schedule].io + SCHEDULES[self.schedule].footprint
        return tuple(sorted((name, size) for name, size in self.choice.tiling.items() if name in formulas))

    @property
    def backward(self) -> bool:
        """Whether this is the plan of a backward."""
        return SCHEDULES[self.schedule].passes > 0

    @property
    def B_r(self) -> int:
        """Rows (queries) of a tile."""
        return self.choice.tile.rows

    @property
    def B_c(self) -> int:
        """Columns (keys) of a tile."""
        return self.choice.tile.keys

    @property
    def runs(self) -> str:
        """Form of a GPU kernel, in words: more than schedule and tile was chosen for it."""
        return str(self.choice) if self.machine.kind == "gpu" else ""

    @property
    def capacity(self) -> int:
        """M, the elements of the fast memory."""
        return self.machine.fast_elements(self.problem.dtype)

    @property
    def io_bytes(self) -> float:
        """Bytes moved between fast and slow memory, in the dtype of the products."""
        return self.io * self.problem.element_bytes

    @property
    def ratio(self) -> float:
        """Predicted I/O over the lower bound."""
        return self.io / self.bound

    @property
    def bound_text(self) -> str:
        """The kind of bound this is, in words."""
        if not self.compulsory:
            return "an order, with the constant 1"
        if self.problem.density < 1:
            return "compulsory for every mask of this density: its share of the inputs, and the outputs, moved once"
        return "compulsory: what is needed, moved once"

    @property
    def flops(self) -> float:
        """Operations of the products over live scores, two or a backward's five, a multiply-add counted as two."""
        problem, (of_d, of_v) = self.problem, SCHEDULES[self.schedule].products
        scores = problem.problems * problem.n_q * problem.n_k * problem.live_share(1)
        return 2 * scores * (of_d * problem.d + of_v * problem.d_v)

    @property
    def compulsory_bytes(self) -> float:
        """Bytes that every schedule moves: inputs that somebody needs, and outputs."""
        return lower_bound(self.problem, math.inf, self.backward) * self.problem.element_bytes

    @property
    def rates(self) -> tuple[float, float]:
        """Peak of the multiply-adds (flop/s) and bandwidth of the memory (bytes/s)."""
        return self.machine.flops(self.problem.dtype), self.machine.main.bandwidth

    def peaks(self, seconds: float) -> tuple[float, float]:
        """Shares of `rates` where a call takes so long: of the first by `flops`, the second by `compulsory_bytes`."""
        peak, bandwidth = self.rates
        return self.flops / peak / seconds, self.compulsory_bytes / bandwidth / seconds

    @property
    def limited_by(self) -> str:
        """The resource predicted to be busiest."""
        return max(self.resources, key=lambda pair: pair[1])[0]

    @property
    def symbolic(self) -> str:
        """The schedule's I/O for one head, in symbols."""
        return SCHEDULES[self.schedule].moved(self.sizes["t"] > 0)

    @property
    def formula(self) -> str:
        """The schedule's I/O for one head with numbers put in, and its value."""
        shown = lambda match: number_text(self.sizes[match[0]]) if match[0] in self.sizes else match[0]
        text = re.sub(r"\b[A-Za-z]\w*\b", shown, self.symbolic)
        return f"{text} = {number_text(self.io / self.heads)}"

    def to_dict(self) -> dict[str, Any]:
        """Fields of the plan, for JSON."""
        return {
            "machine": self.machine.name,
            "capacity_elements": self.capacity,
            "schedule": self.schedule,
            "tile": dict(self.tile),
            "footprint_elements": self.footprint,
            "io_elements": self.io,
            "io_bytes": self.io_bytes,
            "bound_elements": self.bound,
            "bound_kind": self.bound_text,
            "ratio": self.ratio,
            "flops": self.flops,
            "compulsory_bytes": self.compulsory_bytes,
            "seconds": self.time,
            "resource_seconds": dict(self.resources),
            "limited_by": self.limited_by,
            **dict(zip(("peak_flops_per_second", "bandwidth_bytes_per_second"), self.rates, strict=True)),
            **dict(zip(("share_of_peak", "share_of_bandwidth"), self.peaks(self.time), strict=True)),
            "formula": self.formula,
        }

    def explain(self) -> str:
        """The plan on several lines: formula with numbers put in, I/O, bound, resources."""
        together = self.problem.problems // self.heads
        heads = "heads" if together == 1 else f"heads of keys, each with the rows of {together} heads of queries,"
        peak, bandwidth = self.rates
        lines = [
            f"problem    {self.problem}",
            f"machine    {self.machine.name}: M = {self.capacity} elements of {self.problem.dtype}, "
            f"{flops_text(peak)}/s{_clock_text(self.machine)}, memory {bytes_text(bandwidth)}/s",
            f"schedule   {self.schedule} {tile_text(self.tile)}, footprint {number_text(self.footprint)} elements",
            f"I/O        {self.symbolic}",
            f"           = {self.formula} per head",
            f"           x {self.heads} {heads} = {number_text(self.io)} elements"
            f" = {bytes_text(self.io_bytes)}{self._levels()}",
            f"bound      {self.bound:.0f} elements ({self.bound_text}); ratio {self.ratio:.2f}",
            f"time       {seconds_text(self.time)} predicted, limited by {self.limited_by} ({self._times()})",
            f"work       {flops_text(self.flops)} in products of live scores, {bytes_text(self.compulsory_bytes)} that "
            "every schedule moves",
            f"reaches    {flops_text(self.flops / self.time)}/s: {peaks_text([self], self.time)}",
        ]
        return "\n".join(lines)

    def _times(self) -> str:
        """The resources' times, by how they add up."""
        gpu, ways = self.machine.kind == "gpu", {"side by side": [], "in turn": []}
        for name, value in self.resources:
            beside = name != "launch" and not self.backward if gpu else name in ("vectors", "keys")
            ways["side by side" if beside else "in turn"] += [f"{name} {seconds_text(value)}"] * (value > 0)
        return "; ".join(f"{way}: {', '.join(texts)}" for way, texts in ways.items() if texts)

    def _levels(self) -> str:
        """The memories of a GPU between which that is moved, in words."""
        if self.machine.kind == "cpu":
            return ""
        if self.problem.n_q <= self.B_r and not self.backward:  # no other block reads the same keys
            return " from HBM"
        return f" between multiprocessors and L2; between L2 and HBM at least {bytes_text(self.compulsory_bytes)}"

    def __str__(self) -> str:
        moved = f"I/O {bytes_text(self.io_bytes)} ({self.ratio:.2f}x bound)"
        predicted = f"{seconds_text(self.time)} predicted, limited by {self.limited_by}"
        return f"{self.schedule} {tile_text(self.tile)} on {self.machine.name}: {moved}, {predicted}"


def plan(
    problem: Problem | AttentionSpec,
    machine: str | Machine | None = None,
    *,
    sizes: Mapping[str, int] | Sequence[int] | None = None,
    choice: Choice | None = None,
    values: Mapping[int, Tensor] | None = None,
    backward: bool = False,
) -> Plan:
    """The plan for `problem` on `machine` (a name, a Machine, or None: this CPU).

    problem: a `Problem`, or an `AttentionSpec` with the values of its sizes in `sizes`, by name or in order.
    choice: what a kernel runs, whose cost is asked; by default what the machine's planner chooses.
    values: tensors that the spec's mask reads, by operand: its tiles are counted on them; none for a mask of
        positions.
    backward: the plan of the gradients of Q, K and V in place of the output's.

    Of this CPU the time is that on torch's number of threads.

    Raises UnknownMachineError, ProblemError, NoFittingTileError.
    """
    target = find_machine(machine)
    if isinstance(problem, Problem):
        spec, extents = attention_of(problem), ()
        problem = replace(problem, score_flops=problem.score_flops + problem_of(spec, ()).score_flops)
    elif isinstance(problem, AttentionSpec):
        spec, problem = problem, problem_of(problem, sizes)
        extents = tuple(sizes[name] for name in spec.sizes) if isinstance(sizes, Mapping) else tuple(sizes or ())
    else:
        raise ProblemError(f"plan() was given a {type(problem).__name__}; give a Problem or an AttentionSpec")
    if choice is None:
        choice = _chosen(spec, extents, problem, target, torch.get_num_threads(), backward)
    if values is not None and isinstance(sizes, Mapping):
        _, block, _ = reading(choice, spec, problem, target)
        problem = with_counts(problem, spec, sizes, values, block, choice.tile.keys)
    return _with_cost(choice, spec, problem, in_use(target))


def peaks_text(plans: Sequence[Plan], seconds: float) -> str:
    """Shares of the peaks that attentions reach together where they take so many seconds."""
    products, moved = (100 * sum(column) for column in zip(*(plan.peaks(seconds) for plan in plans), strict=True))
    machine = plans[0].machine
    faster = "AMX tiles multiply" if "amx_bf16" in machine.isa else "the processor runs"
    over = f" (above 100 %: {faster} faster than that)" if products > 100 else ""
    at, near = _clock_text(machine), " (above 100 %: much of it from caches)" if moved > 100 else ""
    return f"{products:.3g} % of the multiply-add peak{at}{over}, {moved:.3g} % of the memory's bandwidth{near}"


def _clock_text(machine: Machine) -> str:
    """The clock of a CPU that its peak goes by: the one that the system states, above which processors may run."""
    return f" at the nominal {machine.clock / 1e9:.3g} GHz" if machine.clock else ""


@functools.lru_cache(maxsize=4096)
def _chosen(
    spec: AttentionSpec, values: tuple[int, ...], problem: Problem, machine: Machine, threads: int, backward: bool
) -> Choice:
    """The planner's choice. threads: what it goes by, too."""
    if backward:
        return _backward_model(machine).backward_choice(spec, problem, machine)
    choice = planner_for(spec, machine).choose(values)
    if machine.kind == "gpu":
        from fusion.planning.gpu_model import check_fits

        check_fits(spec, problem, machine, choice.tile)
    if problem.density < 1 and choice.schedule == "flash":  # of which the spec knows nothing
        return replace(choice, schedule="block_sparse")
    return choice


@functools.lru_cache(maxsize=4096)
def _with_cost(choice: Choice, spec: AttentionSpec, problem: Problem, machine: Machine) -> Plan:
    """The plan with this choice."""
    schedule, (moved, block, computed) = SCHEDULES[choice.schedule], reading(choice, spec, problem, machine)
    backward = schedule.passes > 0
    if backward:
        times = _backward_times(choice, spec, problem, machine)
    elif machine.kind == "gpu":
        from fusion.planning.gpu_model import forward_time

        times = forward_time(spec, moved, machine, choice)
    else:
        from fusion.planning.cpu_planner import choice_time

        times = choice_time(spec, problem, machine, choice)
    share, scores = (moved.live_share(*block), problem.computed_share(*computed)) if schedule.skips else (1.0, 1.0)
    extents = {"N_q": moved.n_q, "N_k": moved.n_k, "d": moved.d, "d_v": moved.d_v}  # of 0 they count as 1
    sizes: dict[str, float] = {name: max(1, n) for name, n in extents.items()}
    sizes |= {**choice.tiling, "B_r": block[0], "live": share}
    sizes["t"] = scores * (sum(table.bytes for table in problem.tables) / problem.element_bytes)
    sizes |= {f"live_{name[1:].lower()}": moved.live_share(tile.rows, tile.keys) for name, tile in choice.beside}
    bound = lower_bound(problem, machine.fast_elements(problem.dtype), backward)
    return Plan(
        problem=problem,
        machine=machine,
        choice=choice,
        io=elements(schedule.moved(), sizes) * moved.problems,
        bound=bound,
        compulsory=bound == lower_bound(problem, math.inf, backward),
        footprint=elements(schedule.footprint, sizes),
        heads=moved.problems,
        sizes=sizes,
        computed=scores,
        time=float(times.total[0]),
        resources=tuple(times.at(0).items()),
    )


def _backward_model(machine: Machine) -> Any:
    return importlib.import_module(f"fusion.planning.{'gpu_model' if machine.kind == 'gpu' else 'cpu_backward'}")


def _backward_times(choice: Choice, spec: AttentionSpec, problem: Problem, machine: Machine) -> Times:
    """Seconds of a backward's kernels, one after the other; the first reads the output and its gradient."""
    of_kernels = _backward_model(machine).backward_seconds(spec, problem, machine, choice)
    read = problem.problems * problem.n_q * (2 * problem.d_v * problem.element_bytes + 4)
    seconds = {"delta": read / machine.main.bandwidth, **of_kernels, "launch": machine.launch * (1 + len(of_kernels))}
    return Times(total=np.array([sum(seconds.values())]), resources={n: np.array([s]) for n, s in seconds.items()})


def reading(
    choice: Choice, spec: AttentionSpec, problem: Problem, machine: Machine
) -> tuple[Problem, tuple[int, int], tuple[int, int]]:
    """(The problem with those heads together whose rows share a block, and so read keys once; the rows of a block and
    the steps in which its keys end; the tiles of the scores that are computed.)"""
    tile, own = choice.tile, (choice.tile.rows, choice.tile.keys)
    if machine.kind == "gpu":
        together = choice.packed > 1 or SCHEDULES[choice.schedule].passes > 0
        return problem.with_heads_together() if together else problem, own, own
    if SCHEDULES[choice.schedule].passes:
        return problem, own, own
    target = target_for(spec, machine)
    register_tile = target.register_tile(planes_of(spec, target))
    if tile.rows == 1:
        together = problem.with_heads_together()
        return together, (min(MOST_ROWS, together.n_q), register_tile[1]), (1, tile.keys)
    return problem, (tile.rows, register_tile[1]), register_tile
