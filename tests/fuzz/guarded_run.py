"""Runs specs on CPU kernels of all instruction sets in guarded memory (`guarded`): forward and backward, on one thread
and several, within a team of the caller's, and in a forked process. What touches a byte beyond its own ends the worker.

The specs: random ones, and the programs of the kernels' own tests, among which are tables by distance.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusion.ir import Normalizer
from tests.codegen.cpu.test_teams import in_team
from tests.codegen.mlir.cases import PROGRAMS, case
from tests.fuzz import quick, specs, specs_run
from tests.fuzz.campaign import BAD, NOTED, Record
from tests.fuzz.check import Verdict
from tests.fuzz.guarded import Guarded, measured
from tests.fuzz.specs import Drawn

PROGRAM, TRAINED, BY_ROWS, AS_FOR_USERS = 0.5, 0.4, 0.2, 0.05
"""Shares of the specs: of a program of the tests; with gradients; by the kernel for few queries; with the kernels that
users get."""
TARGETS = dict(zip(quick.TARGETS, (20, 15, 15, 20, 20, 10), strict=True))
"""Of a hundred specs, how many are run by each."""
SURROUNDINGS = {"alone": 4, "threads": 4, "team": 2, "forked": 1}
"""Of a hundred calls, in proportion: on one thread, on some, on one thread of a team, in a forked process."""


def drawn(seed: int) -> Drawn:
    """The spec of a seed."""
    rng = random.Random(f"guarded {seed}")
    if rng.random() >= PROGRAM:
        return specs.drawn(seed)
    name, dtype = rng.choice([*PROGRAMS]), rng.choice(["float32", "float32", "bfloat16", "float16"])
    group = rng.choice([1, 1, 2, 3])
    made = case(
        name, dtype, rng.choice([5, 8, 16, 24, 32, 40]), rng.choice([4, 16, 19, 32]), group=group,
        normalizer=rng.choice([Normalizer.SOFTMAX] * 3 + [Normalizer.SAFE_SOFTMAX]), weight=rng.random() < 0.1,
        sinks=rng.random() < 0.1, off_by_one=rng.random() < 0.05,
    )  # fmt: skip
    tensors: list[Callable[[specs.Shape], torch.Tensor]] = [
        lambda n, k=k: made.program.tensors(n)[k] for k in range(len(made.program.operands))
    ]
    return Drawn(spec=made.spec, group=group, extras=(*tensors, *made.extras))


def way(found: Drawn, rng: random.Random) -> specs_run.Way:
    """How it is run: on kernels for CPUs."""
    trained = rng.random() < (TRAINED if not found.spec.aux_outputs else specs_run.TRAINED_AUX)
    rows = rng.random() < BY_ROWS and not trained and not found.spec.aux_outputs
    plan = None if rng.random() < AS_FOR_USERS else quick.plan(found.spec, rng, by_rows=rows, targets=TARGETS)
    return specs_run.Way(emitter="mlir", trained=trained, plan=plan)


class Surrounded(Guarded):
    """Calls run in surroundings at random."""

    def __init__(self, kernel: Any, rng: random.Random, record: Record):
        super().__init__(kernel, rng)
        self.record = record

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        return self._surrounded(lambda: super(Surrounded, self).__call__(operands, sizes))

    def outputs(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        return self._surrounded(lambda: super(Surrounded, self).outputs(operands, sizes))

    def backward(self, *given: Any) -> list[torch.Tensor]:
        return self._surrounded(lambda: super(Surrounded, self).backward(*given))

    def _surrounded(self, call: Callable[[], Any]) -> Any:
        kind = self.rng.choices([*SURROUNDINGS], [*SURROUNDINGS.values()])[0]
        self.record.counts[f"calls: {kind}"] += 1
        if kind == "forked":
            child = os.fork()
            if child == 0:
                call()
                os._exit(0)
            if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                os._exit(-status if status < 0 else status)  # as the child ended
        if kind == "team":
            results: list[Any] = []
            in_team(2, lambda number: results.append(call()) if number else None)
            return results[0]
        torch.set_num_threads(self.rng.choice([2, 3, 5]) if kind == "threads" else 1)
        try:
            return call()
        finally:
            torch.set_num_threads(1)


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    """Check the spec of each seed."""
    for seed in seeds:
        found, rng = drawn(seed), random.Random(f"guarded calls {seed}")
        how = way(found, rng)
        with measured():
            results = specs_run.check(found, how, rng, seed, functools.partial(Surrounded, rng=rng, record=record))
        worst = max(results, key=lambda result: specs_run.SEVERITY.index(result.verdict))
        record.count(seed, worst.verdict, calls=sum(result.verdict is not Verdict.INVALID for result in results))
        target = "as for users" if how.plan is None else str(how.plan.target)
        record.counts.update({f"target {target}": 1, "trained": int(how.trained)})
        if worst.verdict in NOTED:
            record.write({"seed": seed, "verdict": worst.verdict.value, "message": worst.message, "way": str(how)})
        if worst.verdict in BAD:
            print(f"\nspec {seed} ({how}): {worst.message}\n{found.spec}", flush=True)
