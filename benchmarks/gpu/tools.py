"""compute-sanitizer and ncu on single attentions, where they are installed: each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.gpu.device import Device

LIMIT = 120  # s of a process
SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "3", "--tool")
SANITIZED = (("memcheck", "causal"), ("racecheck", "causal"), ("memcheck", "packed"), ("racecheck", "packed"),
             ("memcheck", "decode"), ("racecheck", "decode"), ("memcheck", "bias"))  # fmt: skip
COUNTERS = ("ncu", "--clock-control", "none", "--kernel-name", "regex:attention_", "--section", "SpeedOfLight",
            "--section", "ComputeWorkloadAnalysis", "--section", "Occupancy", "--print-details", "all")  # fmt: skip
COUNTED = ("causal", "full", "softcap")
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
FAULTS = ("ERROR SUMMARY", "RACECHECK SUMMARY", "Error", "Invalid", "hazard")


def found(tool: str) -> str | None:
    """The program, or None."""
    return shutil.which(tool) or next(filter(None, (shutil.which(tool, path=folder) for folder in FOLDERS)), None)


def observed(tool: tuple[str, ...], row: str, device: Device, *more: str) -> tuple[int, str]:
    """(exit status, what was printed) of an attention under a tool; of the attention alone in a rehearsal. Raises
    subprocess.TimeoutExpired."""
    command = [] if device.rehearsal else [found(tool[0]) or tool[0], *tool[1:]]
    command += [sys.executable, "-m", "benchmarks.gpu.observed", row, *more]
    if device.rehearsal:
        command += ["--rehearse", "--N", "20", "--d", "16", "--heads", "2"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # what lies beside a tensor is not torch's
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    return done.returncode, done.stdout + done.stderr


def sanitized(tool: str, row: str, device: Device) -> list[str]:
    """What a tool of compute-sanitizer has to say against an attention and its gradient."""
    more = ("--forward",) if row == "decode" else ()
    status, said = observed((*SANITIZER, tool), row, device, *more)
    if status == 0:
        return []
    told = [line.strip("= ") for line in said.splitlines() if any(word in line for word in FAULTS)]
    return [f"status {status}: " + "; ".join(told[:4] or said.splitlines()[-2:]).replace("|", "/")[:400]]


def counted(row: str, device: Device) -> list[str]:
    """Lines of ncu about the kernels of an attention: its name, then what was counted. Raises RuntimeError where it
    fails."""
    status, said = observed(COUNTERS, row, device, *(() if device.rehearsal else ("--N", "4096", "--heads", "16")))
    if status:
        raise RuntimeError(f"status {status}: {said.strip().splitlines()[-1:] or 'nothing said'}")
    lines = [" ".join(line.split()) for line in said.splitlines()]
    return [line for line in lines if line and any(c.isdigit() for c in line) and not line.startswith("==")]
