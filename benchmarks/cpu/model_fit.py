"""How well the cost model ranks tiles: predicted against measured time of the CPU kernel over a grid of shapes and
tiles.

For every shape a grid of tiles is compiled and timed, all tiles of a shape in turns within one process. Printed: the
rank correlation (Spearman) of prediction and measurement within each shape and over all points, and how far the tile
that the kernel chooses by the model is from the best measured one; --output has the raw points, too. `--fit` prints the
constants (`fusion.planning.cpu.COSTS`) that suit the points best: non-negative least squares on relative errors.

    python -m benchmarks.cpu.model_fit --dtype float32 --seconds 50 --output fit.json
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import results
from benchmarks.common.measuring import Entry, interleave
from benchmarks.common.rows import ROWS, traced
from fusion.codegen.cpu.launch import Kernel
from fusion.exactness import errors
from fusion.ir import AttentionSpec
from fusion.machine import Machine, with_cores
from fusion.planning.cpu import Costs, cpu_counts
from fusion.planning.cpu_planner import CpuPlanner
from fusion.planning.problem import problem_of
from fusion.planning.register_tiles import Target, Tiling, target_of, tilings_for


class Shape(NamedTuple):
    """One attention call."""

    heads: int
    n: int
    d: int
    causal: bool = False

    def sizes(self, spec: AttentionSpec) -> list[int]:
        """Values of the spec's sizes."""
        return [{"B0": 1, "B1": self.heads}.get(name, self.n) for name in spec.sizes]

    def __str__(self) -> str:
        return f"H={self.heads} N={self.n} d={self.d}{' causal' if self.causal else ''}"


SHAPES = tuple(itertools.starmap(Shape, (
    (12, 128, 64), (2, 200, 64), (12, 384, 32), (12, 512, 64, True), (12, 512, 64), (8, 777, 80), (12, 1024, 64),
    (12, 1024, 64, True), (8, 1024, 128), (4, 2048, 64, True), (2, 2048, 128, True), (1, 4096, 64), (1, 8192, 64),
    (1, 4096, 128), (2, 2048, 32), (1, 4096, 64, True), (2, 512, 128), (6, 256, 64),
)))  # fmt: skip


def specification(shape: Shape, dtype: str) -> AttentionSpec:
    """Plain or causal softmax attention on [B, H, N, d] tensors, the lengths known at run time."""
    return traced(ROWS["causal" if shape.causal else "full"], getattr(torch, dtype), shape.d)


