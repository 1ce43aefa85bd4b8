"""Operators as fusion.torch_private.operators uses them."""

import pytest
import torch
from torch.fx import GraphModule

from fusion.torch_private import operators

aten = torch.ops.aten


def test_types_of_operators() -> None:
    assert isinstance(aten.add.Tensor, operators.OpOverload) and isinstance(aten.add, operators.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)
    assert not isinstance(torch.add, operators.OpOverload | operators.HigherOrderOperator)
    assert torch.ops.higher_order.wrap.name() == "wrap"


def test_schemas_say_names_defaults_and_what_is_written() -> None:
    found = operators.schema(aten.add_.Tensor)
    assert (found.name, found.is_mutable, found.returns[0].alias_info.is_write) == ("aten::add_", True, True)
    assert [argument.name for argument in found.arguments] == ["self", "other", "alpha"]
    assert found.arguments[2].has_default_value() and found.arguments[2].default_value == 1
    assert found.arguments[0].alias_info.is_write and str(found.arguments[1].type) == "Tensor"
    split = operators.schema(aten.split.Tensor)
    assert not split.is_mutable and isinstance(split.returns[0].type, torch.ListType)


def test_operators_that_change_or_draw_are_impure() -> None:
    assert all(map(operators.is_impure, (aten.add_.Tensor, aten.rand.default, aten.dropout.default)))
    assert not any(map(operators.is_impure, (aten.add.Tensor, aten.softmax.int, aten.view.default)))


def test_autocast_has_kernels_of_what_it_rules() -> None:
    assert operators.has_kernel(aten.matmul.default, "AutocastCPU")
    assert not operators.has_kernel(aten.view.default, "AutocastCPU")


def test_shapes_are_registered_without_a_search() -> None:
    with torch.library._scoped_library("fusion_private_test", "FRAGMENT") as library:
        library.define("double_rows(Tensor x) -> Tensor")
        shapes = lambda x: x.new_empty(2 * x.shape[0])
        operators.register_fake(library, "fusion_private_test::double_rows", shapes, __file__)
        assert torch.ops.fusion_private_test.double_rows(torch.empty(3, device="meta")).shape == (6,)


def test_assertions_raise_on_the_host() -> None:
    operators.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="beyond"):
        operators.assert_async(torch.tensor(False), "beyond")


def _targets(function, *args) -> set[object]:
    found: set[object] = set()

    def backend(module: GraphModule, _: object):
        found.update(node.target for node in module.graph.nodes)
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*args)
    return found


def test_graphs_enter_and_leave_autocast_by_these_calls() -> None:
    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    found = _targets(function, torch.ones(2, 2))
    assert {operators.enter_autocast, operators.leave_autocast} <= found


def test_graphs_have_fused_encoders_by_these_calls() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        assert operators.ENCODER_LAYER in _targets(layer, torch.randn(2, 3, 8))
    assert operators.ENCODER_LAYER.__name__ == aten._transformer_encoder_layer_fwd.__name__
    assert operators.SELF_ATTENTION.__name__ == aten._native_multi_head_attention.__name__
