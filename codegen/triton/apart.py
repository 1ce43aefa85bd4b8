"""Tiles are measured in a process of their own, on a copy of a call's tensors.

A kernel may hang, or break the device for the process that launched it. Here it costs that process and one tile: it is
started again, and goes on with the next. What was fastest it writes where `remembered` finds it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion import attended, disk_cache
from fusion.planning.choice import Tile

log = logging.getLogger(__name__)

STARTING = 180  # seconds until the first tile: imports, the device, the tensors
TILE = 60  # seconds for one tile, compilation included
WHOLE = 900  # seconds for a call

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


class Notes:
    """What has been begun, and what is known to fail: by kernel and tile. path: a file that says so, too."""

    def __init__(self, path: Path | None = None):
        self.path = path

    def known(self, kernel: str, tile: Tile | str) -> str | None:
        """Why a tile is not to be tried, or None."""
        return None if self.path is None else _read(self.path)["lost"].get(f"{kernel}: {tile}")

    def begin(self, kernel: str, tile: Tile | str) -> None:
        if self.path is not None:
            _write(self.path, _read(self.path) | {"current": f"{kernel}: {tile}", "patience": TILE})


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, state: dict[str, Any]) -> None:
    disk_cache.write(path, json.dumps(state).encode())


def measure(request: Request) -> None:
    """Have the tiles of a call's kernels measured and remembered. Where that cannot be done a line is logged."""
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-tiles-") as folder:
            _measure(request, Path(folder))
    except Exception as problem:
        log.warning("no tiles are measured: %s: %s", type(problem).__name__, problem)


def _measure(request: Request, folder: Path) -> None:
    state = folder / "state.json"
    _write(state, {"current": None, "patience": STARTING, "lost": {}})
    torch.save(_packed(request), folder / "request.pt")

    def lost(reason: str) -> None:
        found = _read(state)
        log.warning("measuring %s: %s", found["current"] or "tiles", reason)
        if found["current"] is None:
            raise RuntimeError(f"the process that measures does not come to its first tile: {reason}")
        _write(state, {"current": None, "patience": STARTING, "lost": found["lost"] | {found["current"]: reason}})

    attended.attend(
        (*COMMAND, str(folder)), state, time.time() + WHOLE, lambda: _read(state)["patience"], lost, _environment()
    )


def _environment() -> dict[str, str]:
    """This process's, with what its modules and caches were found by."""
    found = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(disk_cache.directory().parent)}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _packed(request: Request) -> dict[str, Any]:
    """What torch can save: memory that tensors share is saved once, and its gaps too."""
    memory: list[Tensor] = []
    places = []
    for tensor in (tensors := [*request.operands, *request.backward]):
        flat = _flat(tensor)
        if (found := _within(flat, memory)) is None:
            found = len(memory), 0
            memory.append(flat)
        places.append((*found, tuple(tensor.shape), tensor.stride()))
    given = {field.name: getattr(request, field.name) for field in fields(request)}
    given |= {"operands": len(request.operands), "backward": len(request.backward)}
    return {
        "given": given,
        "memory": [torch.empty_like(flat, device="cpu").copy_(flat) for flat in memory],
        "beyond": [flat.data_ptr() % 16 // flat.element_size() for flat in memory],
        "places": places,
        "device": str(tensors[0].device),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def _within(flat: Tensor, memory: Sequence[Tensor]) -> tuple[int, int] | None:
    """Which piece of memory holds all of another, and from which element on."""
    for at, other in enumerate(memory):
        offset = (flat.data_ptr() - other.data_ptr()) // flat.element_size()
        if other.dtype == flat.dtype and 0 <= offset <= other.numel() - flat.numel():
            return at, offset
    return None


def _flat(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = last + 1 if tensor.numel() else 0
    return tensor.detach().as_strided((extent,), (1,))


def unpacked(saved: dict[str, Any]) -> Request:
    """What `_packed` made of a request."""
    memory = []
    for flat, beyond in zip(saved["memory"], saved["beyond"], strict=True):
        memory.append(torch.empty(beyond + flat.numel(), dtype=flat.dtype, device=saved["device"])[beyond:].copy_(flat))
    tensors = [
        memory[at].as_strided(shape, stride, memory[at].storage_offset() + offset)
        for at, offset, shape, stride in saved["places"]
    ]
    count = saved["given"]["operands"]
    return Request(**saved["given"] | {"operands": tensors[:count], "backward": tensors[count:]})
