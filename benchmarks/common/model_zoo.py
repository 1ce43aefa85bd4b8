"""Whole models with random weights, in the sizes people run: what the rest of a model leaves of a kernel's gain."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model under test.

    make: (attention, **smaller) -> the model, with transformers' attn_implementation; `smaller` replaces sizes of its
        configuration.
    inputs: N -> the one tensor it takes: token ids `[1, N]`, or pixels.
    lengths: N.
    layers: the name of its number of layers.
    """

    title: str
    make: Callable[..., nn.Module]
    inputs: Callable[[int], Tensor]
    lengths: tuple[int, ...]
    layers: str = "num_hidden_layers"


class OneResult(nn.Module):
    """One result of a model called with one tensor, and a mask of real tokens where a batch is padded."""

    def __init__(self, model: nn.Module, argument: str, result: str) -> None:
        super().__init__()
        self.model, self.argument, self.result = model, argument, result
        self.options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        padding = {} if mask is None else {"attention_mask": mask}
        return getattr(self.model(**{self.argument: x}, **padding, **self.options), self.result)


class Transcriber(nn.Module):
    """A Whisper-like model on the spectrum of a sound `[1, 80, 2 N]`, of which 32 tokens are known."""

    def __init__(self, attention: str, N: int = 256) -> None:
        from transformers import WhisperConfig, WhisperModel

        super().__init__()
        implementation: dict[str, Any] = {"attn_implementation": attention}
        config = WhisperConfig(
            vocab_size=VOCABULARY, max_source_positions=N, max_target_positions=64, num_mel_bins=80, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, d_model=256, encoder_layers=4, decoder_layers=4,
            encoder_ffn_dim=1024, decoder_ffn_dim=1024, encoder_attention_heads=4, decoder_attention_heads=4,
            **implementation,
        )  # fmt: skip
        self.model = WhisperModel(config)
        self.register_buffer("known", _tokens(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_features=x, decoder_input_ids=self.known, use_cache=False).last_hidden_state


class Denoiser(nn.Module):
    """A U-Net of diffusers on an image of latents `[1, 4, side, side]`, with a text of 77 tokens."""

    text: Tensor

    def __init__(self, attention: str) -> None:
        from diffusers import UNet2DConditionModel
        from diffusers.models.attention_processor import AttnProcessor

        super().__init__()
        self.model = UNet2DConditionModel(
            sample_size=16, block_out_channels=(64, 128, 128), cross_attention_dim=128, attention_head_dim=8,
            norm_num_groups=16, down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        if attention == "eager":
            self.model.set_attn_processor(AttnProcessor())
        self.register_buffer("text", torch.randn(1, 77, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, 500, self.text.expand(len(x), -1, -1)).sample


def _seeded(kind: Callable[[str], nn.Module]) -> Callable[..., nn.Module]:
    def make(attention: str) -> nn.Module:
        torch.manual_seed(0)
        return kind(attention).eval()

    return make


def _build(
    kind: str, config: str, argument: str = "input_ids", result: str = "last_hidden_state", **sizes: Any
) -> Callable[..., nn.Module]:
    def make(attention: str, **smaller: Any) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        given = {"vocab_size": VOCABULARY} | sizes | smaller
        settings = getattr(transformers, config)(**given, attn_implementation=attention)
        return OneResult(getattr(transformers, kind)(settings), argument, result).eval()

    return make


def _tokens(N: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, N), generator=torch.Generator().manual_seed(0))


def _drawn(shape: Callable[[int], tuple[int, ...]]) -> Callable[[int], Tensor]:
    """Normal inputs of the shape for a length."""
    return lambda N: torch.randn(shape(N), generator=torch.Generator().manual_seed(0))


def _image(N: int) -> tuple[int, ...]:
    return 1, 3, *[16 * round((N - 1) ** 0.5)] * 2


_DECODER: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
                            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
                            "max_position_embeddings": 4096}  # fmt: skip
_NARROW: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
                           "intermediate_size": 1024}  # fmt: skip

