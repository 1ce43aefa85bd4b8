"""`generate()` of small decoders: eager's tokens, with a growing and with a static cache, and no kernel per length."""

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

import fusion
from tests.models.build import build

MODELS = {
    "llama": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "gemma2": transformers.Gemma2ForCausalLM,
}
NEW_TOKENS = 12


def _generate(model, cache: str, padded: bool, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        pad_token_id=0,
    )


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "padded", "cache"),
    [
        ("llama", True, "dynamic"),
        ("gpt2", True, "static"),
        ("gemma2", True, "static"),
        pytest.param("llama", False, "dynamic", marks=LONG),
        pytest.param("llama", False, "static", marks=LONG),
        pytest.param("llama", True, "static", marks=LONG),
        pytest.param("gpt2", True, "dynamic", marks=LONG),
        pytest.param("gemma2", True, "dynamic", marks=LONG),
    ],
)
def test_greedy_tokens_are_eagers(name: str, cache: str, padded: bool):
    model = build(MODELS[name])
    eager = _generate(model, cache, padded)
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(model.forward, backend="fusion", options={"inner": "eager"})
    assert torch.equal(_generate(model, cache, padded), eager)
    assert counters["fusion"]["sites"] == counters["fusion"]["fused"] > 0


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=LONG) for name in ("gpt2", "gemma2"))])
def test_a_growing_cache_compiles_no_kernel_per_length(name: str):
    """Once lengths are symbols, longer texts meet no new graph, and so no new kernel."""
    model = build(MODELS[name])
    counters.clear()
    model.forward = torch.compile(model.forward, backend="fusion", options={"inner": "eager"})
    _generate(model, "dynamic", padded=False)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs < NEW_TOKENS
    assert counters["fusion"]["fused"] == 2 * graphs
    _generate(model, "dynamic", padded=False, new_tokens=2 * NEW_TOKENS)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_that_the_caller_keeps(padded: bool):
    """Steps of a loop of one's own, without `generate`."""
    model = build(transformers.LlamaForCausalLM)
    torch._dynamo.reset()
    caches = [transformers.StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    compiled = torch.compile(model, backend="fusion", options={"inner": "eager"})
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0 if padded else 1
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), fusion.collect_reports() as reports:
        for _ in range(4):
            runs = zip((model, compiled), caches, strict=True)
            eager, ours = (
                run(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
                for run, cache in runs
            )
            assert torch.equal(ours, eager)
            ids, mask = eager[:, None], torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    assert all(report.fused == len(report.sites) > 0 for report in reports)
