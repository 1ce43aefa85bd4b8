"""Who makes the choices of a spec on a machine: the cost model on CPUs, a policy of tiles on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine

if TYPE_CHECKING:
    from fusion.planning.cpu_planner import CpuPlanner
    from fusion.planning.gpu import GpuPlanner


def planner_for(spec: AttentionSpec, machine: Machine) -> CpuPlanner | GpuPlanner:
    if machine.kind == "gpu":
        from fusion.planning.gpu import GpuPlanner  # with tables of tiles: not where there is no GPU

        return GpuPlanner(spec, machine)
    from fusion.planning.cpu_planner import CpuPlanner

    return CpuPlanner(spec, machine)
