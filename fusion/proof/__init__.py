"""Proof of a kernel before its first use.

Validation (`fusion.validation`) compares an attention with its spec, and ends there. The proof runs every new kernel
text once, on small made-up operands beyond the edges of its blocks, beside the reference interpreter of its spec: each
result and each gradient has to follow the rule for numbers. The verdict is cached by the text in the process, and, if
positive, on disk. A kernel that fails is not used: its attention is left to the inner compiler, or, if the kernel was
built during a call, to the reference interpreter.

In the comparison, "eager" is the interpreter in the dtype of the kernel's products, the reference that in float64.
Elements count where the two are finite, or are the same infinity or NaN: eager may leave the range of its dtype where a
kernel does not. `fusion.codegen.reference.operands` has the sizes and the operands.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import caching, process
from fusion.caching import BoundedCache
from fusion.codegen.emitter import Edges
from fusion.codegen.reference import backward, run_all
from fusion.codegen.reference.operands import Operands, sizes_of_trials
from fusion.errors import KernelProofError, LargeTableError, UnsupportedSizeError
from fusion.exactness import errors, special, widened
from fusion.ir.spec import AttentionSpec
from fusion.machine import cpu
from fusion.torch_private.dynamo import counters
from fusion.torch_private.tracing import without_function_modes

__all__ = ["Proof"]

log = logging.getLogger(__name__)

FORMAT = 3
"""Version of verdicts on disk; to be raised when kernels are tried otherwise, or called in another way."""
DRAWS = 3
"""A kernel that is beyond the rule in one draw is tried again: how far a few elements are off is luck."""
_verdicts: BoundedCache = BoundedCache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Trials of the kernels of a spec on a type of device. Each of the methods raises KernelProofError.

    Their arguments: a kernel that runs calls of all sizes as the one to be proved does, the sizes of the call that it
    was built for, the edges of its blocks, and its text.
    """

    spec: AttentionSpec
    device: str = "cpu"

    def results(self, kernel: Any, sizes: Sequence[int], edges: Edges, text: str) -> None:
        """Prove the output and the auxiliary outputs. kernel: see `emitter.Kernel`, or `TrainingKernel`."""

        def ours(operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
            if not hasattr(kernel, "outputs"):
                return [kernel(operands, sizes)]
            out, _, *aux_outputs = kernel.outputs(operands, sizes)
            return [out, *aux_outputs]

        run = functools.partial(_results, self.spec, ours)
        self._judged(f"results\n{text}", functools.partial(self._problem, run, sizes, edges))

    def gradients(
        self, kernel: Any, sizes: Sequence[int], edges: Edges, text: str, needs: tuple[bool, ...], places: Sequence[int]
    ) -> None:
        """Prove the gradients of the operands that `needs` marks. kernel: an `emitter.TrainingKernel`. places: the
        auxiliary outputs at which gradients arrive."""
        run = functools.partial(_gradients, self.spec, kernel, needs, places)
        self._judged(f"gradients {needs} {places}\n{text}", functools.partial(self._problem, run, sizes, edges))

    def _judged(self, text: str, find: Callable[[], str | None]) -> None:
        of_process = FORMAT, _versions(), cpu.identity(), cpu.left_out(), caching.tag()
        key = json.dumps([*of_process, self.device, self.spec.to_json(), text])
        name = f"proof_{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        if (verdict := _verdicts.get(name)) is None and caching.stored(name) is not None:
            verdict = _verdicts.store(name, "")
        if verdict is None:
            started = time.perf_counter()
            verdict = _verdicts.store(name, find() or "")
            if not verdict:  # others are found anew, lest a mistake here outlives its mending
                caching.store(name, b"")
            counters["fusion"]["kernels_proved"] += 1
            log.debug("a kernel was proved in %.3f s", time.perf_counter() - started)
        if verdict:
            counters["fusion"]["invalid"] += 1
            log.error("a defect of fusion: a kernel of %s computes something else: %s", self.spec, verdict)
            raise KernelProofError(f"a kernel of {self.spec} computes something else than its spec: {verdict}")

    def _problem(self, run: Callable[..., Compared], sizes: Sequence[int], edges: Edges) -> str | None:
        """Text of the first fault; None where there is none."""
        with process.outside_compilation(), process.without_autograd_settings(), without_function_modes():
            for trial in sizes_of_trials(self.spec, sizes, edges):
                try:
                    result = self._of_trial(run, trial)
                except _Raised as problem:
                    result = f"it raises {type(problem.args[0]).__name__}: {problem.args[0]}"
                except Exception as problem:  # no fault of the kernel's
                    counters["fusion"]["kernels_not_proved"] += 1
                    log.info("a kernel of %s was not tried: %s: %s", self.spec, type(problem).__name__, problem)
                    continue
                if result is not None:
                    return f"{result}, with {', '.join(f'{name} = {size}' for name, size in trial.items())}"
        return None

    def _of_trial(self, run: Callable[..., Compared], trial: Mapping[str, int]) -> str | None:
        """Fault of one trial; None where one of some draws follows the rule."""
        result, dtype, positive = None, getattr(torch, self.spec.dtype), False
        for seed in range(DRAWS):
            compared = self._compared(run, trial, seed, positive)
            if compared.finite < 0.5 and not positive:
                positive = True
                compared = self._compared(run, trial, seed, positive)
            if (result := compared.problem(dtype)) is None:
                return None
        return result

    def _compared(self, run: Callable[..., Compared], trial: Mapping[str, int], seed: int, positive: bool) -> Compared:
        made = [tensor.to(self.device) for tensor in Operands(self.spec, trial, seed, positive).tensors()]
        return run(made, [trial[name] for name in self.spec.sizes], seed)


class _Raised(Exception):
    """A kernel raised an exception that it may not raise."""


@contextlib.contextmanager
def _by_kernel() -> Iterator[None]:
    try:
        yield
    except (LargeTableError, UnsupportedSizeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise _Raised(problem) from problem


def _results(spec: AttentionSpec, ours: Callable[..., list[Tensor]], operands: Any, sizes: Any, seed: int) -> Compared:
    with _by_kernel():
        result = ours(operands, sizes)
    return Compared(**_outputs(spec, result, operands, sizes))


def _outputs(
    spec: AttentionSpec, ours: Sequence[Tensor], operands: Sequence[Tensor], sizes: Sequence[int]
) -> dict[str, dict[str, Tensor]]:
    eager = run_all(spec, operands, sizes, getattr(torch, spec.dtype))
    wide = [replace(aux, dtype="float64") for aux in spec.aux_outputs]
    exactly = replace(spec, out_dtype="float64", aux_outputs=tuple(wide))
    exact = run_all(exactly, list(map(widened, operands)), sizes, torch.float64)
    names = ["the result", *(f"auxiliary output {n}" for n in range(len(spec.aux_outputs)))]
    return {
        way: dict(zip(names, result, strict=True))
        for way, result in zip(("ours", "eager", "exact"), (ours, eager, exact), strict=True)
    }


def _gradients(
    spec: AttentionSpec,
    kernel: Any,
    needs: tuple[bool, ...],
    places: Sequence[int],
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    seed: int,
) -> Compared:
    with _by_kernel():
        out, statistics, *outputs = kernel.outputs(operands, sizes)
    draw = torch.Generator().manual_seed(seed)
    arriving = [torch.randn(x.shape, generator=draw, dtype=torch.float32).to(x) for x in (out, *outputs)]
    grad, aux = arriving[0], [g if n in places else None for n, g in enumerate(arriving[1:])]
    with _by_kernel():
        gradients = kernel.backward(grad, out, statistics, operands, sizes, needs, aux if places else ())
    dtype = getattr(torch, spec.dtype)
    eager = backward(spec, grad, operands, sizes, needs, dtype, aux)
    wide = [g if g is None else g.double() for g in aux]
    exact = backward(spec, grad.double(), list(map(widened, operands)), sizes, needs, torch.float64, wide)
    wanted = [(o, x) for o, x, needed in zip(spec.operands, operands, needs, strict=True) if needed]
    names = [f"the gradient of {number} ({o.name})" for number, (o, _) in enumerate(wanted)]
    ways = ([g.to(x.dtype) for g, (_, x) in zip(way, wanted, strict=True)] for way in (gradients, eager))
    ours, theirs = (dict(zip(names, way, strict=True)) for way in ways)
    return Compared(ours=ours, eager=theirs, exact=dict(zip(names, exact, strict=True)))


@functools.cache
def _versions() -> list[str]:
    try:
        own = importlib.metadata.version("fusion-attention")
    except importlib.metadata.PackageNotFoundError:
        own = ""
    return [own, torch.__version__]


LIMIT = 4.0
"""By how much results may be beyond the rule. Few elements have errors by luck: of right kernels one trial in a hundred
is beyond it; a fault is so by orders of magnitude."""
VANISHING = 16
"""Roundings of the largest result below which a gradient is one that cancels to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Results by name, each computed in three ways."""

    ours: Mapping[str, Tensor]
    eager: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]

    def problem(self, dtype: torch.dtype) -> str | None:
        """Text of the kernel's fault; None where there is none. dtype: of the products."""
        largest = max((_size(x) for x in self.exact.values()), default=0.0)
        for name, ours in self.ours.items():
            if (result := _problem(name, ours, self.eager[name], self.exact[name], dtype, largest)) is not None:
                return result
        return None

    @property
    def finite(self) -> float:
        """Share of the elements that are finite."""
        counts = [(int(x.isfinite().sum()), x.numel()) for x in self.exact.values()]
        return sum(n for n, _ in counts) / max(1, sum(n for _, n in counts))


def _problem(name: str, ours: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype, largest: float) -> str | None:
    if ours.shape != eager.shape:
        return f"{name} has the shape {list(ours.shape)} where it should be {list(eager.shape)}"
    dtype = max(dtype, eager.dtype, key=lambda d: torch.finfo(d).eps)
    eps = torch.finfo(dtype).eps
    ours, eager, exact = (x.detach().double() for x in (ours, eager, exact))
    compared = special(eager) == special(exact)
    ours, eager, exact = (torch.where(compared, x, 0.0) for x in (ours, eager, exact))
    if name.startswith("the gradient") and _size(exact) <= VANISHING * eps * largest / 1e3:
        compared = ours.isfinite() & (ours.abs() <= VANISHING * eps * largest)
        ours = torch.where(compared, exact, ours)
    result = errors(ours, eager, exact, dtype)
    if result.share <= LIMIT:
        return None
    if result.misplaced:
        return (
            f"{name} has NaN or infinities at {result.misplaced} of {ours.numel()} elements where it should not, or not"
        )
    return f"{name} is off by {result.max_error:.2g} where {result.max_bound:.2g} is allowed"


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
