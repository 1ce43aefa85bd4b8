"""Whole models on a GPU, inference: eager, Inductor and fusion, with the output's error against float64."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.common.model_zoo import MODELS, TINY
from benchmarks.gpu.cells import brief
from benchmarks.gpu.device import MODEL_QUEUED, Device
from fusion.exactness import errors

CONTESTANTS = ("fusion", "eager", "inductor", "inductor, sdpa")


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
