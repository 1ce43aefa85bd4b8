"""Small attentions in a row, as a recurrent decoder calls them: one query over few keys, once for each token, on a CPU.

    python -m benchmarks.cpu.in_a_row [--sizes 1x24x64 16x24x64] [--tokens 40] [--seconds 5]

Sizes are batch x keys x width. In inference; fusion with what it leaves to Inductor by itself, kernels for all
(`inner="inductor"`, nothing left), and Inductor alone run in turns within one process; medians, and their ratios to
Inductor's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch._inductor.config

import fusion

torch._inductor.config.compile_threads = 1  # workers that start up would disturb the first cases

SIZES = ("1x24x64", "1x24x256", "8x24x64", "1x96x64", "32x24x64")
SAMPLE = 5e-3  # s


class Decoder(torch.nn.Module):
    """A recurrent cell that attends to what was encoded, [B, N, width], before each token."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.cell, self.tokens = torch.nn.Linear(2 * width, width), tokens

    def forward(self, state: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        for _ in range(self.tokens):
            weights = torch.softmax(state[:, None] @ encoded.mT * state.shape[-1] ** -0.5, -1)
            state = torch.tanh(self.cell(torch.cat([state, (weights @ encoded)[:, 0]], -1)))
        return state


def measure(batch: int, keys: int, width: int, tokens: int, seconds: float) -> dict[str, float]:
    """Median seconds of a call by contestant."""
    torch._dynamo.reset()
    decoder = Decoder(width, tokens).eval()
    given = torch.randn(batch, width), torch.randn(batch, keys, width)
    runs = {name: torch.compile(decoder, backend=name) for name in ("fusion", "inductor")}
    runs["kernels"] = torch.compile(decoder, backend="fusion", options={"strict": True})
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            run(*given)
        begun = time.perf_counter()
        runs["inductor"](*given)
        calls = max(1, round(SAMPLE / (time.perf_counter() - begun)))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name in random.sample(list(runs), len(runs)):
                begun = time.perf_counter()
                for _ in range(calls):
                    runs[name](*given)
                times[name].append((time.perf_counter() - begun) / calls)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0, help="per size")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {arguments.tokens} attentions in a row, float32")
    for size in arguments.sizes:
        batch, keys, width = map(int, size.split("x"))
        found = measure(batch, keys, width, arguments.tokens, arguments.seconds)
        cells = [f"{name} {1e6 * t:8.1f} us ({t / found['inductor']:4.2f})" for name, t in found.items()]
        print(f"{size:>10}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
