"""Whether fusing pays: every decision of this kind, and the thresholds that they go by.

An attention that is not worth fusing stays in the graph, which the inner compiler compiles, and the report gives the
reason. Each threshold stands where kernels and the inner compiler's code were measured, or are predicted, to take the
same time; the benchmark that measured it is named beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fusion.ir import AttentionSpec
from fusion.ir.expr import coordinates, loads, walk
from fusion.ir.reads import is_shift_free
from fusion.ir.results import extents_function, size_value
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS, MapSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning import planner_for
from fusion.planning.plan import plan
from fusion.planning.problem import Problem, problem_of
from fusion.refusals import Reason, Refusal

# Training on CPUs, in float32. Kernels compute scores again in the backward, and where a bias is trained write as many
# gradients as the inner compiler's code does, which stores the scores: for little, where they are few. Measured:
# `benchmarks.cpu.training steps --lengths 16 32 64 128 256`, and by hand d = 32 and 128, up to 192 heads, and without
# AMX. In half precision kernels are as fast or faster, but for a trained bias with many heads: a step takes 1.3 times
# as long in bfloat16 at N = 16, and 1.6 times in float16 (1.2 at 64).
TRAINING = {True: (136, 320), False: (144, 448)}
"""Rows and keys (the root of their product) from which on kernels train as fast, with AMX and without; the second where
a bias for each row and key is trained."""
TRAINING_BY_DISTANCE = 48
"""Rows and keys from which on kernels train as fast where a bias for each distance is trained, whose gradients the
inner compiler's code adds up element by element: measured without AMX, 4 to 64 heads of 32 and 64 columns."""

# One query over few keys in inference on CPUs, in float32. The inner compiler writes products of a single row as sums,
# in one loop with the softmax and what stands around them; the call of a kernel takes 2.5 to 4 us more than that in a
# recurrent decoder (`benchmarks.cpu.features recurrent`; processor time of one thread, Zen 5): 1.2 to 1.6 times a
# token's time at 1 x 24 x 64 to 8 x 24 x 64, and 1.26 times that of a masked attention of 8 x 24 x 64. At 8 x 100 x 64
# the masked one is faster as a kernel (0.85). From two queries on the inner compiler calls a library for each product,
# and kernels are faster (0.81 to 0.88 of the time with 2 to 8 queries), as they are than a call of
# scaled_dot_product_attention (0.6).
ONE_QUERY = 1 << 15
"""Elements of K and V, of all heads, below which one query is left to the inner compiler."""

# Mixed heads, on CPUs.
ROWS_OF_MIXED_HEADS = 12
"""Rows from which on a kernel that mixes heads, which packs K and V of all of them for a block of 48 rows, is as fast
as the inner compiler's code: with 8 it takes 0.7 to 1.4 times as long, with 1 2 to 5 times (8 heads, 1024 keys)."""

# Tangents and second derivatives (`benchmarks.cpu.training derivatives`), in bytes of the largest table of scores, as
# float32.
# The reference interpreter computes what kernels do not, a block of rows at a time, which takes two to three times as
# long as the inner compiler's code: it is used for memory, as eager mode keeps several such tables.
TANGENTS, TANGENTS_OF_BFLOAT16, DERIVATIVES = 2**24, 2**26, 2**30
"""From which on kernels of tangents are faster; the same in bfloat16; from which on the interpreter saves memory."""

# Sets of keys, against a mask of all keys.
MASKED = 2e-9
"""Seconds for an element of the mask on a CPU: ones, positions scattered into them, and what it is combined with.
Measured as 4e-9 to 9e-9 of processor time on two busy cores (Zen 3)."""
MASKED_BYTES = 4
"""Bytes of an element of the mask that a GPU moves for the same: a byte is written, read, combined and written."""

# Maps of a mask's live tiles. The data is known at run time only, so a map is made where looking for live tiles costs
# next to nothing. On a CPU a few rows of cells of a large mask are looked at first, and the rest is read only where
# these show tiles to skip: that counts as gain, not as cost. A GPU reads all of it.
MAP_SHARE = 0.05
"""Share of the predicted time of the attentions that share a map, which making it may take."""
SAMPLES = 4
"""Rows of cells of a large mask tensor that are looked at first."""
WORTH_SAMPLING = 1 << 20
"""Elements from which a mask tensor counts as large."""
CALL, CALLS_PER_NODE = 4e-6, 5
"""Seconds of a small torch operation, and how many of them an operation of the map's program takes."""
READING = 1e10
"""Bytes per second at which a CPU finds least and greatest values of cells: two streams from memory, by torch."""
LIST = 3e-6
"""Seconds in which a GPU lists the live tiles for one attention; its launch overlaps with the kernels before it."""
REACHED = 0.5
"""Share of a GPU's peak that attention kernels reach at least."""


