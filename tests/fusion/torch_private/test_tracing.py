"""Graphs and traces as fusion.torch_private.tracing uses them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import export
from torch.fx import GraphModule, Interpreter, symbolic_trace

from fusion.torch_private import functorch, tracing


def _traced(run: Callable[[Any, torch.Tensor], Any]) -> GraphModule:
    """The trace of `run(tracer, x)`."""
    return tracing.make_fx(lambda x: run(tracing.current_tracer(), x), pre_dispatch=True, tracing_mode="fake")(
        torch.ones(3)
    )


def _calls(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op.startswith("call")]


def test_traces_are_of_operators_above_dispatch() -> None:
    assert _calls(_traced(lambda _, x: torch.softmax(x, 0))) == ["aten.softmax.int"]
    assert tracing.current_tracer() is None


@pytest.mark.parametrize("off", [tracing.untraced, tracing.disable_proxy_modes_tracing])
def test_tracing_can_be_turned_off(off: Callable[[], Any]) -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        with off():
            torch.ones(3).sin()
        return x.cos()

    assert _calls(_traced(run)) == ["aten.cos.default"]


def test_a_call_is_written_and_its_result_tracked() -> None:
    def own(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def run(tracer: Any, x: torch.Tensor) -> torch.Tensor:
        with tracing.disable_proxy_modes_tracing():
            result = own(x, 2.0)
        call = tracing.written(tracer, "call_function", own, (x,), {"factor": 2.0})
        return tracing.track(result, call, tracer) + 1

    made = _traced(run)
    first, *_ = [node for node in made.graph.nodes if node.op == "call_function"]
    assert first.target is own and first.kwargs == {"factor": 2.0} and len(_calls(made)) == 2
    assert made(torch.tensor([1.0, 2.0, 3.0])).tolist() == [3.0, 5.0, 7.0]


def test_a_tensor_stands_for_a_node() -> None:
    def run(tracer: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert (known := tracing.node_of(y, tracer)) is not None
        node, constant = known
        assert constant is None and str(node.target) == "aten.sin.default"
        with tracing.untraced():
            again = torch.empty_like(y)
        assert tracing.node_of(again, tracer) is None
        tracing.stand_for(again, node, tracer)
        return again + 1

    made = _traced(run)
    assert _calls(made) == ["aten.sin.default", "aten.add.Tensor"]
    assert torch.equal(made(torch.ones(3)), torch.ones(3).sin() + 1)


def test_operators_are_traced_below_vmap() -> None:
    enter, leave, put, take = map(functorch.of_vmap, functorch.VMAP)

    def run(tracer: Any, x: torch.Tensor) -> torch.Tensor:
        with tracing.disable_proxy_modes_tracing(), tracing.with_tracer(tracer):
            level = enter(3, "error")
            result = take(put(x, 0, level).neg(), level, 3, 0)
            leave()
        return result

    made = _traced(run)
    assert _calls(made) == ["aten.neg.default"] and made(torch.ones(3)).tolist() == [-1.0] * 3


class _Holds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.constant = torch.nn.Parameter(torch.ones(3)), torch.arange(3.0)
        self.register_buffer("state", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.state + self.constant


def test_constants_of_a_trace_are_told_from_parameters() -> None:
    held = _Holds()
    made = tracing.make_fx(held, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(3))
    read = made.graph.find_nodes(op="get_attr")
    assert [tracing.is_lifted(node) for node in read] == [
        getattr(made, node.target) is not held.weight for node in read
    ]
    assert any(map(tracing.is_lifted, read)) and not any(
        map(tracing.is_lifted, made.graph.find_nodes(op="placeholder"))
    )
    exported = export(held, (torch.ones(3),), strict=False).graph
    assert not any(map(tracing.is_lifted, exported.find_nodes(op="placeholder")))  # they are inputs there


def test_lazy_modules_run() -> None:
    origin = symbolic_trace(lambda x: x + 1)
    made = tracing.lazy_module(origin, origin.graph)
    assert isinstance(made, GraphModule) and made(torch.ones(1)).item() == 2
    assert "return" in made.code


def test_a_module_has_other_parameters_inside() -> None:
    linear = torch.nn.Linear(2, 1, bias=False)
    before = linear.weight
    with tracing.reparametrized(linear, {"weight": torch.ones(1, 2)}):
        assert linear(torch.ones(2)).item() == 2
    assert linear.weight is before


def test_annotations_of_a_node_hold_inside() -> None:
    origin = symbolic_trace(lambda x: x.sin())
    node = origin.graph.find_nodes(op="call_method")[0]
    node.meta["stack_trace"] = "here"

    class Run(Interpreter):
        def run_node(self, n: Any) -> Any:
            with tracing.current_node(self, n):
                return super().run_node(n)

    with torch.fx.traceback.preserve_node_meta():
        made = tracing.make_fx(Run(origin).run)(torch.ones(1))
    assert "stack_trace" in tracing.ORIGINS and {"nn_module_stack", "source_fn_stack"} <= {*tracing.ORIGINS}
    assert made.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0].meta["stack_trace"] == "here"


def test_nodes_are_renamed() -> None:
    graph = symbolic_trace(lambda x, y: x + y).graph
    first, second = graph.find_nodes(op="placeholder")
    tracing.rename(first, "rows")
    tracing.rename(second, "rows")
    assert first.name == "rows" and second.name.startswith("rows") and second.name != "rows"


class _Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_modules_of_exported_programs_are_not_plain() -> None:
    program = export(_Twice(), (torch.ones(2),), strict=False)
    assert not tracing.is_plain(program.module().graph) and tracing.is_plain(program.graph_module.graph)
    assert tracing.is_plain(symbolic_trace(_Twice()).graph)


def test_an_exported_program_takes_another_graph() -> None:
    program = export(_Twice(), (torch.ones(2),), strict=False)
    module = GraphModule(program.graph_module, program.graph_module.graph)
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    call.args = (call.args[0], 3)
    module.recompile()
    other = tracing.updated(program, module, program.graph_signature)
    assert other.module()(torch.ones(2)).tolist() == [3.0, 3.0]
    assert program.graph_signature == other.graph_signature


def test_dynamo_says_where_inputs_come_from() -> None:
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, _: object):
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(2))
    given = graphs[0].graph.find_nodes(op="placeholder")
    assert all(map(tracing.has_source, given))
    assert {tracing.user_path(node) for node in given} == {"weight", "bias", "args.0"}
    made = symbolic_trace(_Twice()).graph.find_nodes(op="placeholder")[0]
    assert not tracing.has_source(made) and not tracing.user_path(made)
    tracing.carry_source(made, made)
    tracing.carry_source(given[0], made)
    assert tracing.has_source(made)
