"""Training one attention on a CPU: time of forward and backward, and memory that a step adds, against peers in one run.

    python -m benchmarks.cpu.training [--lengths 512 1024 2048] [--heads 4] [--dtype float32] [--seconds 4]
    python -m benchmarks.cpu.training --memory --seconds 0 --lengths 512 1024 2048 4096 8192
    python -m benchmarks.cpu.training --example [--seconds 30]

Peers: the eager code (`scaled_dot_product_attention` where it can express the case), and Inductor on it. All run in
turns within one process, so that what disturbs the machine disturbs all of them; medians are printed. Memory is the
largest resident size during a step, in a process of its own, less that before it; behind the lengths stands the
exponent of N by which it grows from the first to the last (1 linear, 2 quadratic). With --seconds 0 no times are taken.

--example takes whole training steps of examples/train.py instead, and its losses: all start from the same weights and
see the same batches. Its peers are Inductor on the same model, and Inductor on the model whose attention is rewritten
to `scaled_dot_product_attention`.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

if "--example" in sys.argv:  # as the example itself: whole models alternate between Inductor's OpenMP and torch's
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch._inductor.config
import torch.nn.functional as F

import fusion
from benchmarks.common.measuring import load_example

torch._inductor.config.compile_threads = 1  # workers that start up would disturb the first cases

WIDTH = 64
Call = Callable[..., torch.Tensor]


def full(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def biased(q, k, v, bias):
    return torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5 + bias, -1) @ v


def relative(q, k, v, table):
    i = torch.arange(q.shape[2])
    distance = (i - i[:, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST
    return torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5 + table[distance].permute(2, 0, 1), -1) @ v


CASES: dict[str, Call] = {"full": full, "causal": causal, "grouped": grouped, "bias": biased, "relative": relative}
GROUP = 4
FARTHEST = 128


def inputs(case: str, length: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Q, K and V as layers make them, [1, N, H, d] transposed, and the bias that is trained, [1, H, N, N], or its table
    by distance [2 FARTHEST + 1, H]. Grouped: K and V have a head for each GROUP heads of Q."""
    torch.manual_seed(0)
    shared = heads // GROUP if case == "grouped" else heads
    tensors = [torch.randn(1, length, n, WIDTH, dtype=dtype).transpose(1, 2) for n in (heads, shared, shared)]
    if case == "bias":
        tensors.append(torch.randn(1, heads, length, length, dtype=dtype))
    if case == "relative":
        tensors.append(torch.randn(2 * FARTHEST + 1, heads, dtype=dtype))
    return [t.requires_grad_() for t in tensors]


def contestants(case: str) -> dict[str, Call]:
    function = CASES[case]
    peers = {"fusion": torch.compile(function, backend="fusion"), "inductor": torch.compile(function)}
    kernels = torch.compile(function, backend="fusion", options={"training": "always"})  # few scores are fused as well
    return peers | {"kernels": kernels, "eager" if case in ("bias", "relative") else "sdpa": function}


