"""Memory that one causal attention adds to a process, forward alone and with its backward, by length and by peer.

    python -m benchmarks.cpu.memory [--lengths 1024 2048 4096] [--heads 8] [--dtype float32] [--out benchmarks/results]

Each peer has a process of its own for either, which compiles on short problems first. What counts is its largest
resident size during a call, less that after those and less Q, K, V and the gradient that arrives: workspaces of
kernels, which a process keeps, are included. Of two calls the smaller figure counts, since the first may compile.
eager is the attention written out, which Inductor and fusion compile; SDPA is `scaled_dot_product_attention`; and
FlexAttention, which trains on GPUs alone, is compiled with its block mask, made beforehand.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fusion
from benchmarks.common.results import environment
from benchmarks.cpu.training import resident

WIDTH = 64
MODES = {"forward": False, "forward and backward": True}


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    dead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(dead, -math.inf).softmax(-1) @ v


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def block_mask(length: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu")


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=block_mask(q.shape[2]))


CONTESTANTS: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "eager": lambda: written_out,
    "SDPA": lambda: sdpa,
    "FlexAttention": lambda: flex,
    "Inductor": lambda: torch.compile(written_out),
    "fusion": lambda: torch.compile(written_out, backend="fusion"),
}


def inputs(length: int, heads: int, dtype: torch.dtype, trained: bool) -> list[torch.Tensor]:
    """Q, K, V and the gradient of the result."""
    tensors = [torch.randn(1, heads, length, WIDTH).to(dtype) for _ in range(4)]
    return [x.requires_grad_(trained) for x in tensors[:3]] + tensors[3:]


def step(run: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
    with torch.set_grad_enabled(q.requires_grad):
        result = run(q, k, v)
        if q.requires_grad:
            torch.autograd.grad(result, (q, k, v), g)


def sizes(name: str, mode: str, lengths: list[int], heads: int, dtype: torch.dtype) -> list[float]:
    """MiB that a call adds to this process, by length."""
    run, trained = CONTESTANTS[name](), MODES[mode]
    for length in (256, 320):  # the second compilation has dynamic sizes
        step(run, *inputs(length, heads, dtype, trained))
    for length in lengths:
        block_mask(length)  # made beforehand
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts as free
    base, figures = resident("VmRSS"), []
    for length in lengths:
        tensors, added = inputs(length, heads, dtype, trained), []
        for _ in range(2):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            step(run, *tensors)
            added.append((resident("VmHWM") - base) / 1024 - sum(x.nbytes for x in tensors) / 2**20)
        figures.append(max(min(added), tensors[0].nbytes / 2**20))  # a result at least, where freed memory was reused
    return figures


def in_its_own_process(name: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    if name == "FlexAttention" and MODES[mode]:
        return [""] * len(arguments.lengths)
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu.memory",
        "--cell",
        name,
        mode,
        "--lengths",
        *map(str, arguments.lengths),
    ]
    command += ["--heads", str(arguments.heads), "--dtype", arguments.dtype]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="folder for a dated page, beside what is printed")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        name, mode = arguments.cell
        figures = sizes(name, mode, arguments.lengths, arguments.heads, getattr(torch, arguments.dtype))
        print(*(f"{size:.1f}" for size in figures))
        return
    machine = environment({})
    lines = [
        f"Memory of one causal attention, {arguments.heads} heads of {WIDTH}, {arguments.dtype}: MiB that a call adds",
        f"to a process. `python -m benchmarks.cpu.memory`, {machine['date']}, commit {machine['commit']},",
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['versions']['torch']}.",
        "",
        "| | N | " + " | ".join(CONTESTANTS) + " |",
        "|---|---:|" + "---:|" * len(CONTESTANTS),
    ]
    for mode in MODES:
        columns = [in_its_own_process(name, mode, arguments) for name in CONTESTANTS]
        for length, *cells in zip(arguments.lengths, *columns, strict=True):
            lines.append(f"| {mode} | {length} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if arguments.out:
        day = datetime.date.today().isoformat()
        (arguments.out / f"{day}-memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
