"""Every primitive has a lowering in every emitter: kernels with it in their score program can be written."""

import dataclasses

import pytest

from fusion.codegen.mlir.kernel import emit
from fusion.codegen.triton.launch import forward_kernels
from fusion.codegen.triton.module import module_text
from fusion.ir import integers
from fusion.ir.expr import SCORE, Expr, I, J, Kind, node
from fusion.ir.ops import apply, as_float
from fusion.ir.primitives import PRIMITIVES
from fusion.machine import machine
from fusion.planning.register_tiles import ByRows, target_of, tilings_for
from tests.codegen.mlir.cases import case

ARGUMENTS = {
    Kind.FLOAT: (SCORE, apply("to_float", J)),
    Kind.INT: (integers.sub(J, I), integers.add(I, 3)),
    Kind.BOOL: (apply("ile", J, I), apply("flt", SCORE, apply("to_float", I))),
}
DIVISORS = (integers.add(J, I), integers.integer(3))


def program(name: str) -> Expr:
    """The score plus the primitive of values that differ from score to score, as the node itself: not simplified."""
    primitive = PRIMITIVES[name]
    args = tuple(ARGUMENTS[kind][place % 2] for place, kind in enumerate(primitive.args))
    value = node(name, DIVISORS if name in ("floordiv", "mod") else args, primitive.result)
    return node("fadd", (SCORE, as_float(value)), Kind.FLOAT)


@pytest.mark.parametrize("name", sorted(PRIMITIVES.keys() - {"bool_to_float", "bool_to_int"}))
def test_kernels_can_be_written(name):
    """Conversions of booleans are selections by the time that an emitter sees them."""
    spec = dataclasses.replace(case("plain", d=16).spec, score=program(name))
    target = target_of(machine())
    for tiling in tilings_for(spec, target)[:1]:
        assert emit(spec, tiling, target, 16, 16).source
    assert emit(spec, ByRows(rows_at_once=4), target, 16, 16).source
    assert module_text(spec, forward_kernels(spec, 16, 16, False), 16, 16)
