"""Well-known models with batches and padding, as their packages ship them: fusion beside Inductor, in turns.

    python -m benchmarks.models.well_known                         all; with compilation half an hour
    python -m benchmarks.models.well_known bert swin --dtype bf16

Weights are random; sizes are those of small published versions, mostly with fewer layers. A line has fusion's median,
by how much Inductor takes longer (medians, least times), and errors against float64 over what is allowed.
"""

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common.measuring import Entry, allowed_error, interleave, prepare

WORDS: dict[str, Any] = {"vocab_size": 1000, "decoder_start_token_id": 2, "pad_token_id": 0}
BASE: dict[str, Any] = {"vocab_size": 1000, "num_hidden_layers": 4}
DECODER = BASE | {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
GEMMA = DECODER | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128}
Inputs = dict[str, Any]


def tokens(batch: int, N: int) -> Inputs:
    """Token ids; of more than one sequence also the mask, since they are padded, from N / 3 to N."""
    live = torch.arange(N) < torch.linspace(N // 3, N, batch).long()[:, None]
    mask = {"attention_mask": live.long()} if batch > 1 else {}
    return {"input_ids": torch.randint(3, 1000, (batch, N)), **mask}


def image(batch: int, side: int = 224) -> Inputs:
    """Pictures."""
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def answers(batch: int, N: int = 64) -> Inputs:
    """What a decoder beside an encoder is given."""
    return {"decoder_input_ids": torch.randint(3, 1000, (batch, N))}


def latents(name: str, **condition: Any) -> Inputs:
    """What a denoiser is given."""
    return {name: torch.randn(2, 4, 32, 32), "timestep": torch.tensor([9, 9]), **condition}


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "bert": ("Bert", BASE, lambda: tokens(8, 128)),
    "distilbert": ("DistilBert", {"vocab_size": 1000, "n_layers": 4}, lambda: tokens(8, 128)),
    "roberta": ("Roberta", BASE, lambda: tokens(2, 500)),
    "deberta": ("DebertaV2", BASE | {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "position_buckets": 256,
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, lambda: tokens(4, 128)),
    "t5": ("T5", WORDS, lambda: tokens(4, 128) | answers(4)),
    "bart": ("Bart", WORDS | {
        "d_model": 768, "encoder_layers": 3, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_layers": 3, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072},
        lambda: tokens(4, 128) | answers(4)),
    "whisper": ("Whisper", WORDS | {"bos_token_id": 1, "eos_token_id": 2},
                lambda: {"input_features": torch.randn(1, 80, 3000)} | answers(1)),
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


def build(name: str) -> tuple[torch.nn.Module, Inputs]:
    """A model of the table, and its inputs."""
    torch.manual_seed(0)
    kind, sizes, inputs = MODELS[name]
    if (found := getattr(diffusers, kind + "Model", None)) is not None:
        return found(**sizes).eval(), inputs()
    config = getattr(transformers, kind + "Config")(**sizes, use_cache=False)
    return getattr(transformers, kind + "Model")._from_config(config).eval(), inputs()


def run(model: Callable[..., Any], inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The first floating-point tensor of the result, with floats among the inputs in `dtype`."""
    given = tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    return next(x for x in tree_leaves(dict(model(**given))) if isinstance(x, Tensor) and x.is_floating_point())


@torch.no_grad()
def measure(name: str, dtype: torch.dtype, seconds: float) -> str:
    """One line."""
    torch._dynamo.reset()
    model, inputs = build(name)
    model.to(dtype)
    exact = run(copy.deepcopy(model).double(), inputs, torch.float64)
    allowed = allowed_error(run(model, inputs, dtype), exact)
    entries = [Entry(name=peer) for peer in ("fusion", "inductor")]
    for entry in entries:
        call = functools.partial(run, torch.compile(model, backend=entry.name), inputs, dtype)
        prepare(entry, lambda call=call: call, exact, allowed)
    interleave(entries, seconds=seconds, rounds=7)
    ours, peer = entries
    if ours.median is None or peer.median is None:
        return f"{ours.note} {peer.note}"
    ratios = f"{peer.median / ours.median:.2f}x  {min(peer.times) / min(ours.times):.2f}x"
    errors = "  ".join(f"{entry.error / allowed:.2f}" for entry in entries if entry.error is not None)
    return f"{ours.median * 1e3:8.2f} ms  {ratios}  errors {errors}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS], help=" ".join(MODELS))
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=5, help="of timing per model")
    options = parser.parse_args()
    for dtype in options.dtype:
        for name in options.models:
            kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            print(f"{name:12}{dtype}  {measure(name, kind, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