def tiles(shape: Shape, base: Tiling, target: Target) -> Iterator[tuple[int, int]]:
    """(B_r, B_c) that the kernel's register tile allows and the shape is not too small for."""
    rows, step = target.register_tile(base.planes)
    for count, keys in itertools.product((1, 2, 4, 6, 8, 12), (64, 128, 256, 512)):
        keys = -(-keys // step) * step
        if (count - 1) * rows < shape.n and (keys <= 64 or keys // 2 < shape.n):
            yield count * rows, keys


def kernel_for(
    shape: Shape, dtype: str, tile: tuple[int, int], base: Tiling, target: Target
) -> Callable[..., torch.Tensor]:
    """The compiled kernel with that tile. Exchange this function to fit the model to another kernel."""
    tiling = replace(base, groups=tile[0] // target.lanes, keys=tile[1])
    spec = specification(shape, dtype)
    kernel = Kernel(spec, (tiling, *tilings_for(spec, target)[1:]), target)
    return lambda *operands: kernel(operands, shape.sizes(spec))


def measure(
    shape: Shape, dtype: str, base: Tiling, target: Target, chosen: tuple[int, int], seconds: float
) -> dict[tuple[int, int], float]:
    """Median seconds of each tile, the planner's among them, in turns. (Copies of one kernel differ by 8 % in their
    least seconds, by 1 % in their median.)"""
    operands = [torch.randn(1, shape.heads, shape.n, shape.d).to(getattr(torch, dtype)) for _ in range(3)]
    attend = ROWS["causal" if shape.causal else "full"].plain
    eager, exact = attend(*operands), attend(*(x.double() for x in operands))
    entries = {}
    for tile in dict.fromkeys([chosen, *tiles(shape, base, target)]):
        call = functools.partial(kernel_for(shape, dtype, tile, base, target), *operands)
        if (comparison := errors(call(), eager, exact)).share > 1:
            raise SystemExit(f"{shape}, tile {tile}: {comparison}; a wrong kernel is not timed")
        entries[tile] = Entry(name=str(tile), call=call)
    interleave([*entries.values()], seconds=seconds)
    return {tile: entry.median or math.inf for tile, entry in entries.items()}


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; ties share their mean rank."""
    ranks = [_ranks(values) for values in (first, second)]
    return statistics.correlation(*ranks) if len(set(ranks[0])) > 1 and len(set(ranks[1])) > 1 else 1.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def verdict(shape: Shape, dtype: str, found: dict, chosen: tuple[int, int], predicted: dict) -> dict:
    """The shape's points, their rank correlation, and how far the chosen tile is from the best."""
    best = min(found, key=found.__getitem__)
    return {
        "shape": str(shape), "dtype": dtype, "spearman": spearman(list(predicted.values()), list(found.values())),
        "chosen": chosen, "best": best, "loss": found[chosen] / found[best] - 1,
        "points": [{"tile": tile, "measured": found[tile], "predicted": predicted[tile]} for tile in found],
    }  # fmt: skip


def main() -> None:
    """Measures, compares, prints, writes."""
    parser = results.parser(__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=50, help="measuring time, all shapes together")
    parser.add_argument("--threads", type=int, default=1, help="threads of the kernel (default %(default)s)")
    parser.add_argument("--shapes", type=int, nargs="+", help="numbers of the shapes to measure (default all)")
    parser.add_argument("--fit", action="store_true", help="print constants that suit these points best")
    parser.add_argument("--output", type=Path, help="JSON file with the raw points")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = with_cores(Machine.detect(), arguments.threads)
    target = target_of(machine)
    print(f"{machine}; kernels for {target}; {arguments.threads} threads")
    shapes = [SHAPES[number] for number in arguments.shapes] if arguments.shapes else SHAPES
    rows, counted = [], []
    for dtype, shape in itertools.product(arguments.dtype, shapes):
        spec = specification(shape, dtype)
        tilings = tilings_for(spec, target)
        share = arguments.seconds / len(shapes) / len(arguments.dtype)
        multiples = target.register_tile(tilings[0].planes)
        planner = CpuPlanner(spec, machine, register_tile=multiples)
        tile = Kernel(spec, tilings, target, planner).choice(shape.sizes(spec)).tile
        chosen = tile.rows, tile.keys
        found = measure(shape, dtype, tilings[0], target, chosen, share)
        predicted = planner.tile_times(shape.sizes(spec), list(found))
        rows.append(verdict(shape, dtype, found, chosen, {tile: predicted[tile] for tile in found}))
        print(*line(rows[-1]), sep=", ", flush=True)
        problem, clock = problem_of(spec, shape.sizes(spec)), machine.clock or 2.5e9
        for tile, seconds in found.items():
            counts = cpu_counts(machine, problem, tile, multiples, skip=problem.masked)
            counted.append((tilings[0].planes, counts, (seconds - machine.launch) * clock))
    if arguments.fit:
        for planes in sorted({planes for planes, *_ in counted}):
            print(planes, fit([(counts, cycles) for own, counts, cycles in counted if own == planes]))
    text = "\n".join([*(f"- {each}" for each in summary(rows)), "", results.table(HEAD, [*map(line, rows)])])
    title, output = "The tile that the cost model chooses", arguments.output
    results.publish(title, text, output and output.with_suffix(".md"))
    if output:
        found = {"environment": results.environment(), "machine": str(machine), "target": str(target), "rows": rows}
        output.write_text(json.dumps(found))


def fit(points: list[tuple[dict[str, float], float]]) -> Costs:
    """The costs of least squared relative error, none of them negative: one at a time until nothing changes.

    points: (counts, measured cycles). What costs one operation of a score program is not among what is measured here.
    """
    names = [field.name for field in fields(Costs) if field.name != "operation"]
    shares = torch.tensor([[counts[name] / cycles for name in names] for counts, cycles in points], dtype=torch.float64)
    scale = shares.mean(0).clamp_min(1e-30)
    shares = shares / scale
    gram, wanted = shares.T @ shares, shares.sum(0)
    costs = torch.zeros(len(names), dtype=torch.float64)
    for _ in range(20_000):
        for k in range(len(names)):
            if gram[k, k] > 0:
                costs[k] = (costs[k] + (wanted[k] - gram[k] @ costs) / gram[k, k]).clamp_min(0)
    return Costs(operation=1.0, **{name: float(f"{cost:.3g}") for name, cost in zip(names, costs / scale, strict=True)})


def summary(rows: list[dict]) -> list[str]:
    """The verdict over all shapes, per dtype."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        points = [point for row in own for point in row["points"]]
        pooled = spearman([point["predicted"] for point in points], [point["measured"] for point in points])
        within = statistics.fmean(row["spearman"] for row in own)
        near = sum(row["loss"] <= 0.05 for row in own)
        lines.append(
            f"{dtype}: {len(points)} points, Spearman {pooled:.3f} over all, {within:.2f} on average within a shape; "
            f"chosen tile within 5 % of the best measured for {near} of {len(own)} shapes"
        )
    return lines


HEAD = ["shape", "dtype", "chosen tile", "best measured", "chosen over best", "predicted ms", "measured ms", "Spearman"]


def line(row: dict) -> list[str]:
    """A row of the table."""
    chosen = next(point for point in row["points"] if point["tile"] == row["chosen"])
    tiles_ = [f"{rows} x {keys}" for rows, keys in (row["chosen"], row["best"])]
    times = [f"{chosen[name] * 1e3:.3f}" for name in ("predicted", "measured")]
    return [row["shape"], row["dtype"], *tiles_, f"{row['loss']:+.1%}", *times, f"{row['spearman']:.2f}"]


if __name__ == "__main__":
    main()