def refusal_on_cpu(
    spec: AttentionSpec, sizes: Sequence[int], machine: Machine, *, trained: bool, fixed: bool, written_out: bool
) -> Refusal | None:
    """Why a call with these values of `spec.sizes` is left to the inner compiler on a CPU, although there is a kernel;
    None where it is fused. trained: gradients are asked for. fixed: every call has as many queries and keys.
    written_out: its products are, in place of a call of scaled_dot_product_attention."""
    *batch, n_q, n_k, d, d_v = extents_function(spec)(sizes)
    if spec.mixing is not None and n_q < ROWS_OF_MIXED_HEADS:
        message = (
            f"heads are mixed, for which kernels are predicted to pay from {ROWS_OF_MIXED_HEADS} rows on, and there "
            f"are {n_q}"
        )
        return Refusal(Reason.HEADS_MIXED, message)
    if not fixed:
        return None
    if trained:
        return _refusal_of_training(spec, n_q, n_k, machine)
    elements = math.prod(batch) // spec.heads_per_key(batch[-1]) * n_k * (d + d_v) if batch else n_k * (d + d_v)
    if not (written_out and n_q == 1 and 0 < elements < ONE_QUERY and _is_float32(spec)):
        return None
    message = (
        f"for one query over {n_k} keys, {elements} elements of K and V are predicted to be read faster by code "
        f"that is compiled together with what stands around it; a kernel of its own pays from about {ONE_QUERY} on"
    )
    return Refusal(Reason.ONE_QUERY, message)


def _is_float32(spec: AttentionSpec) -> bool:
    return all(operand.dtype in ("float32", "bool", "int32", "int64") for operand in spec.operands)


def _refusal_of_training(spec: AttentionSpec, n_q: int, n_k: int, machine: Machine) -> Refusal | None:
    if not _is_float32(spec):
        # Measured: 0.5 to 0.95 of the inner compiler's speed in bfloat16, in float32 1.05 to 1.6 times (4 to 16 heads,
        # 64 to 1024 keys).
        message = (
            "gradients of heads that are mixed come from the reference interpreter, in float32, which is predicted to "
            "take longer than storing scores in half precision"
        )
        return None if spec.mixing is None else Refusal(Reason.SHORT_TRAINING, message)
    pairs = (load for load in loads(spec.score) if {"i", "j"} <= coordinates(load))
    biases = [load for load in pairs if spec.operands[load.operand].order]  # what has a gradient states its order
    by_distance = biases and all(map(is_shift_free, biases))
    least = TRAINING_BY_DISTANCE if by_distance else TRAINING["amx_bf16" in machine.isa][bool(biases)]
    if not 0 < n_q * n_k < least**2:
        return None
    message = (
        f"in training, storing {n_q} x {n_k} scores is predicted to take less than computing them again, which pays "
        f"from about {least} x {least} on"
    )
    return Refusal(Reason.SHORT_TRAINING, message)


def refusal_of_derivatives(problems: Iterable[Problem], by_kernels: bool) -> Refusal | None:
    """Why attentions of a function whose tangents or second derivatives are asked for are left to the inner compiler;
    None where they are fused. by_kernels: kernels compute all derivatives that are asked for."""
    each = list(problems)
    scores = max((4 * p.batch * p.heads * p.n_q * p.n_k for p in each), default=0)
    tangents = TANGENTS_OF_BFLOAT16 if any(p.dtype == "bfloat16" for p in each) else TANGENTS
    if scores >= (tangents if by_kernels else DERIVATIVES):
        return None
    message = (
        f"tangents or second derivatives are asked for, and {scores} bytes of scores are too few for their "
        "computation to pay"
    )
    return Refusal(Reason.DERIVATIVES, message)


def sets_pay(
    sets: tuple[AttentionSpec, Sequence[int]],
    dense: tuple[AttentionSpec, Sequence[int]],
    elements: int,
    machine: Machine,
) -> str | None:
    """Why an attention is to see a mask of all keys, or None where reading the keys of each row's set is predicted to
    take less. A set costs what its keys cost, but they are read wherever they lie, for one query at a time: where a set
    holds most of the keys, or heads do not share it, a mask may cost less. That has to be made, which no kernel's time
    counts.

    sets, dense: the attention in either form, with the values of its sizes. elements: of the mask.
    """
    gathered, masked = (predicted_time(*form, machine) for form in (sets, dense))
    masked += elements * (MASKED_BYTES / machine.main.bandwidth if machine.kind == "gpu" else MASKED)
    if gathered <= masked:
        return None
    return f"{1e3 * masked:.3g} ms predicted, {1e3 * gathered:.3g} ms with sets of keys"


def predicted_time(spec: AttentionSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds of a call, with the choice that the planner makes for it."""
    choice = planner_for(spec, machine).choose(sizes)
    return plan(spec, machine, sizes=dict(zip(spec.sizes, sizes, strict=True)), choice=choice).time


def map_pays(
    spec: MapSpec,
    sizes: Sequence[int],
    users: Sequence[tuple[AttentionSpec, Sequence[int]]],
    machine: Machine | str | None = None,
) -> bool:
    """Whether to make a map that these attentions (with values of their sizes) share. machine: by default this one."""
    machine = find_machine(machine)
    lists = LIST * len(users) if machine.kind == "gpu" else 0.0
    cost = _map_time(spec, sizes, machine) + lists
    return cost <= MAP_SHARE * sum(_time_at_peak(*user, machine) for user in users)


def _map_time(spec: MapSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds of making a map that has no dead tiles."""
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


def _time_at_peak(spec: AttentionSpec, sizes: Sequence[int], machine: Machine) -> float:
    """Seconds of the two products at the machine's rate, over the keys that closed-form ranges leave."""
    problem = problem_of(spec, sizes)
    pairs = problem.batch * problem.heads * problem.n_q * problem.n_k * problem.live_share(1)
    rate = machine.flops(problem.dtype) * (REACHED if machine.kind == "gpu" else 1.0)
    return 2 * pairs * (problem.d + problem.d_v) / rate