def step(function: Call, tensors: list[torch.Tensor], upstream: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    begun = time.perf_counter()
    torch.autograd.grad(function(*tensors), tensors, upstream)
    return time.perf_counter() - begun


def measure(case: str, length: int, heads: int, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Median seconds of a step by contestant."""
    tensors = inputs(case, length, heads, dtype)
    upstream = torch.randn_like(tensors[0])
    torch._dynamo.reset()
    functions = contestants(case)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(2):
            step(function, tensors, upstream)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["fusion"]) < 3:
        for name in random.sample(list(functions), len(functions)):  # what ran before left the caches as they are
            times[name].append(step(functions[name], tensors, upstream))
    return {name: statistics.median(samples) for name, samples in times.items()}


def resident(line: str) -> int:
    """KiB that this process holds (VmRSS), or held at most since the last reset (VmHWM). Linux."""
    return next(int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if line in row)


def peak(name: str, case: str, length: int, heads: int, dtype: torch.dtype) -> float:
    """MiB that a step adds to this process, which must be a fresh one: compilation happens on short problems first."""
    function = contestants(case)[name]
    for n in (256, 320):  # two lengths: the second compilation has dynamic sizes
        small = inputs(case, n, heads, dtype)
        step(function, small, torch.randn_like(small[0]))
    tensors = inputs(case, length, heads, dtype)
    upstream = torch.randn_like(tensors[0])
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts as free
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step(function, tensors, upstream)
    return (resident("VmHWM") - before) / 1024


def peak_elsewhere(name: str, case: str, length: int, arguments: argparse.Namespace) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu.training",
        "--peak",
        name,
        "--cases",
        case,
        "--lengths",
        str(length),
    ]
    command += ["--heads", str(arguments.heads), "--dtype", arguments.dtype]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def with_sdpa(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of the example's attention, [B, N, WIDTH], by `scaled_dot_product_attention`."""
    n = x.shape[1]
    q, k, v = attention.project(x).unflatten(-1, (3, attention.distance_bias.shape[0], -1)).permute(2, 0, 3, 1, 4)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    mask = attention.distance_bias[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
    return attention.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def measure_example(seconds: float) -> None:
    """Print median times of a training step and how far losses are from eager's."""
    example = load_example("train")
    text, characters = example.read_text()
    names = ("fusion", "inductor", "sdpa + inductor", "eager")
    runs = {name: example.Run(name if name in ("fusion", "inductor") else None, characters) for name in names}
    rewritten = runs["sdpa + inductor"]
    for attention in rewritten.model.attention:
        attention.forward = MethodType(with_sdpa, attention)
    rewritten.model = torch.compile(rewritten.model)
    end: float | None = None  # set when all are compiled
    while end is None or time.perf_counter() < end:
        starts = torch.randint(0, len(text) - example.LENGTH - 1, (example.BATCH,)).tolist()
        batch = torch.stack([text[start : start + example.LENGTH + 1] for start in starts])
        for run in runs.values():
            run.step(batch)
        if end is None and len(rewritten.losses) == 2:
            end = time.perf_counter() + seconds
    ours, eager = runs["fusion"].milliseconds(), torch.tensor(runs["eager"].losses)
    print(f"{len(eager)} steps of {example.BATCH} x {example.LENGTH}; loss {eager[0]:.4f} to {eager[-1]:.4f}")
    for name, run in runs.items():
        difference = (torch.tensor(run.losses) - eager).abs().max()
        print(f"{name:16} {run.milliseconds():8.1f} ms ({run.milliseconds() / ours:4.2f}x)  loss +-{difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=4.0, help="per case and length")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too (a process each)")
    parser.add_argument("--example", action="store_true", help="whole training steps of examples/train.py")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.peak:
        print(peak(arguments.peak, arguments.cases[0], arguments.lengths[0], arguments.heads, dtype))
        return
    if arguments.example:
        print(f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}")
        measure_example(arguments.seconds)
        return
    print(f"{torch.get_num_threads()} threads, {arguments.heads} heads of {WIDTH}, {arguments.dtype}; times in ms")
    for case in arguments.cases:
        for length in arguments.lengths if arguments.seconds else ():
            found = measure(case, length, arguments.heads, dtype, arguments.seconds)
            cells = [f"{name} {1e3 * value:8.2f} ({value / found['fusion']:4.2f}x)" for name, value in found.items()]
            print(f"{case:8}{length:6}  " + "  ".join(cells), flush=True)
        for name in contestants(case) if arguments.memory else ():
            print(f"{case:8} {memory(name, case, arguments)}", flush=True)


def memory(name: str, case: str, arguments: argparse.Namespace) -> str:
    """Peak memory by length, and the exponent of its growth, in words."""
    held = [peak_elsewhere(name, case, length, arguments) for length in arguments.lengths]
    lengths = arguments.lengths
    cells = "  ".join(f"N={length} +{size:.1f} MiB" for length, size in zip(lengths, held, strict=True))
    if len(held) < 2 or min(held) <= 0:
        return f"{name:9} {cells}"
    return f"{name:9} {cells}  ~ N^{math.log(held[-1] / held[0]) / math.log(lengths[-1] / lengths[0]):.2f}"


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
