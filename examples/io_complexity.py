"""The I/O of attention, counted: three experiments on a simulated two-level memory.

1. FlashAttention (query-stationary) against the lower bound N^2 d^2 / M for M >= d^2.
2. The small-cache schedule against FlashAttention for M < d^2, where the bound is N^2 d / sqrt(M).
3. A fast matrix product (Strassen) for Q K^T against the bound for any product, min(N^2 d^2 / M, N^2).

Every number below is a count of elements that a program moved between a fast memory of M elements, which refuses to
hold more, and a slow one; the same run checks that the program computed attention. Bounds: Saha & Ye (2402.07443).

    python examples/io_complexity.py [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from examples.io_model import bounds, schedule
from examples.io_model.plots import figure, mark_crossing
from examples.io_model.tiles import snapped_tile
from examples.io_model.two_level import least
from examples.simulate.memory import TwoLevelMemory
from examples.simulate.schedules import run
from examples.simulate.strassen import product_io, strassen
from fusion.planning.problem import Problem

N, D = 256, 16
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(N, D)) for _ in range(3))
PROBLEM = Problem(n_q=N, n_k=N, d=D, d_v=D)


def attention() -> np.ndarray:
    """The result that every program must reach."""
    scores = Q @ K.T / math.sqrt(D)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ V


def counted(schedule: str, capacity: int) -> int:
    """Elements that the schedule moved at its derived tile; refuses a wrong result."""
    memory = run(schedule, Q, K, V, capacity=capacity, tile=snapped_tile(schedule, PROBLEM, capacity))
    assert np.allclose(memory.result("O"), attention()), schedule
    return memory.io


def bound(name: str, capacity: int) -> float:
    """The larger of the named bound and what reading the inputs and writing the output takes."""
    sizes = {"n_q": N, "n_k": N, "d": D, "d_v": D, "capacity": capacity}
    return max(bounds.evaluate(name, **sizes), bounds.evaluate("trivial", **sizes))


def large_memory() -> list[tuple[int, int, float]]:
    """Experiment 1: (M, counted, bound) for M from d^2 up."""
    print(f"1. FlashAttention for M >= d^2 = {D * D}   (N = {N}, d = {D})")
    rows = []
    for capacity in (D * D * 2**power for power in range(5)):
        moved, lower = counted("flash", capacity), bound("standard_product", capacity)
        rows.append((capacity, moved, lower))
        print(f"   M = {capacity:6d}  moved {moved:9d}  bound {lower:9.0f}  ratio {moved / lower:.2f}")
    worst = max(moved / lower for _, moved, lower in rows)
    print(f"   The ratio never exceeds {worst:.2f}: FlashAttention is optimal up to a constant.\n")
    return rows


def small_memory() -> list[tuple[int, int, int | None, float]]:
    """Experiment 2: (M, small cache, flash or None, bound) for M up to d^2."""
    print("2. Small cache, M < d^2: the head dimension is tiled too, the scores are spilled")
    rows = []
    for capacity in (D * D // divisor for divisor in (32, 16, 8, 4, 2, 1)):
        flash = counted("flash", capacity) if capacity >= 4 * D + 3 else None
        moved, lower = counted("small_cache", capacity), bound("both_regimes", capacity)
        rows.append((capacity, moved, flash, lower))
        picked = least(PROBLEM, capacity).schedule
        print(
            f"   M = {capacity:4d}  small cache moved {moved:8d}  bound {lower:7.0f}  ratio {moved / lower:.1f}"
            f"   flash moved {flash or 'nothing: no tile fits'}   least I/O: {picked}"
        )
    print(
        "   Below d^2 small_cache keeps within a constant of N^2 d / sqrt(M); flash rises as 1 / M, then cannot run.\n"
    )
    return rows


def strassen_product() -> list[tuple[int, int, float]]:
    """Experiment 3: (M, counted I/O of the product alone, bound)."""
    print("3. A Strassen product for Q K^T against the bound for any product, min(N^2 d^2 / M, N^2)")
    rows = []
    for capacity in (D * D // 4, D * D // 2, D * D, 2 * D * D, 4 * D * D):
        memory = TwoLevelMemory(capacity, Q=Q, K=K, V=V)
        memory.reserve("O", (N, D))
        memory.reserve("L", (N,))
        moved = strassen(memory, (N, D, N, D), snapped_tile("small_cache", PROBLEM, capacity))
        assert moved == product_io(N, N, D, capacity) and np.allclose(memory.result("O"), attention())
        rows.append((capacity, moved, bound("any_product", capacity)))
        note = "" if capacity >= D * D else "   (M < d^2: outside the theorem)"
        print(
            f"   M = {capacity:4d}  moved {moved:8d}  bound {rows[-1][2]:7.0f}  ratio {moved / rows[-1][2]:5.1f}{note}"
        )
    print("   Seven products instead of eight save arithmetic; the traffic stays above the bound.\n")
    return rows


def draw(large: list, small: list, fast: list, directory: Path) -> Path:
    """One plot of all three."""
    canvas, axes = figure(8.5, 5.2)

    def curve(points: list[tuple[int, int]], name: str, label: str) -> None:
        axes.plot(*zip(*sorted(set(points)), strict=True), "o-", color=schedule(name).colour, linewidth=2, label=label)

    curve([(m, io) for m, io, _ in large] + [(m, io) for m, _, io, _ in small if io], "flash", "flash, counted")
    curve([(m, io) for m, io, _, _ in small], "small_cache", "small cache, counted")
    curve([(m, io) for m, io, _ in fast], "split_k", "Strassen Q K^T alone, counted")
    grid = np.geomspace(D * D / 32, D * D * 16, 200)
    axes.plot(grid, [bound("both_regimes", m) for m in grid], "--", color="black", label="bound, standard products")
    beyond = grid[grid >= D * D]
    label = "bound, any product (M ≥ d²)"
    axes.plot(beyond, [bound("any_product", m) for m in beyond], color="black", linewidth=5, alpha=0.2, label=label)
    mark_crossing(axes, D)
    axes.set(xscale="log", yscale="log", xlabel="fast memory M (elements)", ylabel="elements moved")
    axes.set_title(f"Counted I/O of attention, N = {N}, d = {D}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    path = directory / "io_complexity.png"
    canvas.savefig(path)
    return path


def main() -> None:
    """Runs the experiments and, where matplotlib is installed, plots them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("."), help="directory of the plot (default: here)")
    directory = parser.parse_args().output
    start = time.perf_counter()
    rows = large_memory(), small_memory(), strassen_product()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        print(f"plot: {draw(*rows, directory)}")
    except ImportError as error:
        print(f"no plot: {error}")
    print(f"done in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
