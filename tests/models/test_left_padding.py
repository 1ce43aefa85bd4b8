"""A batch padded on the left, through decoders of `transformers`: every row is as in eager mode, those without a live
key too."""

import copy

import pytest
import torch
import transformers

import fusion
from tests.models.build import build
from tests.numerics import assert_as_exact_as_eager

LENGTH = 100
MODELS = {
    "gemma2": transformers.Gemma2ForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "gpt_neox": transformers.GPTNeoXForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "opt": transformers.OPTForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
}


DEFAULT = ("gemma2", "gpt2", "llama", "opt")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.long]) for n in MODELS])
def test_left_padding_is_as_in_eager_mode(name: str):
    sizes = {"max_position_embeddings": 128} if name != "gpt2" else {"n_positions": 128}
    model = build(MODELS[name], **sizes)
    ids = torch.randint(5, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :70] = 0  # more than a cell of queries and of keys
    options = {"inner": "eager", "strict": True, "tile_maps": "always"}
    compiled = torch.compile(model, backend="fusion", options=options)
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = compiled(ids, attention_mask=mask, use_cache=False).logits
        eager = model(ids, attention_mask=mask, use_cache=False).logits
        exact = copy.deepcopy(model).double()(ids, attention_mask=mask, use_cache=False).logits
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
    sites = [site for report in reports for site in report.sites]
    assert sites and all(site.spec.mask.tile_live is not None for site in sites)
