"""Picks schedule and tile for one attention problem on one machine, and says what it expects of them.

    >>> from fusion import Problem, plan
    >>> problem = Problem(n_q=4096, n_k=4096, d=128, d_v=128, heads=32, heads_kv=8, dtype="bfloat16", causal=True)
    >>> print(plan(problem, machine="h200"))

On the two-level model (`Machine.two_level(M)`) the plan of least I/O is chosen, on processors the one of least
predicted time. The formulas are compiled once; plans are cached.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from fusion.errors import NoFittingTileError, ProblemError, UnknownScheduleError
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.candidate import Candidate, Given, find_schedule
from fusion.planning.choice import Choice
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import planes_of, target_of
from fusion.planning.texts import bytes_text, number_text, seconds_text, tile_text

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec
    from fusion.planning.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Candidate):
    """How one attention problem is to be run, and what that is predicted to cost: the candidate that was chosen.

    bound: a lower bound on `io`, for a fast memory of `capacity` elements; ratio = io / bound.
    choice: what was chosen for a kernel, where this is its plan.
    computed: share of the scores that lie in tiles which the kernel computes.
    compulsory: whether the bound is what every schedule must move (inputs that somebody needs, outputs), and exact;
        otherwise it is an order, with the constant 1.
    """

    problem: Problem
    machine: Machine = field(repr=False)
    bound: float
    capacity: int
    features: int = 1
    choice: Choice | None = None
    compulsory: bool = False
    computed: float = 1.0

    @property
    def B_r(self) -> int:
        """Rows (queries) of a tile."""
        return dict(self.tile).get("B_r", 1)

    @property
    def B_c(self) -> int:
        """Columns (keys) of a tile."""
        return dict(self.tile).get("B_c", 1)

    @property
    def stages(self) -> int:
        """Key tiles in flight."""
        return dict(self.tile).get("stages", 1)

    @property
    def splits(self) -> int:
        """Into how many parts the keys are cut."""
        return -(-max(1, self.problem.n_k) // dict(self.tile).get("B_s", max(1, self.problem.n_k)))

    @property
    def runs(self) -> str:
        """What a GPU kernel runs, in words: more than schedule and tile was chosen for it."""
        return "" if self.choice is None or self.machine.kind != "gpu" else str(self.choice)

    @property
    def io_bytes(self) -> float:
        """Bytes moved between fast and slow memory, in the dtype of the products."""
        return self.io * self.problem.element_bytes

    @property
    def ratio(self) -> float:
        """Predicted I/O over the lower bound (whose constant is 1, see fusion.planning.bounds)."""
        return self.io / self.bound

    @property
    def bound_text(self) -> str:
        """The kind of bound this is, in words."""
        return "compulsory: what is needed, moved once" if self.compulsory else "an order, with the constant 1"

    @property
    def limited_by(self) -> str:
        """The resource predicted to be busiest."""
        return max(self.resources, key=lambda pair: pair[1])[0] if self.resources else "memory"

    @property
    def symbolic(self) -> str:
        """The schedule's I/O for one head, in symbols."""
        return str(find_schedule(self.schedule).io).replace("ceiling", "ceil")

    @property
    def formula(self) -> str:
        """The schedule's I/O for one head with numbers put in, and its value."""
        from fusion.planning.tiles import sizes_of

        sizes = sizes_of(self.problem, self.capacity, self.share, self.features)
        values = {**sizes, **dict(self.tile)}
        shown = lambda match: number_text(values[match[0]]) if match[0] in values else match[0]
        text = re.sub(r"\b[A-Za-z]\w*\b", shown, self.symbolic)
        return f"{text} = {number_text(self.io / self.problem.problems)}"

    def alternatives(self) -> tuple[Candidate, ...]:
        """Every schedule weighed for this problem, best first (cached)."""
        return compare(self.problem, self.machine, features=self.features if self.features > 1 else None)

    def explain(self) -> str:
        """The plan on several lines: formula with numbers put in, I/O, bound, resources, alternatives."""
        lines = [
            f"problem    {self.problem}",
            f"machine    {self.machine.name}: M = {self.capacity} elements of {self.problem.dtype}",
            f"schedule   {self.schedule} {tile_text(self.tile)}, footprint {number_text(self.footprint)} elements, "
            f"{self.kernels_text}",
            f"I/O        {self.symbolic}",
            f"           = {self.formula} per head",
            f"           x {self.problem.problems} heads = {number_text(self.io)} elements"
            f" = {bytes_text(self.io_bytes)}",
            f"bound      {number_text(self.bound)} elements ({self.bound_text}); ratio {self.ratio:.2f}",
        ]
        if self.machine.kind != "model":
            parts = ", ".join(f"{name} {seconds_text(value)}" for name, value in self.resources)
            lines.append(f"time       {self.time_text} predicted, limited by {self.limited_by} ({parts})")
        others = [f"{candidate}" for candidate in self.alternatives() if candidate.schedule != self.schedule]
        if self.machine.kind != "model" and any(candidate.ideal for candidate in self.alternatives()):
            others.append("(>=: no model of a kernel's time; the time if the busiest resource were never idle)")
        return "\n".join(lines + [f"{'others' if index == 0 else '':10} {text}" for index, text in enumerate(others)])

    def __str__(self) -> str:
        moved = f"I/O {bytes_text(self.io_bytes)} ({self.ratio:.2f}x bound)"
        predicted = f", {self.time_text} predicted, limited by {self.limited_by}"
        time = "" if self.machine.kind == "model" else predicted
        kernel = "" if find_schedule(self.schedule).runs_on(self.machine.kind) else ", no kernel of it"
        return f"{self.schedule} {tile_text(self.tile)} on {self.machine.name}: {moved}{time}{kernel}"


