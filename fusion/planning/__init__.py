"""Every decision: whether fusing pays (`pays`), the choice of tiles (`planner_for`: `cpu_planner` or `gpu`; with
`options={"autotune": True}` the emitters measure its best), and what that is predicted to cost (`plan`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec
    from fusion.machine import Machine
    from fusion.planning.choice import Planner


def planner_for(spec: AttentionSpec, machine: Machine) -> Planner:
    """The planner of a spec on a machine: the cost model on CPUs, a policy of tiles on GPUs."""
    if machine.kind == "gpu":
        from fusion.planning.gpu import GpuPlanner  # with tables of tiles: not where there is no GPU

        return GpuPlanner(spec, machine)
    from fusion.planning.cpu_planner import CpuPlanner

    return CpuPlanner(spec, machine)
