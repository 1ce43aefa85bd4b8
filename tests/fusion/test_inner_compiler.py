"""Inner compilers: any backend of Dynamo compiles a graph with fused attentions, in inference and training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

import fusion
from fusion.errors import OptionError
from fusion.inductor_passes import BelowAutogradPass
from fusion.options import Options
from fusion.torch_private import inductor
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.out(F.gelu(torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).flatten(-2))


def returns_its_graph(module: GraphModule, _: Any) -> GraphModule:
    return module


def aot(compiled: list[GraphModule]) -> Any:
    """A backend that runs what AOTAutograd makes, and notes it."""

    def note(module: GraphModule, _: Any) -> Any:
        compiled.append(module)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=note)


def attentions(graphs: list[GraphModule]) -> int:
    return sum(str(node.target).startswith("fusion.attention") for graph in graphs for node in graph.graph.nodes)


def trained(module: torch.nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = run(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", returns_its_graph, "custom"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_backend_infers_and_trains(inner: Any, gradients: bool, dynamic: bool) -> None:
    graphs: list[GraphModule] = []
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 19, 16)
    options = {"inner": aot(graphs) if inner == "custom" else inner, "strict": True}
    compiled = torch.compile(layer, backend="fusion", options=options, dynamic=dynamic)
    with fusion.collect_reports() as reports, torch.set_grad_enabled(gradients):
        if gradients:
            wide = Layer().double()
            wide.load_state_dict(layer.state_dict())
            assert_as_trained(layer, compiled, wide, x)
        else:
            assert_runs_as_exact_as_eager(compiled, layer, x)
    assert [report.fused for report in reports] == [1]
    assert inner != "custom" or (len(graphs) == 1 + gradients and attentions(graphs[:1]) == 1)


def assert_as_trained(layer: Layer, compiled: Any, wide: Layer, x: Tensor) -> None:
    assert_as_exact_as_eager(trained(layer, compiled, x), trained(layer, layer, x), trained(wide, wide, x.double()))


def test_a_registered_name_is_looked_up() -> None:
    graphs: list[GraphModule] = []
    torch._dynamo.register_backend(aot(graphs), name="fusion_inner_test")
    with torch.no_grad():
        torch.compile(Layer(), backend="fusion", options={"inner": "fusion_inner_test"})(torch.randn(1, 5, 16))
    assert attentions(graphs) == 1


def test_options_of_a_backend_are_arguments_of_a_partial() -> None:
    seen: list[Any] = []

    def backend(module: GraphModule, inputs: Any, *, options: Any) -> Any:
        seen.extend([len(inputs), options])
        return module

    inner = functools.partial(backend, options={"level": 3})
    with torch.no_grad():
        torch.compile(Layer(), backend="fusion", options={"inner": inner})(torch.randn(1, 5, 16))
    assert seen == [5, {"level": 3}]


def test_attention_patterns_of_inductor_are_off_within_a_backend() -> None:
    """Backends that end in Inductor would get wrong results from them for attentions that stay unfused."""

    def passes() -> list[Any]:
        setting = inductor.config.joint_custom_pre_pass
        return [entry for entry in (setting if isinstance(setting, list) else [setting]) if entry is not None]

    def backend(module: GraphModule, _: Any) -> Any:
        seen.append([type(entry) for entry in passes()])
        return module

    seen: list[Any] = []
    with torch.no_grad():
        torch.compile(Layer(), backend="fusion", options={"inner": backend})(torch.randn(1, 5, 16))
    assert seen == [[BelowAutogradPass]] and passes() == []


def test_a_backend_that_ends_in_inductor() -> None:
    def backend(module: GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    layer, x = Layer(), torch.randn(2, 19, 16)
    compiled = torch.compile(layer, backend="fusion", options={"inner": backend, "strict": True})
    wide = Layer().double()
    wide.load_state_dict(layer.state_dict())
    assert_as_trained(layer, compiled, wide, x)


@pytest.mark.parametrize("name", ["gcc", "fusion", ["inductor"], None])
def test_a_name_that_is_no_backend_is_an_error(name: Any) -> None:
    with pytest.raises(OptionError, match=r"option 'inner' is .*'aot_eager'.*'cudagraphs'.*or a callable"):
        Options.parse({"inner": name})


def test_a_backend_has_to_return_a_callable() -> None:
    inner = lambda module, inputs: None
    with pytest.raises(Exception, match=r"option 'inner' is <function.*returned None; it must return a callable"):
        torch.compile(Layer(), backend="fusion", options={"inner": inner})(torch.randn(1, 5, 16))
