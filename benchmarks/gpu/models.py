"""Unmodified models on a GPU. Inference: eager, Inductor and fusion, with the output's error against float64. Training:
whether losses follow eager's, and how peak memory grows with length.

Losses. All runs start from the same float32 weights, see the same batches, and compute under autocast. What rounding
alone may do to losses is measured with eager: two runs whose initial weights are rounded stochastically to the dtype of
autocast, with two seeds. Fusion agrees with eager if its losses, from the weights as they are, are nowhere farther from
eager's than those two runs are from each other where they differ most: max|fusion - eager| <= max|seed 1 - seed 2|.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.model_zoo import MODELS, TINY, TRAINED, text_tokens
from benchmarks.gpu.cells import brief
from benchmarks.gpu.device import MODEL_QUEUED, Device
from fusion.exactness import errors

CONTESTANTS = ("fusion", "eager", "inductor", "inductor, sdpa")
MEMORY_GROWTH = 1.15  # the largest exponent of N that counts as linear: weights' gradients and the allocator's rounding


@dataclass(slots=True, kw_only=True)
class WholeModel:
    """Median device seconds by contestant, and what is odd about one."""

    name: str
    title: str
    B: int
    N: int
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure_model(name: str, B: int, N: int, device: Device, dtype: torch.dtype, seconds: float = 2.0) -> WholeModel:
    """One model at one size; the inputs are B times the same."""
    torch._dynamo.reset()
    model = MODELS[name]
    cell = WholeModel(name=name, title=model.title, B=B, N=N)
    x = model.inputs(N).to(device.kind)
    x = x.repeat(B, *[1] * (x.dim() - 1))
    x = x.to(dtype) if x.is_floating_point() else x
    build = lambda attention: model.make(attention, **(TINY if device.rehearsal else {})).to(device.kind, dtype)
    plain = build("eager")
    eager = plain(x[:1])
    exact = copy.deepcopy(plain).double()(x[:1].double() if x.is_floating_point() else x[:1])
    del plain
    calls: dict[str, Callable[[], object]] = {}
    for who in CONTESTANTS:  # one after the other, so that two models are held at most
        backend, _, attention = who.partition(", ")
        try:
            call = build(attention or "eager")
            call = call if backend == "eager" else device.compiled(call, backend)
            comparison = errors(call(x)[:1], eager, exact)
            if comparison.share > 1 and who == "fusion":
                cell.notes[who] = f"wrong: {comparison}"
            calls[who] = functools.partial(call, x)
        except Exception as failure:
            cell.notes[who] = brief(failure)
            device.free()
    times: dict[str, list[float]] = {who: [] for who in calls}
    stop = time.monotonic() + seconds
    while calls and (len(times[next(iter(calls))]) < (2 if device.rehearsal else 4) or time.monotonic() < stop):
        for who, call in calls.items():
            times[who].append(device.seconds(call, MODEL_QUEUED)[0])
    cell.seconds = {who: statistics.median(each[1:]) for who, each in times.items()}
    return cell


@dataclass(slots=True, kw_only=True)
class Losses:
    """Losses of each run by name ("eager", "fusion", "seed 1", "seed 2"), and median device seconds of a step."""

    model: str
    steps: int
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def farthest(self, one: str, other: str) -> float:
        """The largest difference of two runs' losses at the same step; NaN if there is one."""
        return (torch.tensor(self.losses[one]) - torch.tensor(self.losses[other])).abs().max().item()

    @property
    def noise(self) -> float:
        return self.farthest("seed 1", "seed 2")

    @property
    def agree(self) -> bool:
        """Whether fusion is within the noise (see above); a loss that is no number never is."""
        return self.farthest("fusion", "eager") <= self.noise


