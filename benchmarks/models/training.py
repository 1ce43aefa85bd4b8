"""Whole training steps of models as they are: forward, backward and AdamW in float32, fusion against Inductor.

    python -m benchmarks.models.training [--models vit bert] [--layers 6] [--attention sdpa eager] [--busy]
    python -m benchmarks.models.training --models bert --shapes 1x512 --profile

The models are transformers', made from configurations with random weights; dropout, which each run draws anew, is off.
The contestants start from the same weights, see the same input, and run in turns within one process; medians are
printed, and how far losses are apart. --attention: how transformers writes attention, sdpa by default. --profile: the
operators that take most of a step of each contestant, instead of times. --busy: one thread, and the processor time that
it takes, which barely depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # whole models alternate between Inductor's OpenMP and torch's

import torch
import torch._inductor.config
from torch import nn

import fusion
from benchmarks.common.model_zoo import MODELS, VOCABULARY

torch._inductor.config.compile_threads = 1  # workers that start up would disturb the first steps

SHAPES = {"vit": ("4x197",), "bert": ("1x512", "8x128"), "gpt2": ("1x512",), "t5": ("1x512",)}
"""By model: batches as `B x N`."""
NO_DROPOUT = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "t5": ("dropout_rate",),
}
LAYERS = {"gpt2": "n_layer", "t5": "num_layers"}
CONTESTANTS = {"fusion": {}, "fusion, MKL": {"linear": "never"}, "inductor": {}}
"""With their options: fusion is also run with all products of linear layers left to MKL."""


class Run:
    """The training of one model through one backend. losses: of every step; times: its seconds."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, model: nn.Module, name: str) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.model = torch.compile(model, backend=name.partition(",")[0], options=CONTESTANTS[name])
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        begun = self.clock()
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.times.append(self.clock() - begun)
        self.losses.append(loss.item())


def batch_of(name: str, shape: str) -> torch.Tensor:
    """Token ids `[B, N]`, or pixels of images with N patches."""
    batch, length = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return torch.randn(batch, *MODELS[name].inputs(length).shape[1:], generator=generator)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def runs_of(name: str, attention: str, layers: int) -> dict[str, Run]:
    """The contestants, with equal weights."""
    torch._dynamo.reset()
    sizes = {LAYERS.get(name, "num_hidden_layers"): layers} | dict.fromkeys(NO_DROPOUT.get(name, ()), 0.0)
    model = MODELS[name].make(attention, **sizes).train()
    return {name: Run(copy.deepcopy(model), name) for name in CONTESTANTS}


def measure(runs: dict[str, Run], batch: torch.Tensor, seconds: float) -> None:
    """Steps of all contestants in turns; those that compile are not counted."""
    for run in runs.values():
        for _ in range(3):
            run.step(batch)
        run.times.clear()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(runs["fusion"].times) < 3:
        for name in random.sample(list(runs), len(runs)):
            runs[name].step(batch)


def profile(run: Run, batch: torch.Tensor, steps: int = 5) -> str:
    """A table of the operators that take most of a step."""
    for _ in range(3):
        run.step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            run.step(batch)
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60)


def summary(runs: dict[str, Run]) -> str:
    """Median times, beside ours, and how far losses are apart."""
    median = {backend: statistics.median(run.times) for backend, run in runs.items()}
    cells = [f"{backend} {1e3 * t:7.1f} ms ({t / median['fusion']:4.2f}x)" for backend, t in median.items()]
    apart = max(max(losses) - min(losses) for losses in zip(*(run.losses for run in runs.values()), strict=True))
    return f"{'  '.join(cells)}  {len(runs['fusion'].times)} steps each, losses +-{apart:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "bert"], choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="batches as BxN; by default those of each model")
    parser.add_argument("--attention", nargs="+", default=["sdpa"], choices=["sdpa", "eager"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0, help="per model and shape")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--busy", action="store_true", help="processor time of one thread")
    arguments = parser.parse_args()
    if arguments.busy:
        torch.set_num_threads(1)
        Run.clock = staticmethod(time.process_time)
    print(f"{torch.get_num_threads()} threads, {arguments.layers} layers, float32; times of a training step")
    for name in arguments.models:
        for shape in arguments.shapes or SHAPES[name]:
            for attention in arguments.attention:
                runs, batch = runs_of(name, attention, arguments.layers), batch_of(name, shape)
                if arguments.profile:
                    for backend, run in runs.items():
                        print(name, shape, attention, backend, profile(run, batch), sep="\n", flush=True)
                    continue
                measure(runs, batch, arguments.seconds)
                print(f"{name:5}{shape:8}{attention:6} {summary(runs)}", flush=True)


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
