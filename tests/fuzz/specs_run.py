"""Runs random specs on an emitter against the reference interpreter, forward and backward."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion.codegen import cpu, reference, triton
from fusion.ir.expr import Kind, loads, walk
from fusion.lowering.aux_gradients import unsupported
from fusion.planning.choice import Tile
from tests.fuzz import quick
from tests.fuzz.campaign import BAD, NOTED, Record
from tests.fuzz.check import DRAWS, Result, Tensors, Verdict, allowing_overflow, magnitude
from tests.fuzz.specs import Drawn, drawn, tensors

SHARES = {"triton": 0.01, "as for users": 0.01, "trained": 0.08, "by rows": 0.25}
"""Shares of the specs: in Triton's interpreter; with the kernels that users get, where others have random targets and
tiles (`quick`); with gradients; with the kernel that goes row by row."""
TRAINED_AUX = 0.5
"""Share, of the specs with auxiliary outputs, of those that are run with gradients."""
CALLS = {"quick": 5, "as for users": 24, "triton": 2, "ptx": 1}
"""Calls of a compiled kernel, each of other lengths, layouts and values. Those in Triton's interpreter and as PTX take
a thousand times as long; as PTX Triton compiles anew for most of them."""
TARGETS = ("sm_80", "sm_89", "sm_90")
OVERFLOWING = 1e37
"""Of fills: sums of some terms of this size are beyond float32."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a spec is run: on a kernel that is made quickly, or (no plan) as for users, or by Triton's interpreter, or as
    PTX of a target, in a tile in place of the planned one."""

    emitter: str
    trained: bool
    plan: quick.Plan | None
    target: str | None = None
    tile: Tile | None = None

    @property
    def kind(self) -> str:
        if self.target is not None:
            return "ptx"
        return "triton" if self.emitter == "triton" else "quick" if self.plan else "as for users"


def way(found: Drawn, rng: random.Random) -> Way:
    """One at random."""
    drawn = {name: rng.random() < share for name, share in SHARES.items()}
    if found.spec.aux_outputs:  # written by kernels that keep statistics
        drawn["by rows"] = False
        drawn["trained"] = rng.random() < TRAINED_AUX
    fast = not drawn["triton"] and not drawn["as for users"]
    plan = quick.plan(found.spec, rng, by_rows=drawn["by rows"] and not drawn["trained"]) if fast else None
    return Way(emitter="triton" if drawn["triton"] else "mlir", trained=drawn["trained"], plan=plan)


def as_ptx(found: Drawn, rng: random.Random) -> Way:
    """One of the targets, at random, half of the time with gradients, half of the time in a tile at random. Small ones
    are compiled in less time than the planned ones."""
    tile = Tile(rows=rng.choice((16, 32, 64)), keys=rng.choice((16, 32)), warps=4, stages=rng.choice((1, 2, 3)))
    trained, planned = rng.random() < 0.5, rng.random() < 0.5
    target = rng.choice(TARGETS)
    return Way(emitter="triton", trained=trained, plan=None, target=target, tile=None if planned else tile)


def run(record: Record, seeds: Iterable[int], seconds: float, way: Callable[[Drawn, random.Random], Way] = way) -> None:
    """Check the spec of each seed."""
    for seed in seeds:
        found, rng = drawn(seed), random.Random(f"calls {seed}")
        how = way(found, rng)
        results = check(found, how, rng, seed)
        worst = max(results, key=lambda result: SEVERITY.index(result.verdict))
        calls = sum(result.verdict is not Verdict.INVALID for result in results)
        record.count(seed, worst.verdict, calls=calls)
        record.counts.update({f"{how.kind} specs": 1, f"{how.kind} calls": calls, "calls trained": calls * how.trained})
        if worst.verdict in NOTED:
            about = {"way": str(how), "spec": str(found.spec)}
            told = {"verdict": worst.verdict.value, "share": min(worst.share, 1e300), "message": worst.message}
            record.write({"seed": seed, **told, **about})
        if worst.verdict in BAD:
            print(f"\nspec {seed} ({how}): {worst.message}\n{found.spec}", flush=True)


SEVERITY = [Verdict.INVALID, Verdict.RIGHT, Verdict.LUCK, Verdict.OVERFLOW, Verdict.UNSTABLE, Verdict.REFERENCE,
            Verdict.POISONED, Verdict.OVER, Verdict.WRONG, Verdict.FAILED]  # fmt: skip


def kernel(found: Drawn, how: Way) -> Any:
    """What runs the spec; None where the emitter has no kernel for it."""
    statistics = how.trained or bool(found.spec.aux_outputs)
    if how.plan is not None:
        return quick.kernel(found.spec, how.plan, statistics)
    if how.emitter == "triton":
        if triton.supports(found.spec) is not None:
            return None
        make = triton.Differentiable if statistics else triton.Kernel
        return make(found.spec, how.tile)
    try:
        return cpu.compile_training(found.spec) if statistics else cpu.compile(found.spec)
    except ValueError:
        return None


def check(
    found: Drawn, how: Way, rng: random.Random, seed: int, around: Callable[[Any], Any] = lambda kernel: kernel
) -> list[Result]:
    """The results of some calls; the first that is bad ends them. around: what stands for the kernel."""
    torch.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        if how.plan:
            stack.enter_context(quick.compiling_for(how.plan))
        if how.target is not None:
            from tests.ptx.emulated import emulated

            stack.enter_context(emulated(how.target))
        try:
            made = kernel(found, how)
        except Exception as problem:
            return [Result(Verdict.FAILED, f"{type(problem).__name__}: {problem}")]
        if made is None:
            return [Result(Verdict.INVALID, "no kernel")]
        results = []
        for _ in range(CALLS[how.kind]):
            results.append(_call(found, around(made), how.trained, rng))
            if results[-1].verdict in BAD:
                break
        return results


def _call(found: Drawn, kernel: Any, trained: bool, rng: random.Random) -> Result:
    state = rng.getstate()
    ways: list[list[Tensors]] = [[], [], []]
    dtype = getattr(torch, found.spec.dtype)
    result = Result(Verdict.RIGHT)
    for attempt in range(DRAWS):
        rng.setstate(state)
        operands, sizes = tensors(found, rng)
        try:
            for way, values in zip(ways, values_of(found, kernel, trained, operands, sizes), strict=True):
                way.append(values)
        except Exception as problem:
            return Result(Verdict.FAILED, f"{sizes}: {type(problem).__name__}: {problem}")
        if attempt == 0:
            result = allowing_overflow(*ways, dtype)
            result.message = f"{sizes}: {result.message}"
            if result.verdict not in (Verdict.OVER, Verdict.WRONG):
                return result
    together = allowing_overflow(*ways, dtype)
    if together.verdict is Verdict.WRONG:
        without = _without_factors_of_fills(found, operands, ways)
        if without is not None and allowing_overflow(*without, dtype).verdict is not Verdict.WRONG:
            return Result(Verdict.UNSTABLE, together.message, together.share)
    return Result(Verdict.LUCK, result.message, result.share) if together.verdict is Verdict.RIGHT else together


def _without_factors_of_fills(
    found: Drawn, operands: list[torch.Tensor], ways: list[list[Tensors]]
) -> list[list[Tensors]] | None:
    """The values without gradients of what fills are multiplied by: a fill times what is left, by rounding, of weights'
    changes that sum up to nothing. None where one is off by more than that; sums of the largest fills overflow, at
    eager's places or at others."""
    factors, fill = set[int](), 0.0
    for part in (part for part in walk(found.spec.score) if part.op == "fmul"):
        for arg, other in (part.args, part.args[::-1]):
            constants = (abs(c.value) for c in walk(arg) if c.is_const and c.kind is Kind.FLOAT)
            largest = max((size for size in constants if size < math.inf), default=0.0)
            if largest > 1e3:
                factors |= {read.operand for read in loads(other)}
                fill = max(fill, largest)
    trained = [n for n, operand in enumerate(operands) if operand.is_floating_point()]
    names = {f"gradient {place}" for place, n in enumerate(trained) if n in factors}
    for ours, eager, exact in zip(*ways, strict=True):
        for name in names & ours.keys():
            error, theirs = (magnitude(x[name].double() - exact[name]) for x in (ours, eager))
            if fill < OVERFLOWING and error > 1e-5 * fill + 2 * theirs:
                return None
    if not names:
        return None
    return [[{n: value for n, value in one.items() if n not in names} for one in way] for way in ways]


