"""Every block of docs/integrations.md, with small models with random weights: it runs, attentions are fused, and
results are eager's."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = ["attention", "is", "all", "you", "need", "it"]
Check = Callable[[dict[str, Any]], None]


def sections() -> dict[str, list[str]]:
    """Python blocks by the titles of their sections."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)[1:]
    blocks = [re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S) for text in parts[1::2]]
    return {title: found for title, found in zip(parts[::2], blocks, strict=True) if found}


def same_as(run: Callable[[Any], Any], model: torch.nn.Module, found: str) -> Check:
    """Checks the name `found` of a block by the house rule; run: of a model, what eager gives."""
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    def check(space: dict[str, Any]) -> None:
        with torch.no_grad():
            assert_as_exact_as_eager(space[found].detach(), run(plain), run(wide))

    return check


def tokens() -> torch.Tensor:
    return torch.randint(0, 9, (2, 12))


def llama(kind: str = "LlamaModel") -> Any:
    import transformers

    config = transformers.LlamaConfig(**SIZES, vocab_size=9, num_key_value_heads=2, bos_token_id=0, eos_token_id=None)
    return getattr(transformers, kind)(config).eval()


def bert(kind: str) -> Any:
    import transformers

    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, vocab_size=9)).eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["[UNK]", "[PAD]", *WORDS])}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")


def trainer() -> tuple[dict[str, Any], Check]:
    pytest.importorskip("accelerate")
    model = llama("LlamaForCausalLM")
    first = copy.deepcopy(model.state_dict())
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 9, (16, 12))]

    def check(space: dict[str, Any]) -> None:
        assert any(not torch.equal(value, first[name]) for name, value in model.state_dict().items())

    return {"model": model, "texts": texts}, check


def pipelines() -> tuple[dict[str, Any], Check]:
    model, words = bert("BertForSequenceClassification"), tokenizer()

    def check(space: dict[str, Any]) -> None:
        given = words(["attention is all you need", "is it"], padding=True, return_tensors="pt")
        with torch.no_grad():
            eager, wide = (run(**given).logits.softmax(-1).amax(-1) for run in (plain, exact))
        found = torch.tensor([label["score"] for label in space["labels"]])
        assert_as_exact_as_eager(found, eager, wide)

    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    return {"model": model, "tokenizer": words}, check


def generate() -> tuple[dict[str, Any], Check]:
    import transformers

    model, prompt = llama("LlamaForCausalLM"), tokens()
    expected = model.generate(prompt, max_new_tokens=4, disable_compile=True)
    transformers.CompileConfig._compile_all_devices = True  # on CPUs, too

    def check(space: dict[str, Any]) -> None:
        transformers.CompileConfig._compile_all_devices = None
        assert torch.equal(space["tokens"], expected)

    return {"model": model, "prompt": prompt}, check


def implementation() -> tuple[dict[str, Any], Check]:
    model, given, mask = llama(), tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    model.set_attn_implementation("eager")  # rows of padding differ from those of "sdpa"
    check = same_as(lambda run: run(given, attention_mask=mask).last_hidden_state, model, "hidden")
    return {"model": model, "tokens": given, "mask": mask}, check


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        return torch.softmax(q @ x.mT, -1) @ x


def accelerate() -> tuple[dict[str, Any], Check]:
    pytest.importorskip("accelerate")
    model, inputs = Layer(), (torch.randn(2, 20, 16),)
    run = [copy.deepcopy(model), copy.deepcopy(model).double()]

    def check(space: dict[str, Any]) -> None:
        for eager, given in zip(run, (inputs[0], inputs[0].double()), strict=True):
            eager(given).sum().backward()
        found, *expected = ([p.grad for p in m.parameters()] for m in (space["model"], *run))
        assert_as_exact_as_eager(found, *expected)

    return {"model": model, "inputs": inputs, "optimizer": torch.optim.SGD(model.parameters())}, check


def in_lightning() -> tuple[dict[str, Any], Check]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, batches = Module(), [torch.randn(2, 20, 16) for _ in range(2)]
    steps = [copy.deepcopy(module), copy.deepcopy(module).double()]

    def check(space: dict[str, Any]) -> None:
        for run in steps:
            optimizer = run.configure_optimizers()
            for batch in batches:
                optimizer.zero_grad()
                run.training_step(batch.to(run.layer.project.weight.dtype)).backward()
                optimizer.step()
        found, *expected = ([p.detach() for p in m.parameters()] for m in (module, *steps))
        assert_as_exact_as_eager(found, *expected)

    return {"module": module, "batches": torch.utils.data.DataLoader(batches, batch_size=None)}, check


def in_diffusers() -> tuple[dict[str, Any], Check]:
    diffusers = pytest.importorskip("diffusers")
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        norm_num_groups=4, num_embeds_ada_norm=1000,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)
    pipe = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def images(run: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.from_numpy(run(class_labels=[1, 2], num_inference_steps=2, output_type="np").images)

    inside = importlib.import_module("diffusers.pipelines.dit.pipeline_dit")
    draw = inside.randn_tensor

    def same_noise(*shape: Any, dtype: torch.dtype, **keywords: Any) -> torch.Tensor:
        return draw(*shape, dtype=torch.float32, **keywords).to(dtype)

    eager = images(pipe)
    with mock.patch.object(inside, "randn_tensor", same_noise):
        exact = images(copy.deepcopy(pipe).to(torch.float64)).double()
    torch.manual_seed(1)

    def check(space: dict[str, Any]) -> None:
        assert_as_exact_as_eager(torch.from_numpy(space["images"]), eager, exact)

    return {"pipe": pipe}, check


class _Anything(type):
    """Classes whose attributes are instances of them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Torchvision(importlib.machinery.SourceFileLoader):
    """A torchvision of nothing but names: timm's models import it for the preparation of images, and never call it."""

    def __init__(self) -> None:
        super().__init__("torchvision", "")

    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision") else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _Anything(name, (), {})  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def in_timm() -> tuple[dict[str, Any], Check]:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is no part of the extra [test], since it asks for torchvision; `make test` installs it")
    if importlib.util.find_spec("torchvision") is None:  # there is none for this build of torch
        sys.meta_path.insert(0, stand_in := _Torchvision())
        try:
            importlib.import_module("timm")
        finally:
            sys.meta_path.remove(stand_in)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    image = torch.randn(1, 3, 32, 32)

    def check(space: dict[str, Any]) -> None:
        plain = copy.deepcopy(space["model"])
        plain._compiled_call_impl = None
        same_as(lambda run: run(image.to(run.head.weight.dtype)), plain, "scores")(space)

    return {"image": image}, check


