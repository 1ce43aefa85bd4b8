"""Process in which tiles are measured (`apart`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusion.ir.spec import AttentionSpec
from fusion.planning.gpu_model import tile_clocks

from . import apart
from .autotune import Tuner, by_events
from .differentiable import Differentiable
from .launch import Kernel, machine_of


def main() -> None:
    """Repeat the call whose request lies in the folder that is named, and measure tiles during it."""
    folder = Path(sys.argv[1])
    state = apart.read(folder / "state.json")
    device = torch.device(state["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if state["tf32"] else "ieee"
    request = apart.load(folder / "request.pt", device)
    spec = AttentionSpec.from_json(request.spec)
    clock = by_events if device.type == "cuda" else _by_clock
    tuner = Tuner(tile_clocks(spec, machine_of(device)), clock, folder / "state.json")
    if request.backward:
        Differentiable(spec, tuner=tuner).backward(*request.backward, request.operands, request.sizes, request.needs)
    else:
        kernel = Kernel(spec, statistics=request.statistics, tuner=tuner, packed=request.packed)
        kernel.forward(request.operands, request.sizes)


def _by_clock(launch: Callable[[], None], device: torch.device) -> float:
    """Seconds of a launch in Triton's interpreter."""
    begun = time.perf_counter()
    launch()
    return time.perf_counter() - begun
