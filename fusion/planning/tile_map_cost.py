"""Whether a map of a mask's live tiles pays.

What the data holds is known at run time only, so the map is made where looking for it costs next to nothing: at most a
twentieth of the predicted time of the attentions that share it. On a CPU only a few rows of cells of a large mask
tensor are looked at first, and the rest is read only where they show tiles to skip: that counts as gain, not as cost.
A GPU reads all of it, at the bandwidth of its memory, and lists the live tiles for every attention by a small kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.ir import AttentionSpec
from fusion.ir.expr import coordinates, loads, walk
from fusion.ir.sizes import size_value
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS, MapSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.from_spec import problem_of

SAMPLES = 4
"""Rows of cells of a large mask tensor that are looked at first."""
WORTH_SAMPLING = 1 << 20
"""Elements from which a mask tensor counts as large."""
SHARE = 0.05
CALL = 4e-6
"""Seconds that one small torch operation takes."""
CALLS_PER_NODE = 5
READING = 1e10
"""Bytes per second at which a CPU finds least and greatest values of cells: two streams from memory, by torch."""

LIST = 3e-6
"""Seconds in which a GPU lists the live tiles for one attention; its launch overlaps with the kernels before it."""
REACHED = 0.5
"""Share of a GPU's peak that attention kernels reach at least."""


def map_pays(
    spec: MapSpec,
    sizes: Sequence[int],
    users: Sequence[tuple[AttentionSpec, Sequence[int]]],
    machine: Machine | str | None = None,
) -> bool:
    """Whether to make a map that these attentions (with values of their sizes) share. machine: by default this one."""
    machine = find_machine(machine)
    lists = LIST * len(users) if machine.kind == "gpu" else 0.0
    cost = map_time(spec, sizes, machine) + lists
    return cost <= SHARE * sum(_attention_time(*user, machine) for user in users)


def map_time(spec: MapSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds that the pass takes where it finds nothing."""
    gpu = machine.kind == "gpu"
    known = dict(zip(spec.sizes, sizes, strict=True))
    n_q, n_k = size_value(spec.n_q, known), size_value(spec.n_k, known)
    nodes = list(walk(spec.live, spec.full))
    cells = (n_q / CELL_ROWS if spec.rows else 1) * n_k / CELL_KEYS
    cells *= math.prod(size_value(extent, known) for extent in spec.batch)
    read = 0.0
    for part in loads(spec.live, spec.full):
        names = coordinates(part)
        elements = (n_q if "i" in names else 1) * (n_k if "j" in names else 1)
        for name in names:
            elements *= size_value(spec.batch[int(name[1:])], known) if name.startswith("b") else 1
        if elements >= WORTH_SAMPLING and not gpu:
            elements = min(elements, elements * SAMPLES * CELL_ROWS / n_q)  # in one pass
        read += elements * (4 if part.kind.value == "float" else 1)
    call, cell, reading = CALL, 1e-9, READING
    if gpu:
        call, reading = max(CALL, machine.launch), machine.main.bandwidth / 2
        cell = 32 / reading  # a few reads and writes of numbers of 8 bytes
    return call * CALLS_PER_NODE * len(nodes) + cell * cells * len(nodes) + read / reading


def _attention_time(spec: AttentionSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds of the two products at the machine's rate, over the keys that closed-form ranges leave."""
    problem = problem_of(spec, sizes)
    pairs = problem.batch * problem.heads * problem.n_q * problem.n_k * problem.live_share(1)
    rate = machine.flops(problem.dtype) * (REACHED if machine.kind == "gpu" else 1.0)
    return 2 * pairs * (problem.d + problem.d_v) / rate
