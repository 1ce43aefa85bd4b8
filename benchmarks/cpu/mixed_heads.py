"""Attention whose heads are mixed before and after the softmax ("talking heads", as CaiT has them), on a CPU: time
against Inductor, and against attention of the same shapes that mixes nothing.

    python -m benchmarks.cpu.mixed_heads [--dtype float32] [--seconds 4] [--cases 0 2] [--train]
    python -m benchmarks.cpu.mixed_heads --models cait_xxs24_224 cait_s24_224 efficientformerv2_s0

All run in turns within one process. "unmixed" is the same attention without the sums over heads, fused: what these
cost. --train: a step, which ends with the gradients of q, k, v and of what heads are mixed by.
--models: whole models of timm (which asks for torchvision) with random weights instead, two images, without gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F

import fusion
from benchmarks.common.measuring import Entry, interleave
from fusion.machine import machine as find_machine

torch._inductor.config.compile_threads = 1
SHAPES = ((8, 4, 196, 48), (8, 8, 196, 48), (2, 8, 576, 48), (2, 16, 576, 48), (1, 8, 1024, 64), (1, 8, 4096, 64))
"""Batch, heads, keys and head dimension: of CaiT at 224 and 384 pixels (XXS, S, M), and longer."""


def mixed(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As CaiT of timm writes it. x: [B, H, N, N]."""
    return F.linear(x.permute(0, 2, 3, 1), matrix, bias).permute(0, 3, 1, 2)


def talking(q, k, v, before, before_bias, after, after_bias) -> torch.Tensor:
    """[B, H, N, d]."""
    weights = mixed(q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1), before, before_bias).softmax(-1)
    return mixed(weights, after, after_bias) @ v


def unmixed(q, k, v, *_) -> torch.Tensor:
    """[B, H, N, d]."""
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v


def contestants(tensors: list[torch.Tensor], train: bool) -> list[Entry]:
    """What is timed, each run once."""
    torch._dynamo.reset()
    calls: dict[str, Callable[[], object]] = {}
    for name, function, backend in (
        ("fusion", talking, "fusion"), ("unmixed", unmixed, "fusion"), ("inductor", talking, "inductor"),
    ):  # fmt: skip
        run = torch.compile(function, backend=backend, dynamic=False)
        wanted = tensors if function is talking else tensors[:3]
        if train:
            calls[name] = lambda run=run, wanted=wanted: torch.autograd.grad(run(*tensors).square().mean(), wanted)
        else:
            calls[name] = lambda run=run: run(*tensors)
    for call in calls.values():
        call()
    return [Entry(name=name, call=call) for name, call in calls.items()]


def whole(name: str) -> tuple[str, list[Entry]]:
    """How much of a model of timm is fused, and what is timed, each run once."""
    import timm

    torch._dynamo.reset()
    model = timm.create_model(name).eval()
    config: dict[str, Any] = model.default_cfg  # type: ignore[assignment]
    images = torch.randn(2, *config["input_size"])
    entries = []
    with torch.no_grad(), fusion.collect_reports() as reports:
        for backend in ("fusion", "inductor"):
            run = torch.compile(model, backend=backend, dynamic=False)
            run(images)
            entries.append(Entry(name=backend, call=lambda run=run: run(images)))
    return f"{sum(r.fused for r in reports)} of {sum(len(r.sites) for r in reports)}", entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(SHAPES)), help="numbers of shapes")
    parser.add_argument("--train", action="store_true", help="a training step")
    parser.add_argument("--models", nargs="+", help="names in timm")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {chosen.dtype}\n")
    if chosen.models:
        print("| model | fused | fusion, ms | inductor | Inductor / fusion |\n|---|---:|---:|---:|---:|")
        for name in chosen.models:
            fused, entries = whole(name)
            with torch.no_grad():
                interleave(entries, seconds=chosen.seconds)
            ours, theirs = (1e3 * (entry.median or 0.0) for entry in entries)
            print(f"| {name} | {fused} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |", flush=True)
        return
    print("| B, H, N, d | fusion, ms | unmixed | inductor | Inductor / fusion |\n|---|---:|---:|---:|---:|")
    for number in chosen.cases:
        b, h, n, d = SHAPES[number]
        shapes = [(b, h, n, d)] * 3 + [(h, h), (h,)] * 2
        tensors = [torch.randn(s, dtype=getattr(torch, chosen.dtype)).requires_grad_(chosen.train) for s in shapes]
        with torch.set_grad_enabled(chosen.train):
            entries = contestants(tensors, chosen.train)
            interleave(entries, seconds=chosen.seconds)
        ms = {entry.name: 1e3 * (entry.median or 0.0) for entry in entries}
        times = " | ".join(f"{ms[name]:.2f}" for name in ("fusion", "unmixed", "inductor"))
        print(f"| {b}, {h}, {n}, {d} | {times} | {ms['inductor'] / ms['fusion']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
