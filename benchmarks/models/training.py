"""Whole training steps of models as they are: forward, backward and AdamW, fusion beside Inductor, on a CPU.

    python -m benchmarks.models.training [--cases vit bert] [--lengths 512] [--busy]

The models are transformers', of three layers with random weights; dropout, which each run draws anew, is off. All start
from the same weights and see the same input. "MKL": fusion with all products of linear layers left to MKL.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.compare import Case, compiled, main
from benchmarks.common.model_zoo import MODELS, VOCABULARY

TEXTS = ((1, 128), (1, 512), (8, 128), (8, 512))
SHAPES = {"vit": ((1, 197), (4, 197), (8, 197)), "bert": TEXTS, "gpt2": TEXTS, "t5": TEXTS}
"""By model: batches and lengths."""
LAYERS = 3
NO_DROPOUT = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "t5": ("dropout_rate",),
}


def trainer(model: nn.Module, backend: str, **options: Any) -> Callable[[Tensor], Tensor]:
    """A training step, which returns its loss; the model is copied."""
    model = copy.deepcopy(model)
    run, optimizer = compiled(model, backend, **options), torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.cases or ("vit", "bert", "gpt2"):
        sizes = {MODELS[name].layers: LAYERS} | dict.fromkeys(NO_DROPOUT.get(name, ()), 0.0)
        for batch, n in SHAPES[name]:
            if n in (options.lengths or [n]):
                x = torch.randint(0, VOCABULARY, (batch, n))
                if name == "vit":
                    x = torch.randn(batch, *MODELS[name].inputs(n).shape[1:])
                model = MODELS[name].make("sdpa", **sizes).train()
                functions = {"fusion": trainer(model, "fusion"), "Inductor": trainer(model, "inductor"),
                             "MKL": trainer(model, "fusion", linear="never")}  # fmt: skip
                yield Case(name=f"{name}, {batch} x {n}", tensors=[x], functions=functions)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {"training": training}, train=True))
