"""Whether keys are read by the sets of their rows, or all of them under a mask.

A set costs what its keys cost, but they are read wherever they lie, for one query at a time: where a set holds most of
the keys, or heads do not share it, a mask of all keys may cost less. That has to be made, which no kernel's time
counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.ir import AttentionSpec
from fusion.machine import Machine, with_cores
from fusion.planning.plan import plan
from fusion.planning.planner import planner_for

MASKED = 2e-9
"""Seconds for an element of the mask on a CPU: ones, positions scattered into them, and what it is combined with.
Measured as 4e-9 to 9e-9 of processor time on two busy cores (Zen 3)."""
MASKED_BYTES = 4
"""Bytes of an element of the mask that a GPU moves for the same: a byte is written, read, combined and written."""


def sets_pay(
    sets: tuple[AttentionSpec, Sequence[int]],
    dense: tuple[AttentionSpec, Sequence[int]],
    elements: int,
    machine: Machine,
) -> str | None:
    """Why an attention is to see a mask of all keys, or None where reading sets is predicted to take less. sets, dense:
    the attention in either form, with the values of its sizes. elements: of the mask."""
    gathered, masked = (predicted_time(*form, machine) for form in (sets, dense))
    masked += elements * (MASKED_BYTES / machine.main.bandwidth if machine.kind == "gpu" else MASKED)
    if gathered <= masked:
        return None
    return f"{1e3 * masked:.3g} ms predicted, {1e3 * gathered:.3g} ms with sets of keys"


def predicted_time(spec: AttentionSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds of a call, with the choice that the planner makes for it."""
    choice = planner_for(spec, machine).choose(sizes)
    here = with_cores(machine, torch.get_num_threads()) if machine.kind == "cpu" else machine
    return plan(spec, here, sizes=dict(zip(spec.sizes, sizes, strict=True)), choice=choice).time
