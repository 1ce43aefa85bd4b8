"""Devices: AMX's tile registers and time on a GPU."""

from __future__ import annotations

import torch


def init_amx() -> bool:
    """Ask the operating system for AMX's tile registers; False where it refuses. Without it, matrix kernels of CPUs
    with AMX would end the process."""
    return bool(torch.cpu._init_amx())


def keep_busy(cycles: int) -> None:
    """Let the current CUDA device wait. Without it, measured times include the host's time to launch a kernel."""
    torch.cuda._sleep(cycles)