MODELS: dict[str, Model] = {
    "bert": Model(title="BERT-base", inputs=_tokens, lengths=(128, 512, 2048),
                  make=_build("BertModel", "BertConfig", max_position_embeddings=2048)),
    "gpt2": Model(title="GPT-2", inputs=_tokens, lengths=(128, 512, 1024, 2048), layers="n_layer",
                  make=_build("GPT2Model", "GPT2Config", n_positions=2048)),
    "t5": Model(title="T5-base encoder", inputs=_tokens, lengths=(128, 512, 2048), layers="num_layers",
                make=_build("T5EncoderModel", "T5Config", d_model=768, d_kv=64, d_ff=3072, num_layers=12,
                            num_heads=12)),
    "gemma2": Model(title="Gemma-2-like decoder (8 layers)", inputs=_tokens, lengths=(128, 512, 2048),
                    make=_build("Gemma2Model", "Gemma2Config", sliding_window=512, query_pre_attn_scalar=128,
                                **_DECODER)),
    "llama": Model(title="Llama-like decoder (8 layers)", inputs=_tokens, lengths=(128, 512, 2048),
                   make=_build("LlamaModel", "LlamaConfig", **_DECODER)),
    "vit": Model(title="ViT-B/16", inputs=_drawn(_image), lengths=(197,),
                 make=_build("ViTModel", "ViTConfig", "pixel_values", image_size=224)),
    "unet": Model(title="U-Net (64 to 128 channels, 8 heads, text of 77)", lengths=(256, 64),
                  inputs=_drawn(lambda N: (1, 4, *[round(N**0.5)] * 2)), make=_seeded(Denoiser)),
}  # fmt: skip

SMALL: dict[str, Model] = {
    "small-vit": Model(title="ViT (192 wide, 3 heads, 12 layers)", inputs=_drawn(_image), lengths=(65,),
                       make=_build("ViTModel", "ViTConfig", "pixel_values", image_size=128, hidden_size=192,
                                   num_attention_heads=3, intermediate_size=768)),
    "small-gpt2": Model(title="GPT-2 (256 wide, 4 heads, 4 layers)", inputs=_tokens, lengths=(16, 64, 256),
                        make=_build("GPT2Model", "GPT2Config", n_embd=256, n_head=4, n_layer=4), layers="n_layer"),
    "small-bert": Model(title="BERT (256 wide, 4 heads, 4 layers)", inputs=_tokens, lengths=(16, 64, 256),
                        make=_build("BertModel", "BertConfig", **_NARROW)),
    "small-llama": Model(title="Llama-like (256 wide, 4/2 heads, 4 layers)", inputs=_tokens, lengths=(16, 64, 256),
                         make=_build("LlamaModel", "LlamaConfig", num_key_value_heads=2, max_position_embeddings=512,
                                     **_NARROW)),
    "small-whisper": Model(title="Whisper (256 wide, 4 heads, 4 + 4 layers, 32 tokens)", lengths=(256,),
                           inputs=_drawn(lambda N: (1, 80, 2 * N)), make=_seeded(Transcriber)),
}  # fmt: skip
"""Models whose attentions are short."""

TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                        "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
"""Sizes of decoders for a rehearsal."""

_OF_BYTES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 16384, "vocab_size": 256, "result": "logits",
}  # fmt: skip
TRAINED: dict[str, Callable[..., nn.Module]] = {
    "llama": _build("LlamaForCausalLM", "LlamaConfig", **_OF_BYTES),
    "gemma2": _build("Gemma2ForCausalLM", "Gemma2Config", sliding_window=128, query_pre_attn_scalar=64, **_OF_BYTES),
}
"""Causal language models of bytes, 4 layers of 8 heads of 64, which return scores of the next byte, `[B, N, 256]`."""


@functools.cache
def _text() -> Tensor:
    """About a megabyte of Python's own library, as bytes."""
    folder = Path(inspect.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-f]*.py")))[:1_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def text_tokens(step: int, batch: int, N: int) -> Tensor:
    """`[batch, N + 1]` bytes of text, the same for the same step."""
    text, generator = _text(), torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - N - 1, (batch,), generator=generator).tolist()
    return torch.stack([text[start : start + N + 1] for start in starts])
