"""Models of transformers on a GPU that is not there: all of their attentions run by our kernels, in the forward and in
a training step, as exactly as eager's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests import numerics
from tests.models.gradients import with_small_ones_joined

transformers = pytest.importorskip("transformers")

LAYERS, WORDS = 2, 64
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "vocab_size": WORDS, "max_position_embeddings": 64,
}  # fmt: skip


def llama(attention: str) -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, attn_implementation=attention, **SMALL)
    return transformers.LlamaForCausalLM(config)


def bert(attention: str) -> Any:
    rates = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(attn_implementation=attention, **SMALL, **rates))


def step(run: Any, model: Any, words: torch.Tensor, narrow: bool) -> dict[str, torch.Tensor]:
    """Loss and logits of a training step, and the gradients of all weights."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if narrow else contextlib.nullcontext():
        out = run(input_ids=words, labels=words)
    out.loss.backward()
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": out.loss.detach().float().cpu(), "logits": out.logits.detach().cpu()} | gradients


def check(device: Any, make: Any, attention: str, narrow: bool = False, **options: str) -> None:
    model, exact = make(attention), make(attention).double()
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(model.cuda(), backend="fusion", options=options)

    def draw() -> tuple[dict[str, torch.Tensor], ...]:
        words = torch.randint(0, WORDS, (2, 40))
        there, before = words.cuda(), len(device.launched)
        actual = step(compiled, model, there, narrow)
        launched = device.launched[before:]
        assert launched.count("attention_forward") == launched.count("attention_backward_prepare") == LAYERS
        reference = step(exact, exact, words, False)
        every = actual, step(model, model, there, narrow), reference
        return tuple(with_small_ones_joined(each, reference) for each in every)

    numerics.assert_as_exact_over_draws(draw, torch.bfloat16 if narrow else None)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [llama, bert])
def test_training_steps(device: Any, make: Any, attention: str, narrow: bool) -> None:
    check(device, make, attention, narrow, inner="eager")


def test_inductor(device: Any) -> None:
    """Its kernels are executed, too."""
    check(device, llama, "sdpa")
    assert any("fused" in name for name in device.launched)