def values_of(
    drawn: Drawn, kernel: Any, trained: bool, operands: list[torch.Tensor], sizes: list[int]
) -> list[Tensors]:
    """Outputs, and gradients where it is trained: of the kernel, the reference in the spec's dtype, and in float64."""
    spec, dtype = drawn.spec, getattr(torch, drawn.spec.dtype)
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    eager, *more = reference.run_all(spec, operands, sizes, dtype)
    exact, *true = reference.run_all(spec, wide, sizes, torch.float64)
    if not (trained or spec.aux_outputs):
        return [{"out": kernel(operands, sizes)}, {"out": eager}, {"out": exact}]
    ours, statistics, *found = kernel.outputs(operands, sizes)
    results = [
        {f"out {n}": value for n, value in enumerate(values)}
        for values in ([ours, *found], [eager, *more], [exact, *true])
    ]
    if not trained:
        return results
    needs = tuple(o.is_floating_point() for o in operands)
    grad, *aux_outputs = (torch.randn(result.shape).to(result.dtype) for result in (ours, *found))
    of_kernels = (unsupported(replace(spec, aux_outputs=(f,))) is None for f in spec.aux_outputs)
    aux_outputs = [g if has_gradient else None for g, has_gradient in zip(aux_outputs, of_kernels, strict=True)]
    wider = [g if g is None else g.double() for g in aux_outputs]
    ways = (
        kernel.backward(grad, ours, statistics, operands, sizes, needs, aux_outputs),
        reference.backward(spec, grad, operands, sizes, needs, dtype, aux_outputs),
        reference.backward(spec, grad.double(), wide, sizes, needs, aux_outputs=wider),
    )
    values = [o for o in operands if o.is_floating_point()]
    for result, found, is_exact in zip(results, ways, (False, False, True), strict=True):
        cast = (g if is_exact else g.to(o.dtype) for g, o in zip(found, values, strict=True))
        result |= {f"gradient {n}": g for n, g in enumerate(cast)}
    return results
