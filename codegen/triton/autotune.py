"""Tile of a kernel: the table's, a smaller one where that does not fit, or the fastest of a few measured ones.

Every launch goes through `run`. A tile for which Triton finds too little shared memory or too few registers is replaced
by the next smaller one, for the rest of the process. With a `Tuner` the first call of a kernel in a situation (device,
sizes up to the next power of two, alignment) is timed on a copy of its arguments in the tiles that the cost model
expects to be the best; the fastest is remembered in a file beside the generated module. Another process measures
(`apart`): a kernel that hangs or breaks the device there costs a tile, and does no harm to this process.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from fusion.planning.choice import Tile
from fusion.planning.gpu_layout import power
from fusion.torch_private.devices import keep_busy

from . import apart
from .apart import Request
from .candidates import smaller
from .dtypes import allows_tf32
from .remembered import remember, remembered

if TYPE_CHECKING:
    from .variant import Variant

log = logging.getLogger(__name__)
progress = logging.getLogger("fusion.progress")

MEASURED = 8  # tiles that are timed with the table's schedule, at most

MARGIN = 0.02
"""A tile must be faster than the table's by this share to take its place: less is within what two runs differ."""

ROUNDING = 4
"""Units of rounding by which results in different tiles may differ. That is far more than they do, and far less than
what a tile left out or added twice, or a sum read too early, would make."""

_measuring = threading.RLock()  # what runs beside a measurement falsifies it

Clock = Callable[[Callable[[], None], torch.device], float]  # (launch, device) -> seconds that one launch takes

Name = TypeVar("Name", Tile, str)  # of what is measured: a tile, or a peer by its name

