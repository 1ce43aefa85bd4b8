"""A layer of attention over jagged nested tensors on a CPU: time in eager mode, of Inductor and of fusion, and with the
same sequences padded.

    python -m benchmarks.cpu.nested [--dtype float32] [--train] [--seconds 8]

Projections are part of the layer (512 wide, 8 heads). All run in turns within one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common.measuring import Entry, interleave
from fusion.machine import machine as find_machine

torch._inductor.config.compile_threads = 1
WIDTH, HEADS = 512, 8
BATCHES = ((64, 16, 128), (16, 64, 1024))
"""Sequences, and the least and largest of their lengths."""


class Layer(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x: nested, or padded to the longest of `lengths`."""
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        live = None if lengths is None else torch.arange(x.shape[1]) < lengths[:, None, None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, live).transpose(1, 2).flatten(-2))


def contestants(lengths: list[int], dtype: torch.dtype, train: bool) -> list[Entry]:
    """What is timed, each run once."""
    torch._dynamo.reset()
    layer = Layer().to(dtype)
    nested = torch.nested.nested_tensor([torch.randn(n, WIDTH, dtype=dtype) for n in lengths], layout=torch.jagged)
    padded, counts = nested.to_padded_tensor(0.0), torch.tensor(lengths)
    entries = []

    def add(name: str, run: Callable[..., Tensor], *inputs: Tensor) -> None:
        def call() -> None:
            out = run(*inputs)
            if train:
                (out.values() if out.is_nested else out).square().sum().backward()

        call()
        entries.append(Entry(name=name, call=call))

    add("eager", layer, nested)
    for backend in ("inductor", "fusion"):
        add(backend, torch.compile(layer, backend=backend), nested)
        add(f"padded, {backend}", torch.compile(layer, backend=backend), padded, counts)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--train", action="store_true", help="a training step")
    parser.add_argument("--seconds", type=float, default=8.0)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {chosen.dtype}\n")
    for number, (sequences, least, most) in enumerate(BATCHES):
        lengths = torch.randint(least, most + 1, (sequences,)).tolist()
        with torch.set_grad_enabled(chosen.train):
            entries = contestants(lengths, getattr(torch, chosen.dtype), chosen.train)
            interleave(entries, seconds=chosen.seconds, rounds=3)
        if not number:
            print(f"| sequences, lengths | {', ms | '.join(entry.name for entry in entries)}, ms |")
            print("|---|" + "---:|" * len(entries))
        times = " | ".join(f"{1e3 * (entry.median or 0.0):.1f}" for entry in entries)
        print(f"| {sequences}, {least} to {most} | {times} |", flush=True)


if __name__ == "__main__":
    main()
