"""Models of transformers and diffusers on a GPU that is not there: all of their attentions run by our kernels, in the
forward and in a training step, as exactly as eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import numerics
from tests.models.gradients import with_small_ones_joined

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

LAYERS, WORDS = 2, 64
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
SMALL = SIZES | {"vocab_size": WORDS, "max_position_embeddings": 64}
Tensors = dict[str, torch.Tensor]


def words() -> Tensors:
    ids = torch.randint(0, WORDS, (2, 40))
    return {"input_ids": ids, "labels": ids}


def pictures() -> Tensors:
    return {"pixel_values": torch.randn(2, 3, 24, 24), "labels": torch.randint(0, 2, (2,))}


def noise() -> Tensors:
    """Inputs of a U-Net: pictures, and texts that describe them."""
    return {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.randn(2, 20, 32),
    }


def llama(attention: str) -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, attn_implementation=attention, **SMALL)
    return transformers.LlamaForCausalLM(config)


def gemma2(attention: str) -> Any:
    """Soft-capped scores, and in every other layer a window."""
    config = transformers.Gemma2Config(
        num_key_value_heads=2, head_dim=16, sliding_window=16, attn_implementation=attention, **SMALL
    )
    return transformers.Gemma2ForCausalLM(config)


def bert(attention: str) -> Any:
    rates = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(attn_implementation=attention, **SMALL, **rates))


def t5(attention: str) -> Any:
    """A table of distances that is trained, and attention to the encoder."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=96, num_layers=LAYERS, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit(attention: str) -> Any:
    config = transformers.ViTConfig(image_size=24, patch_size=4, attn_implementation=attention, **SIZES)
    return transformers.ViTForImageClassification(config)


def unet(attention: str) -> Any:
    """Attention of pictures to themselves and to texts, in four places."""
    from diffusers.models import attention_processor

    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=2,
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    name = "AttnProcessor2_0" if attention == "sdpa" else "AttnProcessor"
    model.set_attn_processor(getattr(attention_processor, name)())
    return model


@dataclass(frozen=True)
class Model:
    """attentions: how many there are."""

    make: Callable[[str], Any]
    inputs: Callable[[], Tensors] = words
    attentions: int = LAYERS


MODELS = {
    "llama": Model(llama), "gemma2": Model(gemma2), "bert": Model(bert), "t5": Model(t5, attentions=3 * LAYERS),
    "vit": Model(vit, pictures), "unet": Model(unet, noise, 8),
}  # fmt: skip


def step(run: Any, model: Any, inputs: Tensors, narrow: bool, trained: bool) -> Tensors:
    """Loss and outputs; of a training step also the gradients of all weights."""
    model.zero_grad()
    with (
        torch.set_grad_enabled(trained),
        torch.autocast("cuda", torch.bfloat16) if narrow else contextlib.nullcontext(),
    ):
        out = run(**inputs)
    result = out.sample if "sample" in inputs else out.logits
    loss = out.loss if "labels" in inputs else result.square().mean()
    results = {"loss": loss.detach().float().cpu(), "outputs": result.detach().cpu()}
    if trained:
        loss.backward()
        results |= {name: w.grad.cpu() for name, w in model.named_parameters() if w.grad is not None}
    return results


def check(
    device: Any, name: str, attention: str, narrow: bool = False, warm: int = 0, trained: bool = True,
    **compiled_with: Any,
) -> None:  # fmt: skip
    """Steps of a compiled model, after `warm` others, beside eager's, and in float64 on the CPU. trained: of training;
    otherwise the forward alone."""
    chosen = MODELS[name]
    model, exact = chosen.make(attention), chosen.make(attention).double()
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(model.cuda(), backend="fusion", **compiled_with)

    def run(inputs: Tensors) -> Tensors:
        """A step of the compiled model, all of whose attentions our kernels compute."""
        before = len(device.launched)
        torch.compiler.cudagraph_mark_step_begin()
        results = step(compiled, model, {name: value.cuda() for name, value in inputs.items()}, narrow, trained)
        launched = device.launched[before:]
        counts = launched.count("attention_forward"), launched.count("attention_backward_prepare")
        assert counts == (chosen.attentions, chosen.attentions * trained)
        return results

    def draw() -> tuple[Tensors, ...]:
        inputs = chosen.inputs()
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        there = {name: value.cuda() for name, value in inputs.items()}
        reference = step(exact, exact, wide, False, trained)
        every = run(inputs), step(model, model, there, narrow, trained), reference
        return tuple(with_small_ones_joined(each, reference) for each in every)

    for _ in range(warm):
        run(chosen.inputs())
    numerics.assert_as_exact_over_draws(draw, torch.bfloat16 if narrow else None)


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_models(device: Any, name: str, attention: str, narrow: bool, trained: bool) -> None:
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("transformers has no SDPA for Gemma 2, whose scores are capped")
    check(device, name, attention, narrow, trained=trained, options={"inner": "eager"})


def test_inductor(device: Any) -> None:
    """Its kernels are executed, too."""
    check(device, "llama", "sdpa")
    assert any("fused" in name for name in device.launched)


def test_captured_and_replayed(device: Any) -> None:
    """Forward and backward of a training step are captured as CUDA graphs, and replayed with other numbers."""
    check(device, "llama", "sdpa", True, warm=2, mode="reduce-overhead")
    assert device.replays >= 2
