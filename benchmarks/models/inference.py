"""Whole models on a CPU, fusion beside Inductor in one process; random weights.

    python -m benchmarks.models.inference padded [--dtype bfloat16] [--cases bert gpt2]

padded: well-known models with batches and padding as their packages ship them, mostly with fewer layers. last_row:
classifiers and prompts, of whose last layer one row is read ("all rows": fusion computes them). generation: 48 tokens
of the decoder of examples/generate.py ("no attention": queries in place of an attention's output, a limit of what
kernels can gain). Models in the sizes people run, and small ones: `benchmarks.models.runtimes`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fusion.backend
from benchmarks.common.compare import Case, Function, contestants, main

Inputs = dict[str, Tensor]


def tokens(batch: int, N: int) -> Inputs:
    """Token ids; of more than one sequence also the mask, since they are padded, from N / 3 to N."""
    live = torch.arange(N) < torch.linspace(N // 3, N, batch).long()[:, None]
    mask = {"attention_mask": live.long()} if batch > 1 else {}
    return {"input_ids": torch.randint(3, 1000, (batch, N)), **mask}


def image(batch: int, side: int = 224) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def decoder_tokens(batch: int, N: int = 64) -> Inputs:
    """Inputs of a decoder beside an encoder."""
    return {"decoder_input_ids": torch.randint(3, 1000, (batch, N))}


def latents(name: str, **condition: Any) -> Inputs:
    """Inputs of a denoiser."""
    return {name: torch.randn(2, 4, 32, 32), "timestep": torch.tensor([9, 9]), **condition}


WORDS: dict[str, Any] = {"vocab_size": 1000, "decoder_start_token_id": 2, "pad_token_id": 0}
BASE: dict[str, Any] = {"vocab_size": 1000, "num_hidden_layers": 4}
DECODER = BASE | {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
GEMMA = DECODER | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128}
PADDED: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "bert": ("Bert", BASE, lambda: tokens(8, 128)),
    "distilbert": ("DistilBert", {"vocab_size": 1000, "n_layers": 4}, lambda: tokens(8, 128)),
    "roberta": ("Roberta", BASE, lambda: tokens(2, 500)),
    "deberta": ("DebertaV2", BASE | {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "position_buckets": 256,
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, lambda: tokens(4, 128)),
    "t5": ("T5", WORDS, lambda: tokens(4, 128) | decoder_tokens(4)),
    "bart": ("Bart", WORDS | {
        "d_model": 768, "encoder_layers": 3, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_layers": 3, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072},
        lambda: tokens(4, 128) | decoder_tokens(4)),
    "whisper": ("Whisper", WORDS | {"bos_token_id": 1, "eos_token_id": 2},
                lambda: {"input_features": torch.randn(1, 80, 3000)} | decoder_tokens(1)),
    "gpt2": ("GPT2", {"vocab_size": 1000, "n_layer": 4}, lambda: tokens(1, 512)),
    "llama": ("Llama", DECODER, lambda: tokens(1, 512)),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 64}, lambda: tokens(4, 128)),
    "mistral": ("Mistral", DECODER | {"sliding_window": 256}, lambda: tokens(1, 1024)),
    "gemma2": ("Gemma2", GEMMA, lambda: tokens(1, 512)),
    "gemma3": ("Gemma3Text", GEMMA, lambda: tokens(1, 512)),
    "vit": ("ViT", {"num_hidden_layers": 4}, lambda: image(4)),
    "dinov2": ("Dinov2", {"num_hidden_layers": 4, "image_size": 224}, lambda: image(4)),
    "swin": ("Swin", {}, lambda: image(2)),
    "clip": ("CLIP", {"text_config": BASE, "vision_config": {"num_hidden_layers": 4}},
             lambda: tokens(4, 77) | image(4)),
    "sam": ("SamVision", {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 6, "image_size": 512,
                          "global_attn_indexes": [2, 5]}, lambda: image(1, 512)),
    "unet": ("UNet2DCondition", {
        "block_out_channels": (160, 320), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 768},
        lambda: latents("sample", encoder_hidden_states=torch.randn(2, 77, 768))),
    "dit": ("DiTTransformer2D", {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 6},
            lambda: latents("hidden_states", class_labels=torch.tensor([1, 2]))),
}  # fmt: skip


def by_name(model: Callable[..., Any], names: Sequence[str]) -> Function:
    """A call with tensors in place of keywords."""
    return lambda *tensors: dict(model(**dict(zip(names, tensors, strict=True))))


def padded(options: argparse.Namespace) -> Iterator[Case]:
    import diffusers
    import transformers

    dtype = getattr(torch, options.dtype)
    for name in options.cases or PADDED:
        kind, sizes, inputs_of = PADDED[name]
        if (found := getattr(diffusers, kind + "Model", None)) is not None:
            model = found(**sizes)
        else:
            config = getattr(transformers, kind + "Config")(**sizes, use_cache=False)
            model = getattr(transformers, kind + "Model")._from_config(config)
        model, inputs = model.eval().to(dtype), inputs_of()
        yield Case(
            name=name, tensors=[x.to(dtype) if x.is_floating_point() else x for x in inputs.values()],
            functions={peer: by_name(run, [*inputs]) for peer, run in contestants(model).items()},
            plain=by_name(model, [*inputs]), exact=by_name(copy.deepcopy(model).double(), [*inputs]),
        )  # fmt: skip


def all_rows(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend without the pass that skips unread rows."""
    with mock.patch.object(fusion.backend, "skip_unread_rows", lambda graph: []):
        return fusion.backend.fusion(module, inputs)


