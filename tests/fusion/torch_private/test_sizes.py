"""Symbolic sizes as fusion.torch_private.tensors reads them."""

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion.torch_private import tensors as fake


def _size(extent: int) -> tuple[Any, fake.FakeTensorMode]:
    mode = fake.FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.empty(extent, 2)).shape[0], mode


def test_sizes_have_an_example() -> None:
    extent, mode = _size(5)
    assert fake.optimization_hint(extent, 7) == 5 and fake.optimization_hint(2 * extent + 1, 7) == 11
    assert fake.optimization_hint(3, 7) == 3
    unknown = mode.shape_env.create_unbacked_symint()
    assert fake.optimization_hint(unknown, 7) == 7
    assert not mode.shape_env.guards


def test_what_is_known_of_all_sizes() -> None:
    extent, mode = _size(5)
    assert fake.statically_known_true(extent == extent) and fake.statically_known_true(extent >= 0)
    assert not fake.statically_known_true(extent == 5) and not mode.shape_env.guards


def test_symbols_of_data_are_told_apart() -> None:
    extent, mode = _size(5)
    unknown = mode.shape_env.create_unbacked_symint()
    assert fake.free_unbacked_symbols(unknown.node.expr) == {unknown.node.expr}
    assert not fake.free_unbacked_symbols(extent.node.expr)


def test_expressions_are_made_of_these_functions() -> None:
    extent, _ = _size(5)
    functions = fake.functions
    n = extent.node.expr
    assert isinstance(n, sympy.Symbol) and n.is_integer
    made = {
        (extent // 2).node.expr.func: functions.FloorDiv,
        (extent % 3).node.expr.func: functions.Mod,
        torch.sym_max(extent, 3).node.expr.func: functions.Max,
        torch.sym_min(extent, 3).node.expr.func: functions.Min,
        torch.sym_float(extent).node.expr.func: functions.ToFloat,
        (extent / 3).node.expr.func: functions.IntTrueDiv,
        (torch.sym_float(extent) / 3.0).node.expr.func: functions.FloatTrueDiv,
        (torch.sym_float(extent) ** 0.5).node.expr.func: functions.FloatPow,
    }
    assert all(found is expected for found, expected in made.items())
    assert torch.sym_sqrt(extent).node.expr.func.__name__ == "OpaqueUnaryFn_sqrt"
    assert functions.PythonMod(n, 3).args == (n, 3) and functions.CleanDiv(n, 3).args == (n, 3)


def test_expressions_can_be_bounded_and_asked() -> None:
    extent, mode = _size(5)
    environment = fake.shape_environment(extent)
    assert environment.bound_sympy(extent.node.expr).lower >= 0 and environment.var_to_sources is not None
    assert environment.evaluate_expr(extent.node.expr < 10) and len(environment.guards) == 1
    assert environment.evaluate_expr(extent.node.expr) == 5  # fixes it
    assert extent.node.has_hint() and extent.node.hint == 5
