"""Inductor as fusion.torch_private.inductor uses it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from fusion.torch_private import dynamo, inductor


def _compiler() -> str | None:
    try:
        return shutil.which(inductor.cpp_compiler())
    except Exception:
        return None


needs_compiler = pytest.mark.skipif(_compiler() is None, reason="Inductor's code for CPUs needs a C++ compiler")


class _Pass(inductor.CustomGraphPass):
    def __init__(self) -> None:
        self.depths: list[int] = []
        self.packaging: list[bool] = []

    def __call__(self, graph: Graph) -> None:
        self.depths.append(inductor.pre_grad_depth())
        self.packaging.append(inductor.is_packaging())

    def uuid(self) -> None:
        return None


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@needs_compiler
def test_graphs_are_compiled_with_settings() -> None:
    module = symbolic_trace(lambda x: (x * 2 + 1,))
    x = torch.ones(3)
    ran = _Pass()
    run = inductor.compiled(module, [x], {"pre_grad_custom_pass": ran})
    assert not getattr(run, "_boxed_call", False)
    assert run(x)[0].tolist() == [3.0] * 3
    assert ran.depths == [1] and ran.packaging == [False]


@needs_compiler
def test_graphs_that_others_call_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _Pass()
    torch.compiler.reset()
    with inductor.config.patch(pre_grad_custom_pass=ran):
        x = torch.ones(3, requires_grad=True)
        checkpointed = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(_square, x, use_reentrant=False))
        assert checkpointed(x).tolist() == [1.0] * 3
    assert sorted(ran.depths) == [1, 2]


def test_there_is_no_depth_outside() -> None:
    assert inductor.pre_grad_depth() == 0 and not inductor.is_packaging()


def test_settings_of_passes_exist() -> None:
    for name in ("pre_grad_custom_pass", "joint_custom_pre_pass", "pattern_matcher", "use_pre_grad_passes"):
        assert hasattr(inductor.config, name)
    with inductor.config.patch(pattern_matcher=False):
        assert not inductor.config.pattern_matcher


def test_modes_are_settings() -> None:
    assert inductor.settings_of_mode("max-autotune")["max_autotune"] is True
    assert all(hasattr(inductor.config, name.split(".")[0]) for name in inductor.settings_of_mode("reduce-overhead"))


def test_files_have_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("a = 1")
    before = inductor.hash_of_files([str(path)])
    assert before == inductor.hash_of_files([str(path)]) and int(before, 16)


@needs_compiler
def test_calls_are_written_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def write(node: Any, wrapper: Any) -> str:
        (given,) = node.codegen_args()
        wrapper.add_import_once("from operator import neg as fusion_private_neg")
        written.append(node.get_device().type)
        return f"fusion_private_neg({given})"

    with torch.library._scoped_library("fusion_private_test", "FRAGMENT") as library:
        library.define("opposite(Tensor x) -> Tensor")
        library.impl("opposite", lambda x: -x, "CPU")
        library.impl("opposite", lambda x: torch.empty_like(x), "Meta")
        inductor.write_with("torch.ops.fusion_private_test.opposite.default", write)
        module = GraphModule(torch.nn.Module(), graph := Graph())
        x = graph.placeholder("x")
        graph.output((graph.call_function(torch.ops.fusion_private_test.opposite.default, (x,)),))
        module.recompile()
        run = inductor.compiled(module, [torch.ones(2)], {"fx_graph_cache": False})
        assert run(torch.tensor([1.0, 2.0]))[0].tolist() == [-1.0, -2.0]
    assert written == ["cpu"]


class _KeepOff(inductor.CustomGraphPass):
    """As a pass before Inductor's patterns."""

    def __call__(self, graph: Graph) -> None:
        inductor.keep_attention_patterns_off(graph)

    def uuid(self) -> None:
        return None


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.mT) / 8, -1) @ v


def _matched(**settings: Any) -> int:
    """How many attentions Inductor's patterns find."""
    torch.compiler.reset()
    dynamo.counters["inductor"].clear()
    with inductor.config.patch(fx_graph_cache=False, **settings), torch.no_grad():
        torch.compile(_attention)(*(torch.randn(2, 4, 16, 64) for _ in range(3)))
    return dynamo.counters["inductor"]["fuse_attention"]


@needs_compiler
def test_attention_patterns_are_kept_off_one_graph() -> None:
    assert _matched() == 1
    assert _matched(joint_custom_pre_pass=_KeepOff()) == 0
    assert _matched() == 1  # and no other
