"""Train a small GPT on text, three times: eager, compiled by Inductor, compiled by fusion. The model is plain PyTorch.

    python examples/train.py [steps]

The text is the source of Python's own library, one token a character. All three start from the same weights and see
the same batches; losses and times are printed side by side.
"""

import os

# Waiting threads of two OpenMP libraries in one process would otherwise spin on each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import inspect
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fusion

LENGTH, BATCH, WIDTH, HEADS, LAYERS = 512, 2, 128, 4, 2
TOLERANCE = 1e-2
"""Between losses. Rounding differs, and AdamW divides it by small numbers: it grows slowly with the steps."""


class Attention(nn.Module):
    """Causal attention with a learned bias per head and distance, as one might write it down."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distance_bias = nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.distance_bias[:, distance.clamp(min=0)]
        scores = scores.masked_fill(distance < 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for norm, attention, mlp in zip(self.norm, self.attention, self.mlp, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x)


def read_text() -> tuple[torch.Tensor, int]:
    """About half a million characters of Python, as numbers, and how many different ones there are."""
    folder = Path(inspect.__file__).parent
    text = "".join(path.read_text(errors="ignore") for path in sorted(folder.glob("[a-d]*.py")))[:500_000]
    alphabet = sorted(set(text))
    number = {character: position for position, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), len(alphabet)


class Run:
    """One of the trainings: its own copy of the model, its losses, and the seconds of its steps."""

    def __init__(self, backend: str | None, characters: int) -> None:
        torch.manual_seed(0)
        model = GPT(characters)
        self.model = model if backend is None else torch.compile(model, backend=backend)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        """Train on `[BATCH, LENGTH + 1]` characters."""
        begun = time.perf_counter()
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begun)
        self.losses.append(loss.item())

    def milliseconds(self) -> float:
        """The median of the steps after those that compile."""
        return 1e3 * statistics.median(self.seconds[2:])


def main(steps: int) -> int:
    """Train; 1 if a compiled model's loss left eager's."""
    text, characters = read_text()
    print(f"{len(text)} characters of {characters} kinds; {steps} steps of {BATCH} x {LENGTH}")
    runs = {
        "eager": Run(None, characters),
        "inductor": Run("inductor", characters),
        "fusion": Run("fusion", characters),
    }
    print(f"{'step':>6}" + "".join(f"{name:>12}" for name in runs), flush=True)
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        for run in runs.values():  # in turns, so that whatever disturbs the machine disturbs all of them
            run.step(batch)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"{step:>6}" + "".join(f"{run.losses[-1]:>12.5f}" for run in runs.values()), flush=True)
    print(f"{'ms':>6}" + "".join(f"{run.milliseconds():>12.1f}" for run in runs.values()))
    print(f"{'first':>6}" + "".join(f"{run.seconds[0]:>10.1f} s" for run in runs.values()) + "   (compilation)")
    losses = torch.tensor([run.losses for run in runs.values()])
    difference = (losses - losses[0]).abs().max().item()
    print(f"largest difference from eager's loss: {difference:.1e}")
    return 0 if difference < TOLERANCE else 1


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    parser = argparse.ArgumentParser(description="Train a small GPT: eager, Inductor, fusion.")
    parser.add_argument("steps", nargs="?", type=int, default=8, help="training steps, at least 3 (default 8)")
    raise SystemExit(main(max(3, parser.parse_args().steps)))
