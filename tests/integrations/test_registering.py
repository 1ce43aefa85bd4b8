"""What `fusion.integrations` registers with other libraries: as exact as their eager attention, reversible, and clear
about what it cannot do."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import fusion
import fusion.integrations.accelerate
import fusion.integrations.transformers
from fusion.errors import IntegrationError, MissingPackageError, OptionError
from tests.models.zoo import ZOO
from tests.numerics import assert_as_exact_as_eager, assert_same

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    fusion.integrations.transformers.register({"inner": "eager"})
    yield
    fusion.integrations.transformers.unregister()


def llama() -> Any:
    return transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)).eval()


def windows_and_soft_caps() -> Any:
    return transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED, sliding_window=8)).eval()


def sinks() -> Any:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    model = transformers.GptOssModel(transformers.GptOssConfig(**GROUPED, **experts)).eval()
    model.set_experts_implementation("eager")  # the other has no float64
    return model


def both_ways() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def position_biases() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes)).eval()


def run(model: Any, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Hidden states [2, 20, 32] and the gradient of the table of words."""
    tokens = torch.arange(40).reshape(2, 20)
    hidden = model(tokens, attention_mask=mask).last_hidden_state
    table = model.get_input_embeddings().weight
    return [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), [table])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("build", [llama, windows_and_soft_caps, sinks, both_ways, position_biases])
def test_hidden_states_and_gradients_are_those_of_eager_attention(build, padded: bool) -> None:
    """Padding on the left, so that rows without a live key are among them."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    model, given = build(), mask if padded else None
    model.set_attn_implementation("eager")
    eager, exact = run(model, given), run(copy.deepcopy(model).double(), given)
    model.set_attn_implementation("fusion")
    with fusion.collect_reports() as reports:
        found = run(model, given)
    assert_as_exact_as_eager(found, eager, exact)
    sites = [site for report in reports for site in report.sites]
    assert sites and all(site.fused for site in sites)


def test_one_compilation_serves_all_layers_and_a_causal_mask_is_not_read() -> None:
    with fusion.collect_reports() as reports, torch.no_grad():
        model = llama()
        model.set_attn_implementation("fusion")
        model(torch.arange(20)[None])
    (report,) = [report for report in reports if report.sites]
    assert report.fused == 1 and "j ≤ i" in str(report) and "mask[" not in str(report)


@pytest.mark.parametrize("name", ["afmoe", "bigbird_pegasus", "grounding-dino"])
def test_models_that_make_masks_of_their_own(name: str) -> None:
    """Or hand them over by name; what they do with eager's masks they do with ours."""
    (entry,) = [entry for entry in ZOO if entry.name == name]
    model = entry.build()
    given = entry.inputs(model)
    with torch.no_grad():
        eager, exact = model(**given), entry.reference(model, given)
        model.set_attn_implementation("fusion")
        with fusion.collect_reports() as reports:
            found = model(**given)
    assert_as_exact_as_eager(found, eager, exact)
    assert any(report.fused for report in reports)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_causal_mask_that_a_model_writes_into_is_read(mode) -> None:
    def opened(module, args, kwargs):
        kwargs["attention_mask"][..., :4] = 0  # the first keys are seen by all
        return args, kwargs

    model = llama()
    for layer in model.layers:
        layer.register_forward_pre_hook(opened, with_kwargs=True)
    found, tokens = [], torch.arange(20)[None]
    for way in ("eager", "fusion"):
        model.set_attn_implementation(way)
        with mode():
            found.append(model(tokens).last_hidden_state)
    with mode():
        model.set_attn_implementation("eager")
        exact = copy.deepcopy(model).double()(tokens).last_hidden_state
    assert_as_exact_as_eager(found[1], found[0], exact)


def test_generation_has_the_tokens_of_eager_attention() -> None:
    config = transformers.LlamaConfig(**GROUPED, bos_token_id=0, eos_token_id=None)
    model, prompt = transformers.LlamaForCausalLM(config).eval(), torch.arange(1, 13).reshape(2, 6)
    model.set_attn_implementation("eager")
    expected = model.generate(prompt, max_new_tokens=5)
    model.set_attn_implementation("fusion")
    with fusion.collect_reports() as reports:
        assert torch.equal(model.generate(prompt, max_new_tokens=5), expected)
    assert any(report.fused for report in reports)


def test_weights_are_there_where_they_are_asked_for() -> None:
    model = both_ways()
    tokens = torch.arange(20)[None]
    attention = model.encoder.layer[0].attention.self
    hidden = model.embeddings(tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = attention(hidden)
        model.set_attn_implementation("fusion")
        assert_same(attention(hidden, output_attentions=True), expected)
        assert attention(hidden)[1] is None


def test_a_model_that_is_compiled_as_a_whole_takes_it_along() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    eager, exact = run(model, None), run(copy.deepcopy(model).double(), None)
    model.set_attn_implementation("fusion")
    with fusion.collect_reports() as reports:
        model.compile(backend="fusion", fullgraph=True, options={"inner": "aot_eager", "strict": True})
        found = run(model, None)
    assert_as_exact_as_eager(found, eager, exact)
    assert [report.fused for report in reports] == [2]


def test_it_is_unregistered() -> None:
    fusion.integrations.transformers.unregister()
    fusion.integrations.transformers.unregister()
    assert "fusion" not in transformers.AttentionInterface() and "fusion" not in transformers.AttentionMaskInterface()
    with pytest.raises(ValueError, match="fusion"):
        llama().set_attn_implementation("fusion")


def test_a_paged_cache_is_refused() -> None:
    model = llama()
    model.set_attn_implementation("fusion")
    attend = transformers.AttentionInterface()["fusion"]
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(IntegrationError, match=r"paged cache.*attn_implementation='sdpa'"):
        attend(model.layers[0].self_attn, q, q, q, None, cache=object())


def test_a_module_without_eager_attention_is_refused() -> None:
    attend = transformers.AttentionInterface()["fusion"]
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(IntegrationError, match=r"Linear, whose forward names no functions.*backend='fusion'"):
        attend(torch.nn.Linear(2, 2), q, q, q, None)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match="strct"):
        fusion.integrations.transformers.register({"strct": True})


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_package_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=f"needs {name}"):
        getattr(fusion.integrations, name).register()


def test_accelerate_takes_the_name_until_it_is_unregistered() -> None:
    utils = pytest.importorskip("accelerate.utils")
    with pytest.raises(ValueError, match="FUSION"):
        utils.TorchDynamoPlugin(backend="fusion")
    for _ in range(2):
        fusion.integrations.accelerate.register()
    plugin = utils.TorchDynamoPlugin(backend="fusion")
    assert plugin.to_dict()["backend"] == "fusion" and copy.deepcopy(plugin).backend is plugin.backend
    assert plugin.backend is not utils.DynamoBackend.NO and "FUSION" in utils.DynamoBackend
    with pytest.raises(ValueError, match="FUSIN"):
        utils.TorchDynamoPlugin(backend="fusin")
    for _ in range(2):
        fusion.integrations.accelerate.unregister()
    with pytest.raises(ValueError, match="FUSION"):
        utils.TorchDynamoPlugin(backend="fusion")