@dataclass(slots=True, kw_only=True)
class Memory:
    """Bytes that one training step holds at most beyond weights and optimizer, by backend and N."""

    model: str
    bytes: dict[str, dict[int, int]] = field(default_factory=dict)

    def growth(self, backend: str) -> float | None:
        """The exponent of N between the two largest lengths: 1 is linear, 2 quadratic."""
        found = sorted(self.bytes.get(backend, {}).items())[-2:]
        if len(found) < 2 or min(size for _, size in found) <= 0:
            return None
        (short, less), (long, more) = found
        return math.log(more / less) / math.log(long / short)


def stochastically_rounded(weights: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """float32 weights rounded to a neighbour in bfloat16 or float16, away from zero with the probability that keeps the
    mean."""
    dropped = 23 - {torch.bfloat16: 7, torch.float16: 10}[dtype]  # bits of the fraction
    bits = weights.float().view(torch.int32)
    noise = torch.randint(0, 1 << dropped, bits.shape, generator=generator, dtype=torch.int32).to(bits.device)
    return ((bits + noise) & -(1 << dropped)).view(torch.float32)


class Run:
    """One training: a copy of the model, compiled or not, with an optimizer of its own."""

    def __init__(
        self, model: nn.Module, device: Device, dtype: torch.dtype, backend: str, seed: int = 0, **options: Any
    ):
        self.model, self.device, self.dtype = copy.deepcopy(model), device, dtype
        if seed:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weights in self.model.parameters():
                    weights.copy_(stochastically_rounded(weights, dtype, generator))
        self.call = self.model if backend == "eager" else device.compiled(self.model, backend, options=options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of the next tokens of a batch `[B, N + 1]`."""
        with torch.autocast(self.device.kind, dtype=self.dtype):
            scores = self.call(batch[:, :-1])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())

    def step(self, batch: Tensor) -> Tensor:
        """The loss before the step; not read, so that the host need not wait."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _model(name: str, device: Device) -> nn.Module:
    return TRAINED[name]("eager", **(TINY if device.rehearsal else {})).train().to(device.kind)


def follow(name: str, device: Device, dtype: torch.dtype, steps: int, size: tuple[int, int]) -> Losses:
    """The losses of all runs; size: batch and length."""
    torch._dynamo.reset()
    model = _model(name, device)
    runs = {
        "eager": Run(model, device, dtype, "eager"),
        "fusion": Run(model, device, dtype, "fusion"),
        "seed 1": Run(model, device, dtype, "eager", 1),
        "seed 2": Run(model, device, dtype, "eager", 2),
    }
    found, times = Losses(model=name, steps=steps), dict[str, list[float]]()
    batches = [text_tokens(step, *size).to(device.kind) for step in range(steps)]
    for who, run in runs.items():
        losses: list[Tensor] = []
        for batch in batches:
            step = lambda run=run, batch=batch, losses=losses: losses.append(run.step(batch))
            seconds, _ = device.seconds(step, MODEL_QUEUED)
            times.setdefault(who, []).append(seconds)
        found.losses[who] = [loss.item() for loss in losses]
    found.seconds = {who: statistics.median(times[who][-max(1, steps - 3) :]) for who in ("eager", "fusion")}
    return found


def grow(name: str, device: Device, dtype: torch.dtype, lengths: dict[str, list[int]]) -> Memory:
    """Peak memory of a step; lengths: by backend ("eager", "fusion"), since eager's scores fill a device early.

    What is not attention stays eager in both, so that attention makes the difference (and compiling takes seconds).
    """
    model = _model(name, device)
    found = Memory(model=name)
    for backend, wanted in lengths.items():
        for n in wanted:
            torch._dynamo.reset()
            run = Run(model, device, dtype, backend, inner="aot_eager")
            batch = text_tokens(0, 1, n).to(device.kind)
            run.step(batch)  # compiles, and makes the optimizer's state
            run.optimizer.zero_grad()
            found.bytes.setdefault(backend, {})[n] = device.peak_bytes(lambda run=run, batch=batch: run.step(batch))
            del run
            device.free()
    return found