def _classifier_or_decoder(name: str, batch: int, rows: int) -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """A model, its inputs and further arguments: of a prompt the last row is read, and all keys are kept."""
    import transformers

    encoder: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536,
                               "num_hidden_layers": 6}  # fmt: skip
    if name == "ViT":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**encoder)), image(batch), {}
    ids = {"input_ids": torch.randint(0, 8000, (batch, rows))}
    if name == "BERT":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**encoder)), ids, {}
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
                                      intermediate_size=1536, num_hidden_layers=4, vocab_size=8000)  # fmt: skip
    return transformers.LlamaForCausalLM(config), ids, {"logits_to_keep": 1}


def last_row(options: argparse.Namespace) -> Iterator[Case]:
    for name, batch, n in (("BERT", 8, 64), ("BERT", 4, 256), ("ViT", 4, 197), ("Llama", 1, 128), ("Llama", 1, 2048),
                           ("Llama", 4, 512)):  # fmt: skip
        if n in (options.lengths or [n]) and name in (options.cases or [name]):
            model, inputs, more = _classifier_or_decoder(name, batch, n)
            model = model.to(getattr(torch, options.dtype)).eval()
            runs = contestants(model) | {"all rows": torch.compile(model, backend=all_rows, dynamic=False)}
            functions = {peer: by_name(functools.partial(run, **more), [*inputs]) for peer, run in runs.items()}
            tensors = [x.to(getattr(torch, options.dtype)) if x.is_floating_point() else x for x in inputs.values()]
            yield Case(name=f"{name}, {batch} x {n}", tensors=tensors, functions=functions)


def no_attention(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2).contiguous(), None


def generation(options: argparse.Namespace) -> Iterator[Case]:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("no_attention", no_attention)
    script = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "generate.py")))
    for cache in ("static", "dynamic"):
        for length in options.lengths or [128, 2048]:
            prompt = torch.randint(0, script.CONFIG["vocab_size"], (1, length))
            functions: dict[str, Function] = {}
            for name, backend, attention in (("fusion", "fusion", "sdpa"), ("Inductor", "inductor", "sdpa"),
                                             ("no attention", "inductor", "no_attention")):  # fmt: skip
                settings: dict[str, Any] = script.CONFIG | {"attn_implementation": attention}
                model: Any = LlamaForCausalLM(LlamaConfig(**settings)).eval()
                model.forward = torch.compile(model.forward, backend=backend)
                functions[name] = lambda *_, m=model: script.generate(m, prompt, 48, cache)  # noqa: B023  runs at once
            yield Case(name=f"{cache} cache, prompt of {length}", tensors=[], functions=functions)


STUDIES = {f.__name__: f for f in (padded, last_row, generation)}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, STUDIES))