def plan(
    problem: Problem | Any,
    machine: str | Machine | None = None,
    schedule: str | None = None,
    *,
    sizes: Mapping[Any, int] | None = None,
    allow: Collection[str] | None = None,
    direction: str = "forward",
    features: int | None = None,
    tile: tuple[int, int] | Mapping[str, int] | None = None,
    choice: Choice | None = None,
) -> Plan:
    """The plan for `problem` on `machine` (a name, a Machine, or None: this CPU).

    problem: a `Problem`, or an `AttentionSpec` with the values of its sizes in `sizes`.
    schedule: take this one; otherwise the best of `allow` in a direction, "forward" or "backward": by default the
        choice of the kernels that there are, tile included.
    tile: (B_r, B_c) where they are settled, or by name with what else is, of stages and B_s.
    choice: what a kernel runs, whose cost is asked.
    features: number of polynomial features r.

    Raises UnknownMachineError, UnknownScheduleError, ProblemError, NoFittingTileError.
    """
    spec = problem
    if not isinstance(problem, Problem):
        problem = _from_spec(problem, sizes)
    target = find_machine(machine)
    multiples = _register_tile(target, None if spec is problem else spec)
    if choice is None and direction == "forward" and allow is tile is features is None:
        choice = _kernels_choice(spec, problem, sizes, target)
        choice = choice if choice is not None and schedule in (None, choice.schedule) else None
    if choice is not None:
        allow, tile = (choice.schedule,), choice.tiling | {"packed": choice.packed}
    names = _names(schedule, allow, direction, target, features)
    settled = tile if isinstance(tile, Mapping) else dict(zip(("B_r", "B_c"), tile or (), strict=False))
    return _plan(problem, target, names, multiples, features or 1, tuple(sorted(settled.items())), choice)


def _kernels_choice(given: Any, problem: Problem, sizes: Mapping[Any, int] | None, target: Machine) -> Choice | None:
    """The choice of the kernels of this attention, where they serve it and its mask is known. problem: of `given`."""
    import torch

    if target.kind == "model" or isinstance(given, Problem) and (given.density < 1 or given.among):
        return None
    if isinstance(given, Problem):
        return _choice_for(problem, target, torch.get_num_threads())
    return _chosen(
        given,
        problem,
        [sizes[name] for name in given.sizes] if isinstance(sizes, Mapping) else [*(sizes or ())],
        target,
    )


@functools.lru_cache(maxsize=4096)
def _choice_for(problem: Problem, target: Machine, threads: int) -> Choice | None:
    """The choice for a problem given by its sizes. threads: what the planner goes by, too."""
    from fusion.planning.from_sizes import attention_of

    return _chosen(attention_of(problem), problem, (), target)


def _chosen(spec: AttentionSpec, problem: Problem, values: Sequence[int], target: Machine) -> Choice | None:
    from fusion.planning.planner import planner_for
    from fusion.planning.tiles import gpu_tiles

    with contextlib.suppress(NoFittingTileError):  # said once more, with what would fit
        if target.kind == "gpu":
            gpu_tiles(problem, target)
        return planner_for(spec, target).choose(values)
    return None


def _register_tile(machine: Machine, spec: AttentionSpec | None = None) -> tuple[int, int]:
    """(rows, keys) of the CPU kernel's register tile on a machine: of a spec, or of softmax attention."""
    target = target_of(machine)
    return target.register_tile(planes_of(spec, target) if spec is not None else int(target.amx))


