"""Memory that one attention adds to a process, forward alone and with its backward, by length and by peer.

    python -m benchmarks.cpu.memory [--case bias] [--lengths 1024 2048 4096] [--heads 8] [--output FILE.md]

Each peer has a process of its own for either, which compiles on short problems first. The figure is its largest
resident size during a call, less that after those and less the operands and the gradient that arrives: workspaces of
kernels, which a process keeps, are included. Of two calls the smaller figure counts, since the first may compile.
eager is the attention written out, which Inductor and fusion compile; SDPA is `scaled_dot_product_attention`; and
FlexAttention, which trains on GPUs alone, is compiled with its block mask, made beforehand. --case bias: with a bias
[1, H, N, N], whose gradient is part of the step.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import results
from benchmarks.common.rows import ROWS, Problem, sdpa_call

MODES = {"forward": False, "forward and backward": True}
PEERS = ("eager", "SDPA", "FlexAttention", "Inductor", "fusion")


@functools.cache
def block_mask(length: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu")


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=block_mask(q.shape[2]))


def run_of(peer: str, case: str) -> Callable[..., torch.Tensor]:
    """The attention of a peer, a function of the operands."""
    row = ROWS[case]
    if peer in ("Inductor", "fusion"):
        return torch.compile(row.plain, backend=peer.lower())
    return {
        "eager": row.plain,
        "SDPA": lambda *operands: sdpa_call(row, operands)(),  # type: ignore[misc]
        "FlexAttention": flex,
    }[peer]


def inputs(case: str, length: int, heads: int, dtype: torch.dtype, trained: bool) -> list[torch.Tensor]:
    problem = Problem(H=heads, N=length, d=64, dtype=dtype)
    return [x.requires_grad_(trained) for x in problem.tensors(ROWS[case])]


def step(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor], upstream: torch.Tensor) -> None:
    with torch.set_grad_enabled(tensors[0].requires_grad):
        result = run(*tensors)
        if result.requires_grad:
            torch.autograd.grad(result, tensors, upstream)


def resident(line: str) -> int:
    """KiB that this process holds (VmRSS), or held at most since the last reset (VmHWM). Linux."""
    return next(int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if line in row)


def added(peer: str, mode: str, options: argparse.Namespace) -> list[float]:
    """MiB that a call adds to this process, by length."""
    run, dtype = run_of(peer, options.case), getattr(torch, options.dtype)
    for length in (256, 320):  # the second compilation has dynamic sizes
        tensors = inputs(options.case, length, options.heads, dtype, MODES[mode])
        step(run, tensors, torch.randn_like(tensors[0]))
    for length in options.lengths if peer == "FlexAttention" else ():
        block_mask(length)  # made beforehand
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts as free
    base, figures = resident("VmRSS"), []
    for length in options.lengths:
        tensors, seen = inputs(options.case, length, options.heads, dtype, MODES[mode]), []
        upstream = torch.randn_like(tensors[0])
        own = sum(x.nbytes for x in (*tensors, upstream)) / 2**20
        for _ in range(2):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            step(run, tensors, upstream)
            seen.append((resident("VmHWM") - base) / 1024 - own)
        figures.append(max(min(seen), tensors[0].nbytes / 2**20))  # a result at least, where freed memory was reused
    return figures


def in_its_own_process(peer: str, mode: str, options: argparse.Namespace) -> list[str]:
    """The figures, or blanks where a peer has no gradients or no such case."""
    if peer == "FlexAttention" and (MODES[mode] or options.case != "causal"):
        return [""] * len(options.lengths)
    command = [sys.executable, "-m", "benchmarks.cpu.memory", "--cell", peer, mode, "--case", options.case]
    command += ["--dtype", options.dtype, "--heads", str(options.heads), "--lengths", *map(str, options.lengths)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--case", default="causal", choices=["causal", "bias"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, help="a file for the page")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        peer, mode = options.cell
        print(*(f"{size:.1f}" for size in added(peer, mode, options)))
        return
    lines = []
    for mode in MODES:
        columns = [in_its_own_process(peer, mode, options) for peer in PEERS]
        lines += [[mode, str(n), *cells] for n, *cells in zip(options.lengths, *columns, strict=True)]
    title = f"MiB that one {options.case} attention adds, {options.heads} heads of 64, {options.dtype}"
    results.publish(title, results.table(["", "N", *PEERS], lines), options.output)


if __name__ == "__main__":
    main()