Times = Callable[[str, Sequence[int], Sequence[Tile]], Sequence[float]]
"""(kernel, values of the spec's sizes, tiles) -> the seconds that are predicted for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Launches that share a tile."""

    kernel: str  # the one that takes the time
    variant: Variant  # its module
    tile: Tile  # the table's
    launch: Callable[[Tile], None]  # all of them in a tile, as often as is asked
    others: Callable[[], Sequence[Tile]] | None  # tiles that may run, too; None where the tile is settled
    results: Sequence[torch.Tensor] = ()  # what the launches write (not what they add to), rows of values
    peers: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    trusted: Callable[[], bool] = lambda: True
    shrinks: bool = True  # whether a smaller tile may take the place of one that does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Circumstances of a call. sizes: values of the spec's sizes. situation: the key under which choices are
    remembered, beside kernel and device."""

    device: torch.device
    sizes: Sequence[int]
    situation: str = ""


def call_of(
    operands: Sequence[torch.Tensor],
    sizes: Sequence[int],
    extents: tuple[int, int, int],
    precision: str,
    tuner: Tuner | None,
) -> Call:
    """Circumstances of a call. extents: heads, n_q, n_k. precision: of products."""
    if tuner is None:
        return Call(device=operands[0].device, sizes=sizes)
    heads, n_q, n_k = map(power, extents)
    aligned = all(
        tensor.data_ptr() % 16 == 0 and all(stride in (0, 1) or stride % 16 == 0 for stride in tensor.stride())
        for tensor in operands[:3]
    )
    situation = f"heads <= {heads}, n_q <= {n_q}, n_k <= {n_k}, {'' if aligned else 'not '}aligned, {precision}"
    return Call(device=operands[0].device, sizes=sizes, situation=situation)


def run(
    stages: Sequence[Stage], call: Call, tuner: Tuner | None, reset: Callable[[], None], request: Callable[[], Request]
) -> None:
    """Launch the stages, each in its tile. reset: undo the additions of launches to results. request: this call, for
    another process to repeat."""
    if tuner is not None and any(tuner.tile(stage, call) is None for stage in stages) and tuner.measures(call):
        if tuner.clock is None:
            tuner.have_measured(stages, call, request)
        else:
            for stage in stages:  # in order: later ones read what earlier ones write
                tuner.measure(stage, call)
            reset()
    for stage in stages:
        launch(stage, call, tuner)


def launch(stage: Stage, call: Call, tuner: Tuner | None = None) -> Tile:
    """Launch a stage in its tile or, where that does not fit, in the largest smaller one, which is returned. Where a
    peer was measured to be faster, it is called instead."""
    tile = settled(stage, call, tuner)
    if tuner is not None and (peer := tuner.peer(stage, call)):
        try:
            stage.peers[peer]()
            return tile
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.info("%s does not take this call (%s); %s runs in tiles of %s", peer, error, stage.kernel, tile)
    while True:
        try:
            stage.launch(tile)
            return tile
        except Exception as error:
            if not (stage.shrinks and _out_of_resources(error)) or (reduced := smaller(tile)) is None:
                raise
            log.info("%s does not fit in tiles of %s (%s); it runs in %s", stage.kernel, tile, error, reduced)
            stage.variant.reduced[stage.kernel, call.device, tile] = reduced
            tile = reduced


def settled(stage: Stage, call: Call, tuner: Tuner | None) -> Tile:
    """Tile in which a stage is launched, as far as is known."""
    tile = (tuner and tuner.tile(stage, call)) or stage.tile
    reduced = stage.variant.reduced
    while reduced and (found := reduced.get((stage.kernel, call.device, tile))) is not None:
        tile = found
    return tile


def _out_of_resources(error: Exception) -> bool:
    """Whether Triton, ptxas or the driver refused a kernel for want of shared memory, registers or threads."""
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, OutOfResources):
        return True
    refused = isinstance(error, (PTXASError, RuntimeError))
    return refused and any(text in str(error) for text in ("uses too much", "too many resources requested"))


class Tuner:
    """Measures tiles, and remembers the fastest. times: ranks the tiles to be measured; without it tiles nearer to the
    table's come first. clock: measures in this process; without it another one measures. notes: see `apart.begin`."""

    def __init__(self, times: Times | None = None, clock: Clock | None = None, notes: Path | None = None):
        self.times, self.clock, self.notes = times, clock, notes
        self._settled: dict[tuple, tuple[Tile | None, str]] = {}  # the tile, and the peer that is faster or ""

    def measures(self, call: Call) -> bool:
        """Whether a call may be timed: not while a CUDA graph is captured, nor where results must not depend on it."""
        if torch.are_deterministic_algorithms_enabled():
            return False
        if call.device.type != "cuda":
            return self.clock is not None
        return not torch.cuda.is_current_stream_capturing()

    def tile(self, stage: Stage, call: Call) -> Tile | None:
        """Tile that was measured to be the fastest, by this process or another."""
        if stage.others is None:
            return stage.tile
        if torch.are_deterministic_algorithms_enabled():
            return None
        key = self._key(stage, call)
        if key not in self._settled:
            found = remembered(stage.variant.digest, call.device).get(f"{stage.kernel}: {call.situation}")
            self._settled[key] = (None, "") if found is None else (Tile(**found["tile"]), found["peer"])
        return self._settled[key][0]

    def peer(self, stage: Stage, call: Call) -> str:
        """Name of the peer that was measured to be faster than the stage in its tile; empty where none was."""
        if not stage.peers or self.tile(stage, call) is None:
            return ""
        _, found = self._settled.get(self._key(stage, call), (None, ""))
        return found if found in stage.peers else ""

    def have_measured(self, stages: Sequence[Stage], call: Call, request: Callable[[], Request]) -> None:
        """Settle the tiles of some stages by the measurements of another process, or unmeasured where it fails."""
        with _measuring:
            keys = {self._key(stage, call): stage for stage in stages if self.tile(stage, call) is None}
            if not keys:
                return
            apart.measure(request())
            for key, stage in keys.items():
                del self._settled[key]
                if self.tile(stage, call) is None:
                    log.info("%s: nothing was measured; it runs in tiles of %s", stage.kernel, stage.tile)
                    self._settled[key] = stage.tile, ""

    @staticmethod
    def _key(stage: Stage, call: Call) -> tuple:
        return stage.variant.digest, stage.kernel, call.device, call.situation

    def measure(self, stage: Stage, call: Call) -> None:
        """Launch a stage in several tiles and choose the fastest, or the tile of `launch` where none could be timed. If
        the choice is known the stage is launched once."""
        with _measuring:
            if self.tile(stage, call) is not None:
                launch(stage, call, self)
                return
            started = time.perf_counter()
            seconds, failed = self._seconds(stage, call)
            best = min(seconds, key=seconds.__getitem__, default=None)
            if best is None:
                best = launch(stage, call)
            elif stage.tile in seconds and seconds[best] > (1 - MARGIN) * seconds[stage.tile]:
                best = stage.tile
            wrong = lambda _: None if stage.trusted() else "its result is less exact than eager's"
            rivals = self._time(stage, call, stage.peers, wrong, failed)
            peer = min(rivals, key=rivals.__getitem__, default="")
            if peer and rivals[peer] > (1 - MARGIN) * seconds.get(best, math.inf):
                peer = ""
            log.info("%s: %s, after %.1f s", stage.kernel, peer or best, time.perf_counter() - started)
            self._settled[self._key(stage, call)] = best, peer
            name = f"{stage.kernel}: {call.situation}"
            remember(stage.variant.digest, call.device, name, best, seconds | rivals, failed, peer)

    def _seconds(self, stage: Stage, call: Call) -> tuple[dict[Tile, float], dict[Tile | str, str]]:
        """Seconds of a stage by tile, and the reasons why others have none: first with the table's schedule, then the
        fastest with other schedules. Tiles whose results are not those of the first one that ran have failed."""
        failed: dict[Tile | str, str] = {}
        expected: list[torch.Tensor] = []

        def wrong(tile: Tile) -> str | None:
            expected[:] = expected or [result.clone() for result in stage.results]
            if all(map(agree, stage.results, expected)):
                return None
            reason = "its result is another than that of the first tile"
            log.warning("%s in tiles of %s is not used: %s", stage.kernel, tile, reason)
            return reason

        def time_all(tiles: Sequence[Tile]) -> dict[Tile, float]:
            return self._time(stage, call, {t: functools.partial(stage.launch, t) for t in tiles}, wrong, failed)

        others = [tile for tile in (stage.others() if stage.others else ()) if tile != stage.tile]
        seconds = time_all(self._ranked(stage, call, others))
        if seconds:
            best = min(seconds, key=seconds.__getitem__)
            seconds |= time_all([t for t in others if t.with_form_of(best) == best and t not in (*seconds, *failed)])
        return seconds, failed

    def _time(
        self,
        stage: Stage,
        call: Call,
        runs: Mapping[Name, Callable[[], None]],
        wrong: Callable[[Name], str | None],
        failed: dict[Tile | str, str],
    ) -> dict[Name, float]:
        """Seconds of tiles or peers. wrong: the reason why a result must not be used, or None."""
        seconds = {}
        for number, (name, run) in enumerate(runs.items()):
            progress.info("%s: measuring %d of %d, %s", stage.kernel, number + 1, len(runs), name)
            if (reason := self.notes and apart.begin(self.notes, stage.kernel, name)) is None:
                try:
                    for result in stage.results:
                        result.fill_(math.nan)  # what another has written there must not count
                    run()
                    if (reason := wrong(name)) is None:
                        seconds[name] = (self.clock or by_events)(run, call.device)
                        continue
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    if call.device.type == "cuda":  # raises where the device is lost, and every later launch with it
                        torch.cuda.synchronize(call.device)
            failed[name] = reason
            log.info("%s: %s is left out: %s", stage.kernel, name, reason)
        return seconds

    def _ranked(self, stage: Stage, call: Call, others: Sequence[Tile]) -> list[Tile]:
        """The table's tile, then by turns others of the sizes that the model ranks best, and the table's sizes with
        differences that the model does not see: warps and stages."""
        first = stage.tile
        others = [tile for tile in others if tile.with_form_of(first) == tile]
        if self.times is not None and others:
            predicted = dict(zip(others, self.times(stage.kernel, call.sizes, others), strict=True))
            own = [tile for tile in others if _size(tile) == _size(first)]
            nearest = {_size(tile): tile for tile in reversed(others) if tile not in own}
            best = sorted(nearest.values(), key=predicted.__getitem__)
            turns = itertools.chain.from_iterable(itertools.zip_longest(best, own))
            others = [tile for tile in turns if tile is not None]
        return [first, *others[: MEASURED - 1]]


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of [.., n] differ by no more than rounding: by row, relative to the row and to all of them.
    Values that are not finite must be equal."""
    eps = max(torch.finfo(found.dtype).eps, 2**-10 if allows_tf32() else 2**-12)
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, found.float() - expected.float()).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected.float(), 0.0).norm(dim=-1)
    return bool((difference <= ROUNDING * eps * (size + size.square().mean().sqrt())).all())


def _size(tile: Tile) -> tuple[int, int]:
    return tile.rows, tile.keys


def by_events(launch: Callable[[], None], device: torch.device) -> float:
    """Seconds of one launch: the median of several, between events on the device."""
    with torch.cuda.device(device):
        once = _between_events(launch, 1)[0]
        times = sorted(_between_events(launch, min(20, max(5, int(0.02 / max(once, 1e-6))))))
    return times[len(times) // 2]


def _between_events(launch: Callable[[], None], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    keep_busy(1_000_000 * repeats)  # while the device waits, the host runs ahead: its own time is not measured
    for event in events[:-1]:
        event.record()
        launch()
    events[-1].record()
    events[-1].synchronize()
    return [1e-3 * first.elapsed_time(second) for first, second in zip(events, events[1:], strict=False)]
