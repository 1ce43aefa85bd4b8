"""Dynamo as fusion.torch_private.dynamo uses it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from fusion.torch_private import dynamo


def _instead(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _double(x: torch.Tensor) -> torch.Tensor:
    return torch.erfinv(x)


def test_dynamo_asks_what_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    assert torch.erfinv not in handlers
    seen: list[Any] = []

    def handler(_: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend([dynamo.backend_of(translator), dynamo.known(args[0])])
        factor = torch.compiler  # something that Dynamo has no variable of
        del factor
        return dynamo.call_in_graph(translator, _instead, (*args, kwargs["factor"]) if kwargs else (*args, args[0]), {})

    graphs: list[GraphModule] = []

    def backend(module: GraphModule, _: object):
        graphs.append(module)
        return module.forward

    dynamo.treat(torch.erfinv, handler)
    try:
        torch.compiler.reset()
        result = torch.compile(_double, backend=backend, fullgraph=True)(torch.tensor([0.5, 2.0]))
    finally:
        del handlers[torch.erfinv]
        torch.compiler.reset()
    assert result.tolist() == [0.25, 4.0]
    assert graphs[0].graph.find_nodes(op="call_function", target=_instead)
    assert seen[0] is backend and isinstance(seen[1], torch.Tensor) and seen[1].shape == (2,)


def test_attention_is_in_the_table_by_this_name() -> None:
    assert F.scaled_dot_product_attention is dynamo.SDPA


def test_counters_are_by_backend() -> None:
    before = dynamo.counters["fusion-test"]["sites"]
    dynamo.counters["fusion-test"]["sites"] += 2
    assert dynamo.counters["fusion-test"]["sites"] == before + 2
    torch._dynamo.utils.counters.pop("fusion-test")


def test_a_restart_is_an_exception_of_its_own() -> None:
    assert issubclass(dynamo.RestartAnalysis, Exception) and dynamo.RestartAnalysis is not Exception


def test_constants_have_a_source() -> None:
    first, second = dynamo.ConstantSource("input0"), dynamo.ConstantSource("input1")
    assert first != second and first == dynamo.ConstantSource("input0")


def test_what_was_compiled_is_found_again() -> None:
    linear = torch.nn.Linear(2, 2)
    assert dynamo.original_of(torch.compile(linear)) is linear
    assert dynamo.original_of(torch.compile(_double)) is _double
    assert dynamo.original_of(_double) is _double and dynamo.original_of(linear) is linear


def test_backends_are_registered_by_name() -> None:
    def fusion_private_test(module: GraphModule, _: object):
        return module.forward

    dynamo.register_backend(fusion_private_test)
    assert "fusion_private_test" in torch.compiler.list_backends(exclude_tags=())
    assert torch.compile(lambda x: x + 1, backend="fusion_private_test")(torch.ones(1)).item() == 2


def test_backends_are_found_by_name_or_taken_as_they_are() -> None:
    module = torch.fx.symbolic_trace(lambda x: (x * 3,))
    x = torch.ones(2, requires_grad=True)
    (result,) = dynamo.lookup_backend("aot_eager")(module, [x])(x)
    result.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    assert dynamo.lookup_backend(_double) is _double
    assert {"aot_eager", "eager", "inductor"} <= set(dynamo.list_backends(None))
    assert "eager" not in dynamo.list_backends()
