"""Runs random specs on an emitter against the reference interpreter, forward and backward."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from fusion.codegen import mlir, reference, triton
from tests.fuzz.campaign import BAD, NOTED, Record
from tests.fuzz.check import DRAWS, Result, Tensors, Verdict, verdict
from tests.fuzz.specs import Drawn, drawn, tensors

CALLS = 24
"""Calls of a compiled kernel, each of other lengths, layouts and values."""
INTERPRETED = 2
"""Calls of a kernel in Triton's interpreter, which takes a thousand times as long."""


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    """Check the spec of each seed."""
    for seed in seeds:
        found, rng = drawn(seed), random.Random(f"calls {seed}")
        emitter = "triton" if rng.random() < 0.06 else "mlir"
        trained = rng.random() < 0.12
        results = check(found, emitter, trained, rng, seed)
        worst = max(results, key=lambda result: SEVERITY.index(result.verdict))
        calls = sum(result.verdict is not Verdict.INVALID for result in results)
        record.count(seed, worst.verdict, calls=calls)
        record.counts.update({f"calls of {emitter}": calls, "calls trained": calls * trained})
        if worst.verdict in NOTED:
            about = {"emitter": emitter, "trained": trained, "spec": str(found.spec)}
            told = {"verdict": worst.verdict.value, "share": min(worst.share, 1e300), "message": worst.message}
            record.write({"seed": seed, **told, **about})
        if worst.verdict in BAD:
            print(f"\nspec {seed} ({emitter}, trained: {trained}): {worst.message}\n{found.spec}", flush=True)


SEVERITY = [Verdict.INVALID, Verdict.RIGHT, Verdict.LUCK, Verdict.OVERFLOW, Verdict.UNSTABLE, Verdict.REFERENCE,
            Verdict.POISONED, Verdict.OVER, Verdict.WRONG, Verdict.FAILED]  # fmt: skip


def kernels(found: Drawn, emitter: str, trained: bool) -> Any:
    """What runs the spec; None where the emitter has no kernel for it."""
    if emitter == "triton":
        if triton.supports(found.spec) is not None:
            return None
        return triton.Differentiable(found.spec) if trained else triton.compile(found.spec)
    try:
        return mlir.compile_training(found.spec) if trained else mlir.compile(found.spec)
    except ValueError:
        return None


def check(found: Drawn, emitter: str, trained: bool, rng: random.Random, seed: int) -> list[Result]:
    """The results of some calls; the first that is bad ends them."""
    torch.manual_seed(seed)
    try:
        kernel = kernels(found, emitter, trained)
    except Exception as problem:
        return [Result(Verdict.FAILED, f"{type(problem).__name__}: {problem}")]
    if kernel is None:
        return [Result(Verdict.INVALID, "no kernel")]
    results = []
    for _ in range(INTERPRETED if emitter == "triton" else CALLS):
        results.append(_call(found, kernel, trained, rng))
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
            result = verdict(*ways, dtype)
            result.message = f"{sizes}: {result.message}"
            if result.verdict is not Verdict.OVER:
                return result
    together = verdict(*ways, dtype)
    return Result(Verdict.LUCK, result.message, result.share) if together.verdict is Verdict.RIGHT else together


def values_of(
    found: Drawn, kernel: Any, trained: bool, operands: list[torch.Tensor], sizes: list[int]
) -> list[Tensors]:
    """Outputs, and gradients where it is trained: of the kernel, the reference in the spec's dtype, and in float64."""
    spec, dtype = found.spec, getattr(torch, found.spec.dtype)
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    eager = reference.run(spec, operands, sizes, dtype)
    exact = reference.run(spec, wide, sizes, torch.float64)
    if not trained:
        return [{"out": kernel(operands, sizes)}, {"out": eager}, {"out": exact}]
    needs = tuple(o.is_floating_point() for o in operands)
    out, statistics = kernel.forward(operands, sizes)
    grad = torch.randn(out.shape).to(out.dtype)
    ours = kernel.backward(grad, out, statistics, operands, sizes, needs)
    theirs = reference.backward(spec, grad, operands, sizes, needs, dtype)
    true = reference.backward(spec, grad.double(), wide, sizes, needs)
    values = [o for o in operands if o.is_floating_point()]

    def named(out: torch.Tensor, found: list[torch.Tensor], wide: bool) -> Tensors:
        cast = (g if wide else g.to(o.dtype) for g, o in zip(found, values, strict=True))
        return {"out": out} | {f"gradient {n}": g for n, g in enumerate(cast)}

    return [named(out, ours, False), named(eager, theirs, False), named(exact, true, True)]
