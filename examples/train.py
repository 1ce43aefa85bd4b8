"""Train a small GPT on text, three times: eager, compiled by Inductor, compiled by fusion. The model is plain PyTorch.

    python examples/train.py [steps]

The text is the source of Python's own library, one token a character. All three start from the same weights and see
the same batches; the losses agree, the times do not.
"""

import inspect
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fusion

LENGTH, BATCH, WIDTH, HEADS, LAYERS = 512, 2, 128, 4, 2


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


def train(backend: str | None, steps: int, text: torch.Tensor, characters: int) -> tuple[list[float], float]:
    """Losses of all steps, and the median time of one in milliseconds."""
    torch.manual_seed(0)
    model = GPT(characters)
    step_model = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        begun = time.perf_counter()
        loss = F.cross_entropy(step_model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
        losses.append(loss.item())
    return losses, 1e3 * sorted(times[2:])[len(times[2:]) // 2]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    text, characters = read_text()
    print(f"{len(text)} characters of {characters} kinds; {steps} steps of {BATCH} x {LENGTH}")
    runs = {name: train(backend, steps, text, characters) for name, backend in
            (("eager", None), ("inductor", "inductor"), ("fusion", "fusion"))}  # fmt: skip
    print(f"{'step':>5}" + "".join(f"{name:>12}" for name in runs))
    for step in range(0, steps, max(1, steps // 8)):
        print(f"{step:>5}" + "".join(f"{losses[step]:>12.4f}" for losses, _ in runs.values()))
    print(f"{'ms':>5}" + "".join(f"{milliseconds:>12.1f}" for _, milliseconds in runs.values()))
    eager, fused = torch.tensor(runs["eager"][0]), torch.tensor(runs["fusion"][0])
    print(f"largest difference between the losses of eager and fusion: {(eager - fused).abs().max():.1e}")


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
