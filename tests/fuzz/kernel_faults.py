"""Faults put into the CPU kernels on purpose, and how many random specs it takes until each is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from fusion.codegen import cpu
from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.dense import DenseLoad
from fusion.codegen.mlir.rows import RowReader
from fusion.codegen.mlir.skeleton import KernelFunction
from fusion.codegen.mlir.softmax import Exponent, GroupSoftmax
from fusion.codegen.mlir.tile import Tiles
from tests.fuzz.campaign import BAD
from tests.fuzz.check import Verdict
from tests.fuzz.specs import drawn
from tests.fuzz.specs_run import check, way

FAULTS: dict[str, Callable[[], Any]] = {}


def _in(name: str, owner: type, method: str, change: Callable[..., Any]) -> None:
    """A fault that is another body of a method. change: takes the method, and what it takes."""
    right = getattr(owner, method)
    FAULTS[name] = lambda: mock.patch.object(owner, method, lambda self, *given: change(right, self, *given))


def _one(right: Callable, self: Any, *given: Any) -> Value:
    return self.b.constant(1.0, self.vector)


def _ends_early(right: Callable, self: Any, *given: Any) -> Any:
    start, end = right(self, *given)
    return start, self.b.most(self.b.sub(end, 1), 0)


_in("sums before a new maximum are not rescaled", Exponent, "change", _one)
_in("keys beyond the last count", GroupSoftmax, "fill_beyond", lambda right, self, value: None)
_in("rows without a live key stay as they are", KernelFunction, "_alive",
    lambda right, self, m, fill: self.b.constant(-1, right(self, m, fill).type))  # fmt: skip
_in("ranges of keys end one early", KernelFunction, "key_range", _ends_early)
_in("sums of all spans of keys but the last are lost", Tiles, "all_sums", lambda right, self, g: None)
_in("weights after the softmax are the next key's", GroupSoftmax, "_times_factor",
    lambda right, self, key, p: right(self, self.b.add(key, 1), p))  # fmt: skip
_in("keys that are packed serve all heads", RowReader, "identity", lambda right, self: [0])
_in("a staged bias is the next key's", DenseLoad, "read",
    lambda right, self, target, key: right(self, target, self.b.add(key, 1)))  # fmt: skip
_in("parts of keys are added as they are", Exponent, "factor", _one)


def found_by(fault: Callable[[], Any], seeds: Iterable[int], kind: str = "quick") -> tuple[int | None, int]:
    """(the first seed whose spec comes out wrong with the fault and right without it, specs run). kind: of ways."""
    ran = 0
    for seed in seeds:
        if way(drawn(seed), random.Random(f"calls {seed}")).kind != kind:
            continue
        ran += 1
        with fault():
            bad = _verdicts(seed) & set(BAD)
        if bad and not _verdicts(seed) & set(BAD):
            return seed, ran
    return None, ran


def _verdicts(seed: int) -> set[Verdict]:
    cpu._kernels.clear()
    cpu._training.clear()
    found, rng = drawn(seed), random.Random(f"calls {seed}")
    return {result.verdict for result in check(found, way(found, rng), rng, seed)}
