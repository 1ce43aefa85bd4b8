"""The steps of benchmarks/gpu in order, the most telling first, and the process that takes them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common.rows import GPU_ROWS
from benchmarks.gpu.cells import COMPILED, Place, brief, log, measure, operands_of, prepare
from benchmarks.gpu.cells import Cell as Measured
from benchmarks.gpu.check import checks
from benchmarks.gpu.device import Device, running
from benchmarks.gpu.findings import STARTING, Findings
from benchmarks.gpu.models import follow, grow, measure_model
from benchmarks.gpu.tuning import compile_trial, take, trials

HEADS = {64: 32, 128: 16, 256: 8, 512: 4}
TOKENS = 16384  # N times the batch
TELLING = ("full", "causal", "alibi", "softcap", "packed", "window")
WIDE = ("full", "causal")
WAYS = ("forward", "backward")
DECODE = ((8, 16384), (64, 8192), (1, 131072), (32, 2048))  # batch and keys; 32 query heads share 8 key heads
SPECIAL = (
    ("decode", DECODE, 32, 128, WAYS[:1]),
    ("latent decode", ((32, 8192), (128, 4096)), 128, 576, WAYS[:1]),
    ("latent", ((2, 8192), (2, 4096)), 16, 576, WAYS),
    ("float8 decode", DECODE, 32, 128, WAYS[:1]),
)
"""Row, batches and lengths, query heads, d, and directions."""
MODELS = (("gemma2", 4, 2048), ("llama", 4, 2048), ("bert", 32, 512), ("t5", 8, 2048))
LOSSES = ("llama", "gemma2")
TUNED = (
    ("causal", "forward", 0),
    ("full", "forward", 0),
    ("causal", "backward", 0),
    ("causal", "forward", 1),
    ("latent", "forward", 0),
    ("causal", "backward", 1),
    ("full", "backward", 0),
)  # and which of the widths; fmt: skip
MEASURING, AHEAD = 0.6, 0.3  # shares of the device's memory: of who takes steps, of all who compile ahead
PHASES = ("check", "tiles", "time")
PROFILED = (("causal", "forward"), ("causal", "backward"), ("full", "forward"))


Options = argparse.Namespace
"""Options of the command line: rows, N, d, dtype, no_models, no_training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something to do: its title is unique. limit: s after which it counts as hung. ahead: what it needs compiled, for
    the caches on disk; it may take little of the device's memory."""

    title: str
    run: Callable[[Findings], None]
    limit: float
    ahead: Callable[[], object] | None = None


