"""GPU kernels in Triton's interpreter against the reference in float64: every score program, dtype, layout, odd
sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen import reference
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.codegen.triton.tiles import Tile
from fusion.ir import Normalizer, Operand, integers
from fusion.ir.expr import E, J, coord
from tests.codegen.mlir.cases import PROGRAMS, Case, assert_as_exact_as_eager, case, draw

SMALL = Tile(rows=32, keys=32, warps=4, stages=1)
SHAPES = (
    {"B": 2, "H": 1, "Nq": 40, "Nk": 40},
    {"B": 1, "H": 2, "Nq": 17, "Nk": 75},
    {"B": 1, "H": 1, "Nq": 1, "Nk": 1},
)


def check(c: Case, layout: str = "packed", tile: Tile = SMALL, shapes: tuple[dict[str, int], ...] = SHAPES) -> None:
    run = Kernel(c.spec, tile)
    for shape in shapes:
        operands, sizes = draw(c, shape, layout)
        assert_as_exact_as_eager(run(operands, sizes), c.spec, operands, sizes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_in_float32(name: str) -> None:
    check(case(name, d=16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "left_padded", "alibi", "documents"])
def test_low_precision(name: str, dtype: str) -> None:
    check(case(name, dtype, 64))


@pytest.mark.parametrize("layout", ["heads_inside", "columns", "gaps"])
def test_strides_and_grouped_heads(layout: str) -> None:
    check(case("causal", "bfloat16", 48, 20, group=2, order=("b0", "i", "b1", "e")), layout)


@pytest.mark.parametrize(("d", "d_v"), [(1, 1), (3, 5), (17, 31), (80, 96)])
def test_odd_widths(d: int, d_v: int) -> None:
    check(case("bias", "float32", d, d_v, order=("b0", "b1", "e", "i")))


@pytest.mark.parametrize("tile", [Tile(rows=16, keys=64, warps=4, stages=1), Tile(rows=64, keys=16, warps=4, stages=1)])
@pytest.mark.parametrize("name", ["causal_last_key", "window", "left_padded_inf"])
def test_other_tiles(name: str, tile: Tile) -> None:
    check(case(name, d=16), tile=tile)


@pytest.mark.parametrize("name", ["sigmoid", "clamp", "causal"])
def test_no_normaliser(name: str) -> None:
    c = case("sigmoid" if name == "causal" else name, d=16, normalizer=Normalizer.NONE, weight=name == "clamp")
    check(c)


@pytest.mark.parametrize("name", ["left_padded_inf", "bool_mask", "plain"])
def test_safe_softmax(name: str) -> None:
    check(case(name, d=16, normalizer=Normalizer.SAFE_SOFTMAX))


@pytest.mark.parametrize("name", ["plain", "left_padded_inf", "alibi"])
def test_weights_sinks_and_row_scale(name: str) -> None:
    check(case(name, d=16, weight=True))
    check(case(name, d=16, sinks=True))
    check(case(name, d=16, off_by_one=True))
    check(case(name, d=16, sinks=True, off_by_one=True, weight=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_special_values_in_a_bias(value: float) -> None:
    c = case("bias", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 20, "Nk": 70})
    operands[3][0, 1, 2] = value
    operands[3][1, 10] = value
    assert_as_exact_as_eager(Kernel(c.spec, SMALL)(operands, sizes), c.spec, operands, sizes)


def test_the_maximum_moves_up_late() -> None:
    c = case("bias", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 20, "Nk": 200})
    operands[3] = operands[3] + torch.linspace(-200, 200, 200) * torch.tensor([1.0, -1.0])[:, None, None]
    assert_as_exact_as_eager(Kernel(c.spec, SMALL)(operands, sizes), c.spec, operands, sizes)


def test_no_keys_and_no_queries() -> None:
    check(case("causal", d=16), shapes=({"B": 1, "H": 1, "Nq": 3, "Nk": 0}, {"B": 1, "H": 1, "Nq": 0, "Nk": 3}))


def test_a_module_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from fusion.codegen.triton.check import check_module

    check_module("generated.py", case("alibi", d=16).spec.to_json(), ["Nq=20", "Nk=40"])
    assert "allowed" in capsys.readouterr().out


def test_the_same_spec_gives_the_same_text() -> None:
    spec = case("left_padded", d=16).spec
    text = Kernel(spec).source
    assert text == Kernel(spec.from_json(spec.to_json())).source
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", ["plain", "causal", "left_padded", "left_padded_inf", "bias", "alibi", "documents"])
@pytest.mark.parametrize("splits", [2, 5])
def test_split_keys(name: str, splits: int) -> None:
    for options in ({}, {"sinks": True}, {"off_by_one": True}, {"normalizer": Normalizer.SAFE_SOFTMAX}):
        c = case(name, d=16, d_v=20, **options)
        for shape in ({"B": 1, "H": 2, "Nq": 3, "Nk": 150}, {"B": 1, "H": 1, "Nq": 1, "Nk": 20}):
            operands, sizes = draw(c, shape)
            got = Kernel(c.spec, SMALL, splits=splits)(operands, sizes)
            assert_as_exact_as_eager(got, c.spec, operands, sizes)


def test_how_many_splits() -> None:
    from fusion.codegen.triton.split import may_split, splits_for

    assert splits_for(programs=8, n_k=16384, keys=64, processors=132) == 33
    assert splits_for(programs=8, n_k=200, keys=64, processors=132) == 1
    assert splits_for(programs=1000, n_k=16384, keys=64, processors=132) == 1
    assert may_split(case("causal").spec) and not may_split(case("window").spec)


def test_heads_inside_the_last_dimension() -> None:
    """V as a projection leaves it, [B, N, H * d], its heads shared by two query heads each."""
    c = case("causal", d=16, group=2)
    head = integers.floordiv(coord("b1"), 2)
    v = Operand(dtype="float32", rank=3, name="v")
    spec = dataclasses.replace(
        c.spec, operands=(*c.spec.operands[:2], v), v=(coord("b0"), J, integers.add(integers.mul(16, head), E))
    )
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 40})
    operands[2] = operands[2].transpose(1, 2).flatten(2)
    assert_as_exact_as_eager(Kernel(spec, SMALL)(operands, sizes), spec, operands, sizes)
    run = Differentiable(spec, SMALL)
    out, statistics = run.forward(operands, sizes)
    assert run.without_kernels((True, True, True)) is None
    got = run.backward(out, out, statistics, operands, sizes, (True, True, True))
    for ours, theirs in zip(got, reference.backward(spec, out, operands, sizes, (True, True, True)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
