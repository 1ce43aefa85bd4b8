"""Real architectures in training mode: loss and the gradient of every parameter as exact as eager's."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.gradients import DRAWS, assert_gradients_as_exact
from tests.models.harness import compiled
from tests.models.zoo import by_name

DEFAULT = "bert gpt2 gemma2 falcon-alibi xlnet".split()
ARCHITECTURES = """mpt vit opt
llama bloom t5 deberta-v2 whisper clip swinv2 bart wav2vec2 beit distilbert electra albert gpt_neo
gpt_neox gptj qwen2 mistral phi cohere olmo stablelm gemma deit dinov2 marian pegasus mbart hubert""".split()

RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")


def without_randomness(model: torch.nn.Module) -> torch.nn.Module:
    """Training mode with every probability of dropping something at zero, wherever a model keeps it."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name in dir(holder) if holder is not module else vars(module):
                if any(part in name for part in RANDOM) and isinstance(getattr(holder, name), float):
                    setattr(holder, name, 0.0)
    return model.requires_grad_(True).train()


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES)])
def test_gradients_of_every_parameter(name: str):
    entry = by_name(name)
    counters.clear()
    model = without_randomness(entry.build())
    # Padding makes rows without a live key, and NaN of the loss.
    kept = (entry.inputs(model, seed=seed) for seed in range(DRAWS))
    draws = [{key: value for key, value in inputs.items() if "attention_mask" not in key} for inputs in kept]
    run, witness = compiled(model, options={"inner": "eager"})
    assert_gradients_as_exact(model, run, draws, name)
    fused = counters["fusion"]["fused"]
    assert fused == max(len(witness.sites), 1), (counters["fusion"], witness.sites)
