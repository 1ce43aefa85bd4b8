"""Attention as MLIR functions: one site, and whole models through torch-mlir, by running them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import fusion
from fusion.codegen.cpu.export import attention_module
from fusion.errors import MlirExportError
from tests.codegen.cpu.exported import Compiled, run
from tests.numerics import assert_as_exact_as_eager


def run_text(text, entry, inputs, results):
    """Compile a module given as text, and run one of its functions."""
    from torch_mlir import ir

    with ir.Context():
        return Compiled(ir.Module.parse(text), entry, results)(*inputs)


def plain(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def biased_causal(q, k, v, bias):
    dead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return torch.softmax((q @ k.mT / 4 + bias).masked_fill(dead, float("-inf")), -1) @ v


def padded(q, k, v, keep):
    return torch.softmax((q @ k.mT).masked_fill(~keep[:, None, None, :], float("-inf")), -1) @ v


def heads_last(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2)


def mixed_heads(q, k, v, matrix):
    s = torch.nn.functional.conv2d(q @ k.mT / 4, matrix[:, :, None, None])
    return torch.einsum("bhij,hg->bgij", s.softmax(-1), matrix) @ v


def tensors(*shape, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


torch.manual_seed(0)  # these are drawn when the module is read
CASES = {
    "plain": (plain, tensors(2, 3, 100, 16)),
    "few queries": (plain, [torch.randn(2, 3, 2, 16), torch.randn(2, 3, 70, 16), torch.randn(2, 3, 70, 24)]),
    "causal with a bias": (biased_causal, [*tensors(2, 3, 67, 16), torch.randn(3, 67, 67)]),
    "padding": (padded, [*tensors(2, 3, 40, 16), torch.rand(2, 40) > 0.3]),
    "heads last": (heads_last, tensors(2, 50, 3, 16)),
    "mixed heads": (mixed_heads, [*tensors(2, 3, 70, 16), torch.randn(3, 3)]),
    "bfloat16": (plain, tensors(1, 2, 33, 32, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_site_as_a_module_computes_what_eager_does(name):
    function, given = CASES[name]
    (site,) = fusion.explain(function, *given).sites
    expected = function(*given)
    operands = [x for x in given if x.shape]
    (actual,) = run_text(site.mlir(), "attention", operands, [(expected.shape, expected.dtype)])
    exact = function(*(x.double() if x.is_floating_point() else x for x in given))
    assert_as_exact_as_eager(actual, expected, exact, expected.dtype)


def test_the_function_is_public_and_on_tensors():
    text = fusion.explain(plain, *tensors(1, 2, 20, 8)).sites[0].mlir()
    type_ = "tensor<1x2x20x8xf32>"
    assert f"func.func @attention(%t0: {type_}, %t1: {type_}, %t2: {type_}) -> {type_}" in text
    assert "softmax(s / 4)" in text


def test_a_site_that_was_not_fused_has_no_mlir():
    def returns(q, k, v):
        w = torch.softmax(q @ k.mT, -1)
        return w @ v, w

    def returns_scores(q, k, v):
        s = q @ k.mT
        return torch.softmax(s, -1) @ v, s

    with pytest.raises(MlirExportError, match="a site with 0 was asked for: the attention scores are needed"):
        fusion.explain(returns_scores, *tensors(1, 2, 5, 4)).sites[0].mlir()
    with pytest.raises(MlirExportError, match="returns more than one tensor"):
        fusion.explain(returns, *tensors(1, 2, 5, 4)).sites[0].mlir()
    given = tensors(1, 2, 5, 4)
    for ours, eager in zip(run(fusion.export_mlir(returns, *given), *given), returns(*given), strict=True):
        assert_as_exact_as_eager(ours, eager, eager)


def test_what_has_no_kernel_or_no_elements(monkeypatch):
    site = fusion.explain(plain, *tensors(1, 2, 5, 4)).sites[0]
    with pytest.raises(MlirExportError, match="an attention without elements"):
        attention_module(site.spec, [(1, 2, 0, 4)] * 3, [1, 2, 0, 0])
    monkeypatch.setattr("fusion.codegen.cpu.export.supports", lambda spec, machine: "torch-mlir is missing")
    with pytest.raises(MlirExportError, match="torch-mlir is missing"):
        site.mlir()


# --- models -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.layers(self.embed(tokens))


def test_a_transformer_runs_as_one_module(tmp_path: Path):
    model, tokens = Encoder().eval(), torch.randint(0, 50, (2, 19))
    program = fusion.export_mlir(model, tokens)
    assert program.attentions == ("fusion_attention_0",), "layers share a function"
    text = str(program)
    assert text.count("call @fusion_attention_0(") == 2 and "linalg.matmul" in text or "linalg.batch_matmul" in text
    with torch.no_grad():
        (actual,), eager = run(program, tokens), model(tokens)
        assert_as_exact_as_eager(actual, eager, model.double()(tokens), torch.float32)
    assert program.write(tmp_path / "model.mlir").read_text() == text
    assert program.write(tmp_path / "model.mlirbc").read_bytes()[:4] == b"ML\xefR"


def test_a_decoder_of_transformers_runs_as_one_module():
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, attn_implementation="eager", use_cache=False)
    model, tokens = GPT2Model(config).eval(), torch.randint(0, 50, (1, 33))
    program = fusion.export_mlir(model, tokens)
    assert len(program.attentions) == 1
    with torch.no_grad():
        actual, eager = run(program, tokens)[0], model(tokens)[0]
        assert_as_exact_as_eager(actual, eager, model.double()(tokens)[0], torch.float32)


def test_a_function_with_two_results_and_keywords():
    def both(x, *, scale):
        y = torch.softmax(x @ x.mT * scale, -1) @ x
        return {"y": y, "sum": y.sum(-1)}

    x = torch.randn(2, 11, 8)
    y, total = run(fusion.export_mlir(both, x, scale=0.5), x, scale=0.5)
    assert_as_exact_as_eager({"y": y, "sum": total}, both(x, scale=0.5), both(x.double(), scale=0.5))


def test_a_module_on_disk_runs_without_what_made_it(tmp_path: Path):
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialects

    def attend(x):
        return torch.softmax(x @ x.mT, -1) @ x

    x = torch.randn(2, 20, 8)
    path = fusion.export_mlir(attend, x).write(tmp_path / "m.mlirbc")
    with ir.Context() as context:
        torch_dialects.register_dialect(context)
        (actual,) = Compiled(ir.Module.parse(path.read_bytes()), "main", [(x.shape, x.dtype)])(x)
    assert_as_exact_as_eager(actual, attend(x), attend(x.double()))


def test_what_cannot_be_exported_says_who_refuses():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return torch.softmax(x @ x.mT, -1) @ x

    with pytest.raises(MlirExportError, match=r"outlive a call \(calls\); freeze them"):
        fusion.export_mlir(Counts(), torch.randn(1, 3, 4))
    with pytest.raises(MlirExportError, match=r"torch\.export refuses the model"):
        fusion.export_mlir(plain, torch.randn(3))
    with pytest.raises(MlirExportError, match="torch-mlir refuses the program"):
        fusion.export_mlir(lambda x: torch.linalg.eigvals(x), torch.randn(3, 3))
