"""Plots of I/O against the size of the fast memory, with the lower bounds. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusion.errors import MissingPackageError
from fusion.planning.problem import Problem

from . import SCHEDULES, bounds, counts, schedule
from .schedule import SmallMemoryError, sizes_of
from .tiles import least_io


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """I/O in elements of each schedule at each M (NaN where no tile fits), and the bounds there, for one head."""

    problem: Problem
    capacities: np.ndarray
    io: Mapping[str, np.ndarray]
    bounds: Mapping[str, np.ndarray]


def sweep(problem: Problem, *, direction: str = "forward", points: int = 40) -> Sweep:
    """Every schedule at its best tile for M from d^2 / 64 to N_k (d + d_v)."""
    d = max(problem.d, problem.d_v)
    capacities = np.unique(
        np.geomspace(max(4, d * d / 64), problem.n_k * (problem.d + problem.d_v), points).astype(int)
    )
    chosen = [item for item in SCHEDULES.values() if item.direction == direction and item.exact and not item.unmasked]
    io = {item.name: np.array([_io(item, problem, int(m)) for m in capacities]) for item in chosen}
    sizes = {"n_q": problem.n_q, "n_k": problem.n_k, "d": problem.d, "d_v": problem.d_v}
    wanted = ("trivial", "both_regimes") if direction == "forward" else ("trivial", "backward")
    lower = {name: np.array([bounds.evaluate(name, **sizes, capacity=m) for m in capacities]) for name in wanted}
    return Sweep(problem=problem, capacities=capacities, io=io, bounds=lower)


def _io(item: Any, problem: Problem, capacity: int) -> float:
    try:
        tile = least_io(item, problem, capacity)
    except SmallMemoryError:
        return float("nan")
    return float(counts(item.name, sizes_of(problem, capacity), tile).io)


def figure(width: float = 8.0, height: float = 5.0) -> tuple[Any, Any]:
    """A figure and its axes in the house style. Raises MissingPackageError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "a plot was asked for but matplotlib is not installed; pip install matplotlib"
        ) from error
    canvas = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    return canvas, axes


def plot_sweep(found: Sweep, path: str | Path) -> Path:
    """I/O of each schedule against M with the bounds and the crossing at M = d^2; writes `path` (png, svg, pdf)."""
    canvas, axes = figure()
    problem, capacities = found.problem, found.capacities
    for name, io in found.io.items():
        found_here = schedule(name)
        label = name if found_here.kernels else f"{name} (no kernel)"
        axes.plot(capacities, io, color=found_here.colour, linewidth=2, label=label)
    imposed = next(name for name in found.bounds if name != "trivial")
    axes.plot(
        capacities, found.bounds[imposed], color="black", linewidth=1.5, linestyle="--", label="lower bound (order)"
    )
    axes.plot(
        capacities, found.bounds["trivial"], color="black", linewidth=1, linestyle=":", label="inputs and output once"
    )
    mark_crossing(axes, problem.d)
    axes.set(xscale="log", yscale="log", xlabel="fast memory M (elements)", ylabel="elements moved, one head")
    axes.set_title(f"I/O of attention at its best tile, N = {problem.n_k}, d = {problem.d}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    canvas.savefig(Path(path))
    return Path(path)


def mark_crossing(axes: Any, d: int) -> None:
    """A vertical line at M = d^2, where the two regimes of the lower bound meet."""
    axes.axvline(d * d, color="#999999", linewidth=1)
    axes.annotate(
        "M = d²",
        (d * d, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=9,
    )