def sentences(folder: Path) -> tuple[dict[str, Any], Check]:
    library = pytest.importorskip("sentence_transformers")
    bert("BertModel").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = library.SentenceTransformer(str(folder), device="cpu")
    texts = ["attention is all you need", "is it"]
    plain, wide = (torch.from_numpy(copy.deepcopy(m).encode(texts)) for m in (model, copy.deepcopy(model).double()))

    def check(space: dict[str, Any]) -> None:
        assert_as_exact_as_eager(torch.from_numpy(space["vectors"]), plain, wide.double())

    return {"model": model}, check


def peft() -> tuple[dict[str, Any], Check]:
    pytest.importorskip("peft")
    model, given = llama("LlamaForCausalLM"), tokens()

    def check(space: dict[str, Any]) -> None:
        trained = {name: p.grad for name, p in space["model"].named_parameters() if p.grad is not None}
        assert trained and all("lora" in name for name in trained)
        plain = copy.deepcopy(space["model"])
        plain._compiled_call_impl = None
        wide = copy.deepcopy(plain).double()
        for run in (plain, wide):
            run.zero_grad()
            run(given, labels=given).loss.backward()
        eager, exact = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (plain, wide))
        assert_as_exact_as_eager(trained, eager, exact)

    return {"model": model, "tokens": given}, check


def torchao() -> tuple[dict[str, Any], Check]:
    pytest.importorskip("torchao")
    model, given = llama(), tokens()

    def check(space: dict[str, Any]) -> None:
        assert any("Int8" in type(p).__name__ or "Quantized" in type(p).__name__ for p in model.parameters())
        plain = copy.deepcopy(model)
        plain._compiled_call_impl = None
        with torch.no_grad():
            eager = plain(given).last_hidden_state
        assert_as_exact_as_eager(space["hidden"].detach(), eager, eager.double())

    return {"model": model, "tokens": given}, check


def inside_inductor() -> tuple[dict[str, Any], Check]:
    model, inputs = Layer(), (torch.randn(2, 20, 16),)
    with torch.no_grad():
        eager, exact = model(*inputs), copy.deepcopy(model).double()(inputs[0].double())

    def check(space: dict[str, Any]) -> None:
        assert_as_exact_as_eager(space["compiled"](*inputs).detach(), eager, exact)

    return {"model": model, "inputs": inputs}, check


def zentorch() -> tuple[dict[str, Any], Check]:
    pytest.importorskip("zentorch", reason="zentorch asks for the version of torch that it was built with")
    model, given = bert("BertModel"), tokens()
    with torch.no_grad():
        eager, exact = (run(given).last_hidden_state for run in (model, copy.deepcopy(model).double()))

    def check(space: dict[str, Any]) -> None:
        assert_as_exact_as_eager(space["hidden"], eager, exact)
        with torch.no_grad():
            assert torch.equal(model(given).last_hidden_state, eager), "the weights were changed"

    return {"model": model, "tokens": given}, check


SECTIONS: dict[str, Callable[..., tuple[dict[str, Any], Check]]] = {
    "transformers: Trainer": trainer,
    "transformers: pipelines": pipelines,
    "transformers: generate": generate,
    "transformers: an attention implementation": implementation,
    "accelerate": accelerate,
    "Lightning": in_lightning,
    "diffusers": in_diffusers,
    "timm": in_timm,
    "sentence-transformers": sentences,
    "PEFT": peft,
    "torchao": torchao,
    "zentorch, and other backends": zentorch,
    "As a pass inside Inductor": inside_inductor,
}
WHOLE = ("accelerate", "zentorch, and other backends", "As a pass inside Inductor")
"""Sections whose models Inductor compiles, too; elsewhere the rest of the graph runs as it is, which saves minutes."""


@pytest.fixture(autouse=True)
def _registrations() -> Iterator[None]:
    yield
    for name in ("accelerate", "transformers"):
        if module := sys.modules.get(f"fusion.integrations.{name}"):
            module.unregister()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def test_every_section_is_run() -> None:
    assert set(sections()) == set(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if title not in WHOLE:
        monkeypatch.setattr("fusion.inner_compiler.compile_rest", lambda module, *_: module.forward)
    prepare = SECTIONS[title]
    space, check = prepare(tmp_path / "model") if prepare is sentences else prepare()
    space |= {"fusion": fusion, "torch": torch}
    for number, block in enumerate(sections()[title]):
        torch._dynamo.reset()
        with fusion.collect_reports() as reports:
            exec(compile(block, f"{title}, block {number}", "exec"), space)
        sites = [site for report in reports for site in report.sites]
        assert sites and all(site.fused for site in sites), [(site.location, site.reason) for site in sites]
    check(space)
