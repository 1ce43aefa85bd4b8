"""Who makes the choices of a spec on a machine: the cost model on CPUs, a policy of tiles on GPUs."""

from __future__ import annotations

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.cpu_planner import CpuPlanner
from fusion.planning.gpu import GpuPlanner


def planner_for(spec: AttentionSpec, machine: Machine) -> CpuPlanner | GpuPlanner:
    """The planner of a spec on a machine."""
    return GpuPlanner(spec, machine) if machine.kind == "gpu" else CpuPlanner(spec, machine)
