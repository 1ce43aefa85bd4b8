"""Measurement of tiles in a separate process, on a copy of a call's tensors.

A kernel may hang, or break the device for the process that launched it. In a separate process it costs that process and
one tile: the process is restarted, and continues with the next. It writes the fastest tile to the file of `remembered`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion import caching
from fusion.planning.choice import Tile

from .dtypes import allows_tf32

log = logging.getLogger(__name__)

STARTING = 180  # seconds until the first tile: imports, the device, the tensors
TILE = 60  # seconds for one tile, compilation included
WHOLE = 900  # seconds for a call
MOST_RESTARTS = 15
NO_TIME = "no time left"
INTERVAL = 0.1  # s between two looks at a process

COMMAND = (sys.executable, "-c", "from fusion.codegen.triton.apart_process import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call to be repeated. backward: the output's gradient, the output and the statistics, where the call is of the
    backward."""

    spec: str  # as text
    operands: Sequence[Tensor]
    sizes: Sequence[int]
    statistics: bool = False  # whether the forward writes them
    packed: int = 1  # heads that share blocks of rows
    backward: Sequence[Tensor] = ()
    needs: tuple[bool, ...] = ()  # the marked operands


def begin(state: Path, kernel: str, tile: Tile | str) -> str | None:
    """Reason why a tile is not tried, or None: then it is begun. state: the file with the tile in progress, and those
    known to fail."""
    found, name = read(state), f"{kernel}: {tile}"
    if name not in found["lost"]:
        _write(state, found | {"current": name, "patience": TILE})
    return found["lost"].get(name)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, state: dict[str, Any]) -> None:
    caching.write(path, json.dumps(state).encode())


def measure(request: Request) -> None:
    """Have the tiles of a call's kernels measured and remembered. A line is logged where that is impossible."""
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-tiles-") as folder:
            _measure(request, Path(folder))
    except Exception as problem:
        log.warning("no tiles are measured: %s: %s", type(problem).__name__, problem)


def _measure(request: Request, folder: Path) -> None:
    state, waiting = folder / "state.json", {"current": None, "patience": STARTING}
    device, tf32 = str(request.operands[0].device), allows_tf32()
    _write(state, waiting | {"lost": {}, "device": device, "tf32": tf32})
    save(request, folder / "request.pt")

    def lost(reason: str) -> None:
        found = read(state)
        log.warning("measuring %s: %s", found["current"] or "tiles", reason)
        if found["current"] is None:
            raise RuntimeError(f"the process that measures does not come to its first tile: {reason}")
        _write(state, found | waiting | {"lost": found["lost"] | {found["current"]: reason}})

    run_restarting(
        (*COMMAND, str(folder)), state, time.time() + WHOLE, lambda: read(state)["patience"], lost, _environment()
    )


def _environment() -> dict[str, str]:
    """Environment of this process, with the locations of its modules and caches."""
    found = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caching.directory().parent)}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_restarting(
    command: Sequence[str],
    watched: Path,
    deadline: float,
    patience: Callable[[], float],
    lost: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command until it ends well or time.time() passes the deadline, at which it is killed.

    watched: a file that it writes before and after every step.
    patience(): the seconds without a write after which it counts as hung.
    lost(reason): called after every crash or hang; it has to see to it that the next start continues elsewhere.
    environment: the command's, in place of this process's.

    Raises OSError where it cannot be started.
    """
    for _ in range(MOST_RESTARTS):
        child = subprocess.Popen(command, env=environment)
        try:
            reason = _watch(child, watched, deadline, patience)
        finally:
            child.kill()
            child.wait()
        if reason is None:
            return
        lost(reason)
        if time.time() > deadline:
            return
    lost(f"given up after {MOST_RESTARTS} starts")


def _watch(child: subprocess.Popen[bytes], watched: Path, deadline: float, patience: Callable[[], float]) -> str | None:
    """Reason why a process failed; None if it ended well."""
    begun = time.time()
    while (status := child.poll()) is None:
        time.sleep(INTERVAL)
        changed = max(begun, watched.stat().st_mtime if watched.exists() else 0)
        if time.time() > deadline:
            return NO_TIME
        if time.time() - changed > (allowed := patience()):
            return f"no answer within {allowed:.0f} s"
    return None if status == 0 else f"the process ended with status {status}"


def save(request: Request, path: Path) -> None:
    """Save a request. Memory that tensors share is saved once, and its gaps too, but nothing around it."""
    memory: list[tuple[Tensor, Tensor]] = []  # and its copy, as far from an address that 16 divides

    def copied(tensor: Tensor) -> Tensor:
        flat = _flat(tensor)
        for other, copy in memory:
            offset = (flat.data_ptr() - other.data_ptr()) // flat.element_size()
            if other.dtype == flat.dtype and 0 <= offset <= other.numel() - flat.numel():
                return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset() + offset)
        beyond = flat.data_ptr() % 16 // flat.element_size()
        copy = torch.empty(beyond + flat.numel(), dtype=flat.dtype)[beyond:].copy_(flat)
        memory.append((flat, copy))
        return copy.as_strided(tensor.shape, tensor.stride())

    call = {field.name: getattr(request, field.name) for field in fields(request)}
    torch.save(call | {name: [*map(copied, call[name])] for name in ("operands", "backward")}, path)


def load(path: Path, device: torch.device | str) -> Request:
    """Saved request, on a device."""
    return Request(**torch.load(path, map_location=device, weights_only=True))


def _flat(tensor: Tensor) -> Tensor:
    """Memory from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = last + 1 if tensor.numel() else 0
    return tensor.detach().as_strided((extent,), (1,))
