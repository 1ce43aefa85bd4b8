"""Real architectures in training mode: loss and the gradient of every parameter as exact as eager's."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.build import cast, float64_everywhere
from tests.models.harness import compiled
from tests.models.zoo import by_name
from tests.numerics import assert_as_exact_as_eager, leaves

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


DRAWS = 3
"""Inputs per model: of a single one, eager's largest error is a draw that may be small by luck."""


def losses_and_gradients(model: torch.nn.Module, run: Any, draws: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The loss and the gradients of every draw of inputs, stacked. A loss is the distance of all outputs from random
    ones, so that every part of the model is in it."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for inputs in draws:
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for _, value in leaves(run(**inputs)):
            if value.is_floating_point() and value.requires_grad:
                target = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                total = total + (value.double() - target).square().mean()
        total.backward()
        assert any(p.grad is not None for p in model.parameters())
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found.append({"loss": total.detach().float()} | own)
    return {name: torch.stack([draw[name] for draw in found]) for name in found[0]}


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES)])
def test_gradients_of_every_parameter(name: str):
    entry = by_name(name)
    counters.clear()
    model = without_randomness(entry.build())
    # Padding makes rows without a live key, and NaN of the loss.
    kept = (entry.inputs(model, seed=seed) for seed in range(DRAWS))
    draws = [{key: value for key, value in inputs.items() if "attention_mask" not in key} for inputs in kept]
    exact = without_randomness(copy.deepcopy(model).double())
    with float64_everywhere():
        reference = losses_and_gradients(exact, exact, [cast(inputs, torch.float64) for inputs in draws])
    eager = losses_and_gradients(model, model, draws)
    run, witness = compiled(model, options={"inner": "eager"})
    actual = losses_and_gradients(model, run, draws)
    fused = counters["fusion"]["fused"]
    assert fused == max(len(witness.sites), 1), (counters["fusion"], witness.sites)
    found = (with_small_ones_joined(given, reference) for given in (actual, eager, reference))
    assert_as_exact_as_eager(*found, torch.float32, name=name)


ZERO = 2.0**-40
FEW = 16
"""Elements of a tensor up to which eager's error is a matter of luck (and often 0)."""


def with_small_ones_joined(found: dict, reference: dict) -> dict:
    """Tensors with few elements, the loss among them, side by side in one, each relative to its largest element.

    A bias of the keys shifts all scores of a row alike: its gradient is zero, and what is computed is rounding alone,
    which has no scale of its own to be measured by. It is there too, relative to the largest gradient of all.
    """
    sizes = {key: float(value.abs().max()) for key, value in reference.items()}
    joined = {key for key, value in reference.items() if value.numel() < FEW or sizes[key] <= ZERO}
    scales = {key: sizes[key] if sizes[key] > ZERO else max(sizes.values()) for key in joined}
    small = torch.cat([(found[key].double() / scales[key]).flatten() for key in sorted(joined)])
    return {key: value for key, value in found.items() if key not in joined} | {"small ones": small}