def places(options: Options, device: Device) -> list[Place]:
    """All cells, the most telling first: the first length and width, decoding and latent attention, then the rest."""
    if device.rehearsal:
        return [
            Place(row=name, direction=way, B=1, H=2, N=20, d=80 if GPU_ROWS[name].latent else 16, dtype=options.dtype)
            for name in options.rows for way in WAYS if GPU_ROWS[name].queries is None or way == "forward"
        ]  # fmt: skip
    rows = [name for name in (*TELLING, *GPU_ROWS) if name in options.rows]
    rows = [name for name in dict.fromkeys(rows) if GPU_ROWS[name].queries is None and not GPU_ROWS[name].latent]
    attention = [
        Place(row=name, direction=way, B=max(1, TOKENS // n), H=HEADS[d], N=n, d=d, dtype=options.dtype)
        for n in options.N for d in options.d for way in WAYS for name in rows
        if (d == options.d[0] or name in WIDE) and (name != "bias" or n <= 8192)
    ]  # fmt: skip
    special = [
        Place(row=name, direction=way, B=b, H=heads, N=n, d=d, dtype=options.dtype)
        for name, shapes, heads, d, ways in SPECIAL if name in options.rows for b, n in shapes for way in ways
    ]  # fmt: skip
    telling = 2 * len(rows)
    return [*attention[:telling], *special, *attention[telling:]]


def steps(phase: str, options: Options, device: Device) -> list[Step]:
    """Everything of a phase, the most telling first."""
    return {"check": _checks, "tiles": _tiles, "time": _times}[phase](options, device)


def _checks(options: Options, device: Device) -> list[Step]:
    return [
        Step(title=f"check {name}", limit=120, ahead=run, run=lambda found, name=name, run=run: _look(found, name, run))
        for name, run in checks(options.rows, options.dtype, device)
    ]  # fmt: skip


def _tiles(options: Options, device: Device) -> list[Step]:
    return [
        Step(title=str(trial), run=lambda found, trial=trial: take(trial, found.tuned, device), limit=40,
             ahead=lambda trial=trial: compile_trial(trial, device.machine or device.planned_for))
        for place in _tuned(options, device) for trial in trials(place, device)
    ]  # fmt: skip


def _times(options: Options, device: Device) -> list[Step]:
    """The telling cells, training, what calls launch, a model, the rest."""
    cells = [
        Step(title=f"time {p}", limit=100, run=lambda found, p=p: found.cells.append(measure(p, device)),
             ahead=lambda p=p: _compile(p, device))
        for p in places(options, device)
    ]  # fmt: skip
    launched = [
        Step(title=f"kernels of {p}", limit=60, run=lambda found, p=p: _kernels(found, p, device))
        for p in _profiled(options, device)
    ]
    early = 2 * len([name for name in TELLING if name in options.rows]) + 5
    training, models = _training(options, device), _models(options, device)
    first = [*cells[:early], *training[:2], *launched, *models[:1]]
    return [*first, *cells[early:], *training[2:], *models[1:]]


def _training(options: Options, device: Device) -> list[Step]:
    """Losses and memory of one model, then losses of the others."""
    if options.no_training:
        return []
    dtype = getattr(torch, options.dtype)
    names, count, size = (LOSSES, 50, (8, 512)) if not device.rehearsal else (LOSSES[:1], 2, (1, 12))
    lengths = {"fusion": [2048, 4096, 8192, 16384], "eager": [2048, 4096, 8192]}
    if device.rehearsal:
        lengths = {"eager": [8, 12]}
    losses = [
        Step(title=f"losses of {name}", limit=180,
             run=lambda found, name=name: found.losses.append(follow(name, device, dtype, count, size)))
        for name in names
    ]  # fmt: skip
    memory = Step(
        title=f"memory of {names[0]}",
        limit=180,
        run=lambda found: found.memory.append(grow(names[0], device, dtype, lengths)),
    )
    return [losses[0], memory, *losses[1:]]


def _models(options: Options, device: Device) -> list[Step]:
    dtype = getattr(torch, options.dtype)
    wanted = MODELS if not device.rehearsal else (("llama", 1, 12),)
    return [
        Step(title=f"model {name}", limit=180,
             run=lambda found, name=name, b=b, n=n: found.models.append(measure_model(name, b, n, device, dtype)))
        for name, b, n in wanted
        if not options.no_models
    ]  # fmt: skip


def _profiled(options: Options, device: Device) -> list[Place]:
    found = places(options, device)
    if device.rehearsal:
        return found[:1]
    first = (next((p for p in found if (p.row, p.direction) == each), None) for each in PROFILED)
    return [place for place in first if place is not None]


def _tuned(options: Options, device: Device) -> list[Place]:
    """Whose tiles are measured one by one."""
    every = [place for place in places(options, device) if not place.decoding]
    if device.rehearsal:
        return every[:2]
    wanted = [(row, way, 576 if row == "latent" else options.d[at]) for row, way, at in TUNED if at < len(options.d)]
    first = (next((p for p in every if (p.row, p.direction, p.d) == each), None) for each in wanted)
    return [place for place in first if place is not None]


def _look(found: Findings, name: str, run: Callable[[], list[str]]) -> None:
    try:
        found.checks[name] = run()
    except Exception as failure:  # the rest is still worth knowing
        found.checks[name] = [brief(failure)]


def _kernels(found: Findings, place: Place, device: Device) -> None:
    """What each competitor's call launches, and for how long, to see what lies outside the attention itself."""
    operands = operands_of(place, device)
    cell = Measured(place=place, flop=1, bytes=1)
    with torch.no_grad() if place.direction == "forward" else contextlib.nullcontext():
        for who, call in prepare(cell, operands, device).items():
            found.kernels.setdefault(str(place), {})[who] = device.launched(call)


def _compile(place: Place, device: Device) -> None:
    """What measuring a cell compiles, but for competitors that hold whole matrices of scores."""
    operands = operands_of(place, device)
    with torch.no_grad() if place.direction == "forward" else contextlib.nullcontext():
        prepare(Measured(place=place, flop=1, bytes=1), operands, device, COMPILED)


def work(found: Findings, options: Options, device: Device, phase: str, deadline: float, path: Path) -> None:
    """Take the steps of a phase that were not tried yet. deadline: time.time() after which no step is begun.

    What is known is written to `path` before and after every step, tracebacks of what fails to a .log beside it. Raises
    where the device no longer answers.
    """
    log.addHandler(logging.FileHandler(path.with_suffix(".log"), delay=True))
    log.propagate = False
    log.setLevel(logging.INFO)
    console = Console(stderr=True)
    warnings.simplefilter("ignore")  # peers say at length why they refuse; the notes have it
    device.limit(MEASURING)
    found.current, found.patience = None, STARTING
    found.write(path)
    with running(device):
        every = steps(phase, options, device)
        found.planned = list(dict.fromkeys([*found.planned, *(step.title for step in every)]))
        for step in every:
            if step.title in found.tried:
                continue
            if time.time() > deadline:
                break
            found.current, found.patience = step.title, step.limit
            log.info("%s", step.title)
            found.write(path)
            begun = time.monotonic()
            try:
                step.run(found)
            except Exception as failure:  # the rest is still worth knowing
                found.failed[step.title] = brief(failure)
            device.free()
            found.write(path)  # what follows raises if the step has broken the device
            device.synchronize()
            found.tried.append(step.title)
            found.current = None
            console.print(f"{time.monotonic() - begun:5.1f} s  {step.title}", highlight=False, markup=False)
    found.write(path)


def compile_ahead(phase: str, options: Options, device: Device, part: int, parts: int) -> None:
    """Compile what every `parts`-th step of a phase needs, so that whoever takes it finds it in torch's and Triton's
    caches on disk."""
    device.limit(AHEAD / parts)
    with running(device):
        needed = [(step.title, step.ahead) for step in steps(phase, options, device) if step.ahead is not None]
        for title, ahead in needed[part::parts]:
            try:
                ahead()
            except Exception as failure:  # nobody depends on it
                print(f"{title}: {brief(failure)}")
            device.free()
