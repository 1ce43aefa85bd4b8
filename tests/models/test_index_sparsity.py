"""Models of transformers whose indexer leaves a set of keys to each query."""

import pytest
import torch

import fusion
from tests.numerics import assert_runs_as_exact_as_eager

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "head_dim": 16, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 32, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch):
    monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_: None)
    torch._dynamo.reset()


def made(name: str, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, attn_implementation=implementation)
    return getattr(transformers, f"{name}Model")(config).eval()


def last_state(model: torch.nn.Module):
    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, keep):
            return self.model(input_ids=ids, attention_mask=keep, use_cache=False).last_hidden_state

    return Last()


@pytest.mark.parametrize(("name", "inner"), [("DeepseekV32", "inductor"), ("GlmMoeDsa", "eager")])
def test_the_chosen_keys_are_read(name, inner):
    model = last_state(made(name, "sdpa"))
    ids = torch.randint(1, 64, (2, 24))
    keep = torch.ones_like(ids)
    keep[1, :5] = 0
    with torch.no_grad():
        report = fusion.explain(model, ids, keep)
        told = [found.keys for site in report.sites for found in site.attentions if found.keys]
        assert [text.rpartition(" ")[0] for text in told] == ["8 of 24 for each query, read through"], str(report)
        compiled = torch.compile(model, backend="fusion", options={"inner": inner})
        assert_runs_as_exact_as_eager(compiled, model, ids, keep)


def test_a_finite_fill_keeps_the_mask():
    model = last_state(made("DeepseekV32", "eager"))
    ids = torch.randint(1, 64, (2, 24))
    with torch.no_grad():
        report = fusion.explain(model, ids, torch.ones_like(ids))
        assert any("are filled with -3.4" in found.keys for site in report.sites for found in site.attentions)
        compiled = torch.compile(model, backend="fusion", options={"inner": "eager"})
        assert_runs_as_exact_as_eager(compiled, model, ids, torch.ones_like(ids))
