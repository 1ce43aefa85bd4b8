"""Classifiers and prompts, of whose last layer one row is read, on a CPU: time against Inductor, and against fusion
that computes all rows.

    python -m benchmarks.models.unread_rows [--dtype float32] [--seconds 4] [--cases 0 2]

Models of transformers with random weights, without gradients. All run in turns within one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import transformers
from torch import nn
from torch.fx import GraphModule
from transformers.utils.logging import set_verbosity_error

import fusion.backend
from benchmarks.common.measuring import Entry, interleave
from fusion.machine import machine as find_machine

torch._inductor.config.compile_threads = 1
ENCODER: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536,
                           "num_hidden_layers": 6}  # fmt: skip
DECODER: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
                           "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8000}  # fmt: skip
CASES = (("BERT", 8, 64), ("BERT", 4, 256), ("ViT", 4, 197), ("Llama", 1, 128), ("Llama", 1, 2048), ("Llama", 4, 512))
"""Model, batch and rows. The first two classify; of a prompt the last row is read, and all keys are kept."""


def build(name: str, batch: int, rows: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs."""
    if name == "ViT":
        model: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**ENCODER))
        return model, {"pixel_values": torch.randn(batch, 3, 224, 224)}
    ids = {"input_ids": torch.randint(0, 8000, (batch, rows))}
    if name == "BERT":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER)), ids
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), ids | {"logits_to_keep": 1}


def all_rows(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend without the pass that is measured."""
    with mock.patch.object(fusion.backend, "skip_unread_rows", lambda graph: []):
        return fusion.backend.fusion(module, inputs)


def contestants(model: nn.Module, inputs: dict[str, Any]) -> list[Entry]:
    """What is timed, each run once."""
    torch._dynamo.reset()
    entries = []
    for name, backend in (("fusion", "fusion"), ("all rows", all_rows), ("inductor", "inductor")):
        run = torch.compile(model, backend=backend, dynamic=False)
        run(**inputs)
        entries.append(Entry(name=name, call=lambda run=run: run(**inputs)))
    return entries


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), help="numbers of cases")
    chosen = parser.parse_args()
    set_verbosity_error()
    torch.manual_seed(0)
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {chosen.dtype}\n")
    print("| model, batch, rows | fusion, ms | all rows | inductor | all rows / fusion | Inductor / fusion |")
    print("|---|---:|---:|---:|---:|---:|")
    for number in chosen.cases:
        model, inputs = build(*CASES[number])
        dtype = getattr(torch, chosen.dtype)
        inputs = {k: v.to(dtype) if k == "pixel_values" else v for k, v in inputs.items()}
        entries = contestants(model.to(dtype).eval(), inputs)
        interleave(entries, seconds=chosen.seconds)
        ours, whole, theirs = (1e3 * (entry.median or 0.0) for entry in entries)
        label = ", ".join(map(str, CASES[number]))
        print(f"| {label} | {ours:.2f} | {whole:.2f} | {theirs:.2f} | {whole / ours:.2f} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
