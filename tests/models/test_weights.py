"""`transformers` models that return their attention weights: every site is fused, and the weights are eager's."""

import copy

import pytest
import torch
import transformers

import fusion
from fusion.runtime.guards import failures_raised
from tests.models.build import build
from tests.numerics import assert_as_exact_as_eager

MODELS = {
    "bert": transformers.BertModel,
    "gpt2": transformers.GPT2Model,
    "llama": transformers.LlamaModel,
    "t5": transformers.T5EncoderModel,
    "vit": transformers.ViTModel,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("bert", "gpt2") else pytest.mark.long) for n in MODELS]
)
def test_weights_that_are_returned(name: str):
    model = build(MODELS[name])
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        size = model.config.image_size
        inputs = {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(5, 60, (2, 40), generator=generator)}
        inputs["attention_mask"] = torch.ones(2, 40, dtype=torch.long)
        inputs["attention_mask"][1, :7] = 0

    def results(model: torch.nn.Module, **inputs: torch.Tensor):
        out = model(**inputs, output_attentions=True)
        return out.last_hidden_state, out.attentions

    compiled = torch.compile(results, backend="fusion", options={"inner": "eager"})
    with torch.no_grad(), fusion.collect_reports() as reports, failures_raised():
        actual, eager = compiled(model, **inputs), results(model, **inputs)
        wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        exact = results(copy.deepcopy(model).double(), **wide)
    sites = [site for report in reports for site in report.sites]
    assert len(sites) == len(eager[1]) and all(site.fused for site in sites), [site.reason for site in sites]
    assert all(len(site.spec.aux_outputs) == 1 for site in sites)
    assert_as_exact_as_eager(actual, eager, exact, torch.float32, check_strides=True)
