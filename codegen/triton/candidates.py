"""Other tiles than the table's for a kernel: neighbours worth measuring, and smaller ones where a tile does not fit the
device.

The resources of a tile are the planner's estimates (`fusion.planning.gpu_clocks`), without its margin: a measured tile
may be bolder than one that is chosen without measurement.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning import gpu_feasible
from fusion.planning.choice import Tile
from fusion.planning.gpu_clocks import ADDRESSES, BACKWARD, FORWARD, Work, registers, work_of
from fusion.planning.gpu_layout import power
from fusion.planning.gpu_model import PREPARE, may_rotate

from .descriptors import READ, boxes

LEAST, MOST = 16, 256  # rows and keys of a tile


def smaller(tile: Tile) -> Tile | None:
    """The next tile that needs less memory: fewer stages first, then fewer keys and rows, then fewer warps; None after
    the smallest."""
    if tile.stages > 1:
        return replace(tile, stages=tile.stages - 1)
    if tile.keys > LEAST and (tile.keys >= tile.rows or tile.rows <= LEAST):
        return replace(tile, keys=tile.keys // 2)
    if tile.rows > LEAST:
        return replace(tile, rows=tile.rows // 2, warps=tile.warps if tile.rows > 64 else min(4, tile.warps))
    return replace(tile, warps=tile.warps // 2) if tile.warps > 1 else None


def candidates(
    kernel: str, spec: AttentionSpec, extents: tuple[int, int, int, int], tile: Tile, machine: Machine
) -> list[Tile]:
    """The table's tile for a kernel, then those around it that are expected to fit, nearest first. extents: n_q, n_k,
    d, d_v."""
    n_q, n_k, d, d_v = extents
    most = {"rows": min(MOST, max(LEAST, power(n_q))), "keys": min(MOST, max(LEAST, power(n_k)))}
    sizes = [
        [size for size in (own, own // 2, own * 2) if size == own or LEAST <= size <= most[name]]
        for name, own in (("rows", tile.rows), ("keys", tile.keys))
    ]
    warps = dict.fromkeys([tile.warps, 4, 8])
    stages = [count for count in (tile.stages, tile.stages - 1, tile.stages + 1) if 1 <= count <= 4]
    if kernel == PREPARE:  # has no loop
        sizes[1], stages = [tile.keys], [tile.stages]
    depths = [(tile.warps, tile.stages)] if machine.interpreted else list(itertools.product(warps, stages))
    schedules = _schedules(kernel, spec, d, d_v, tile, machine)
    around = [
        replace(tile, rows=rows, keys=keys, **{"warps": warps, "stages": stages, **schedule})
        for rows, keys in itertools.product(*sizes)
        for warps, stages in depths
        for schedule in schedules
    ]
    around = sorted(dict.fromkeys(around), key=lambda other: _distance(tile, other))
    if kernel == PREPARE:
        return around
    work = work_of(spec, kernel if kernel in BACKWARD else FORWARD, d, d_v)
    return [other for other in around if other == tile or fits(work, other, machine)]


def _schedules(kernel: str, spec: AttentionSpec, d: int, d_v: int, tile: Tile, machine: Machine) -> list[dict]:
    """Orders in which a kernel may process its tiles."""
    found = boxes(spec, d, d_v).keys()
    reads: list[dict] = [{}]
    orders = [tile.rotated, not tile.rotated] if may_rotate(spec, kernel) else [tile.rotated]
    if found & ({"k", "v"} if kernel == FORWARD else READ.get(kernel, set())):
        reads += [{"described": True}]
    return [{"rotated": rotated, **read} for rotated, read in itertools.product(orders, reads)]


def _distance(tile: Tile, other: Tile) -> int:
    """Number of fields in which two tiles differ."""
    return sum(getattr(tile, name) != getattr(other, name) for name in Tile.__dataclass_fields__)


def fits(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether a kernel's tile is expected to fit on a device, without spilling registers."""
    needed = registers(work, tile, machine) + ADDRESSES
    return gpu_feasible.fits(work, tile, machine) and needed <= gpu_feasible.most_registers(tile, machine)