def _from_spec(given: Any, sizes: Mapping[Any, int] | None) -> Problem:
    from fusion.ir import AttentionSpec
    from fusion.planning.from_spec import problem_of

    if not isinstance(given, AttentionSpec):
        raise ProblemError(f"plan() was given a {type(given).__name__}; give a Problem or an AttentionSpec")
    return problem_of(given, sizes)


def _candidates(direction: str, features: int | None) -> list[Schedule]:
    """What is weighed without being named: exact schedules, and polynomials where r is known."""
    from fusion.planning.schedules import SCHEDULES

    every = [item for item in SCHEDULES.values() if item.direction == direction and not item.mixes_heads]
    if not every:
        raise UnknownScheduleError(f"direction {direction!r} is not known; known: forward, backward")
    return [item for item in every if item.exact or (features is not None and item.takes_features)]


def _weighed(problem: Problem, names: Iterable[str]) -> list[str]:
    """The names that say something of this problem: what only skips tiles stands for the whole where all are live."""
    if problem.masked:
        return list(names)
    return list(dict.fromkeys(name for name in names if not find_schedule(name).unmasked)) or list(names)


def _names(
    schedule: str | None, allow: Collection[str] | None, direction: str, target: Machine, features: int | None
) -> tuple[str, ...]:
    """Names of the schedules to choose from, in the table's order."""
    if schedule is not None:
        chosen = find_schedule(schedule)
        if chosen.takes_features and not features:
            raise ProblemError(f"the {chosen.name} schedule needs features=r, the number of polynomial features")
        return (chosen.name,)
    if allow is not None:
        return tuple(find_schedule(name).name for name in allow)
    every = _candidates(direction, features)
    if target.kind != "model":
        every = [item for item in every if item.runs_on(target.kind)]
    return tuple(item.name for item in every)


@functools.lru_cache(maxsize=4096)
def _plan(
    problem: Problem,
    target: Machine,
    names: tuple[str, ...],
    multiples: tuple[int, int],
    features: int,
    tile: Given = (),
    choice: Choice | None = None,
) -> Plan:
    from fusion.planning.choose import candidate, lower_bound

    weighed = [candidate(problem, target, name, multiples, features, tile) for name in _weighed(problem, names)]
    usable = [item for item in weighed if not item.reason]
    if not usable:
        if len(weighed) == 1:
            raise NoFittingTileError(weighed[0].reason, weighed[0].needed)
        raise NoFittingTileError(_none_fits(problem, target, weighed))
    best = min(usable, key=lambda item: (item.ideal, item.time, item.io))  # a lower limit beats no prediction
    capacity, backward = target.fast_elements(problem.dtype), best.schedule.startswith("backward")
    bound = lower_bound(problem, capacity, backward=backward)
    return Plan(
        problem=problem,
        machine=target,
        bound=bound,
        computed=_computed(problem, target, best, multiples),
        compulsory=bound == lower_bound(problem, math.inf, backward=backward),
        choice=choice,
        capacity=capacity,
        features=features,
        **{entry.name: getattr(best, entry.name) for entry in fields(best)},
    )


def _computed(problem: Problem, machine: Machine, best: Candidate, multiples: tuple[int, int]) -> float:
    """`Plan.computed`: by register tiles on a CPU, whatever the block of rows that they belong to."""
    tile = (dict(best.tile).get("B_r", 1), dict(best.tile).get("B_c", 1))
    by_register = machine.kind == "cpu" and tile[0] > 1
    return problem.live_share(*(multiples if by_register else tile)) if find_schedule(best.schedule).skips else 1.0


def _none_fits(problem: Problem, target: Machine, weighed: list[Candidate]) -> str:
    if not all(item.needed for item in weighed):  # limits other than M: say each
        return "; ".join(dict.fromkeys(item.reason for item in weighed))
    named = ", ".join(f"{item.schedule} {item.needed:.0f}" for item in sorted(weighed, key=lambda item: item.needed))
    return (
        f"no schedule for {problem} fits a fast memory of M={target.fast_elements(problem.dtype)} elements; "
        f"the smallest tiles need: {named}; give a larger M"
    )


@functools.lru_cache(maxsize=1024)
def compare(
    problem: Problem, target: Machine, *, direction: str = "forward", features: int | None = None
) -> tuple[Candidate, ...]:
    """Every schedule of that direction with its best tile on `target`, best first; what does not fit is last."""
    from fusion.planning.choose import candidate

    names = _weighed(problem, [item.name for item in _candidates(direction, features)])
    multiples = _register_tile(target)
    weighed = [candidate(problem, target, name, multiples, features or 1) for name in names]
    return tuple(sorted(weighed, key=lambda item: (bool(item.reason), item.time, item.io)))
