"""GPU kernels in Triton's interpreter against the reference in float64: every score program, dtype, layout, odd
sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.forward import Forward
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import Kernel
from fusion.codegen.triton.panels import panels
from fusion.ir import Normalizer, Operand, integers
from fusion.ir.expr import SCORE, E, J, coord
from fusion.lowering.score_programs import dead_rows_matter
from fusion.planning.choice import Tile
from fusion.planning.gpu_layout import heads_to_pack, packed, padded, panelled
from tests.codegen.mlir.cases import (
    PROGRAMS,
    Case,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
)

SMALL = Tile(rows=32, keys=32, warps=4, stages=1)
SHAPES = (
    {"B": 2, "H": 1, "Nq": 40, "Nk": 40},
    {"B": 1, "H": 2, "Nq": 17, "Nk": 75},
    {"B": 2, "H": 2, "Nq": 1, "Nk": 1},
)
"""The last has several scores: the error of eager's in a single one is luck."""


def check(c: Case, layout: str = "packed", tile: Tile = SMALL, shapes: tuple[dict[str, int], ...] = SHAPES) -> None:
    run = Kernel(c.spec, tile)
    for shape in shapes:
        operands, sizes = draw(c, shape, layout)
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_in_float32(name: str) -> None:
    check(case(name, d=16))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "left_padded", "alibi", "documents"])
def test_low_precision(name: str, dtype: str) -> None:
    check(case(name, dtype, 64))


@pytest.mark.parametrize("layout", ["heads_inside", "columns", "gaps"])
def test_strides_and_grouped_heads(layout: str) -> None:
    check(case("causal", "bfloat16", 48, 20, group=2, order=("b0", "i", "b1", "e")), layout)


ROTATED = dataclasses.replace(SMALL, rotated=True)


@pytest.mark.parametrize(
    "name", ["causal", "causal_last_key", "window", "left_padded", "left_padded_inf", "alibi", "bias", "soft_cap"]
)
def test_the_rotated_order(name: str) -> None:
    """Values of a tile are multiplied one tile later: in windows, cut-off tiles and blocks that are done again, too."""
    c = case(name, d=16, d_v=20)
    assert "last_product" in Forward(c.spec, 16, 20, order=Order(rotated=True)).text().text
    check(c, tile=ROTATED)
    check(
        case(name, "bfloat16", 40, 80), tile=Tile(rows=16, keys=64, warps=4, stages=1, rotated=True), shapes=SHAPES[1:2]
    )


ZERO = {"normalizer": Normalizer.ZERO_SOFTMAX}


@pytest.mark.parametrize("options", [{"weight": True}, {"sinks": True}, {"normalizer": Normalizer.SAFE_SOFTMAX}, ZERO])
def test_the_rotated_order_of_other_normalisers(options: dict) -> None:
    check(case("left_padded_inf", d=16, **options), tile=ROTATED)


SPREAD = dataclasses.replace(SMALL, spread=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [("plain", {}), ("causal", {}), ("window", {}), ("left_padded_inf", {}), ("bias", {"weight": True}),
     ("soft_cap", {"sinks": True}), ("clamp", {"normalizer": Normalizer.NONE})],
)  # fmt: skip
def test_the_spread_order(name: str, options: dict) -> None:
    """Columns are in two panels, whose products are added up behind the condition."""
    c = case(name, d=48, d_v=20, **options)
    assert "if (first | 1) != 0:" in Forward(c.spec, 48, 20, order=Order(spread=True)).text().text
    check(c, tile=SPREAD)


def test_values_before_the_first_tile_are_not_read() -> None:
    """In the rotated order the first tile has none before it; an infinite value at a live key stays infinite."""
    c = case("window", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 100, "Nk": 100})
    operands[2][0, 0, 40] = float("inf")
    got = Kernel(c.spec, ROTATED)(operands, sizes)
    assert torch.isposinf(got[0, 0, 40:57]).all() and torch.isfinite(got[0, 0, 64 + 32 :]).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("name", ["causal_last_key", "window", "left_padded", "alibi", "documents"])
def test_heads_that_share_keys_share_a_block(name: str, splits: int | None) -> None:
    for options in ({}, {"sinks": True, "weight": True, "off_by_one": True}):
        c = case(name, "bfloat16", d=16, group=3, order=("b0", "i", "b1", "e"), **options)
        kernel = Kernel(c.spec, SMALL, splits=splits)
        for shape in ({"B": 2, "H": 2, "Nq": 1, "Nk": 75}, {"B": 1, "H": 1, "Nq": 13, "Nk": 40}):
            operands, sizes = draw(c, shape, "heads_inside")
            assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
        assert not kernel._variants  # both calls were packed


def test_which_heads_share_a_block() -> None:
    plain, grouped = case("plain").spec, case("plain", group=4).spec
    assert heads_to_pack(plain, (2, 8), 1) == 1
    assert heads_to_pack(grouped, (2, 8), 1) == heads_to_pack(grouped, (2, 8), 63) == 4
    assert heads_to_pack(grouped, (2, 8), 64) == 1  # one head's queries fill a block
    spec = packed(case("causal_last_key", group=4).spec, 4)
    assert spec.mask is not None and spec.mask.key_hi is not None  # ranges of keys are kept


@pytest.mark.parametrize(("d", "d_v"), [(48, 32), (40, 32), (32, 32)])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_values_that_are_columns_of_the_keys(name: str, d: int, d_v: int) -> None:
    """Latent attention: V is the first columns of K, which are read once; other tensors are read for themselves."""
    c = case(name, "bfloat16", d, d_v)
    kernel = Kernel(c.spec, SPREAD if d > d_v else SMALL)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 70, "Nk": 75})
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    operands[2] = operands[1][..., :d_v]
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    apart, shared = (variant.source for variant in kernel._variants.values())
    assert "v = k\n" in shared and "v_ptr" not in shared and "v_ptr" in apart


@pytest.mark.parametrize(("d", "d_v"), [(1, 1), (3, 5), (17, 31), (80, 96), (40, 24), (192, 130)])
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


@pytest.mark.parametrize("normalizer", [Normalizer.SAFE_SOFTMAX, Normalizer.ZERO_SOFTMAX])
@pytest.mark.parametrize("name", ["left_padded_inf", "bool_mask", "plain"])
def test_rows_that_are_zero(name: str, normalizer: Normalizer) -> None:
    check(case(name, d=16, normalizer=normalizer))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_of_nan_are_zero(value: float) -> None:
    c = case("left_padded_inf", d=16, normalizer=Normalizer.ZERO_SOFTMAX)
    operands, sizes = draw(c, SHAPES[0])
    operands[0][0, 0, 3, 5], operands[1][-1, 0, 9, 2] = value, value
    assert_as_exact_as_eager(Kernel(c.spec, SMALL)(operands, sizes), c, operands)


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
    assert_as_exact_as_eager(Kernel(c.spec, SMALL)(operands, sizes), c, operands)


def test_the_maximum_moves_up_late() -> None:
    c = case("bias", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 20, "Nk": 200})
    operands[3] = operands[3] + torch.linspace(-200, 200, 200) * torch.tensor([1.0, -1.0])[:, None, None]
    assert_as_exact_as_eager(Kernel(c.spec, SMALL)(operands, sizes), c, operands)


def test_panels() -> None:
    """One or two powers of two, 16 or more, that hold the columns, and never more than one alone."""
    for extent in range(1, 1025):
        parts = list(panels(extent, "c"))
        assert len(parts) <= 2 and all(part.width >= 16 and part.width & (part.width - 1) == 0 for part in parts)
        assert extent <= panelled(extent) <= padded(extent) and parts[-1].start < extent
        assert (parts[-1].inside == "") == (panelled(extent) == extent)
    assert [panelled(d) for d in (24, 40, 64, 72, 80, 96, 100, 160, 192, 576)] == [
        32,
        48,
        64,
        80,
        80,
        96,
        128,
        160,
        192,
        576,
    ]


def test_no_keys_and_no_queries() -> None:
    check(case("causal", d=16), shapes=({"B": 1, "H": 1, "Nq": 3, "Nk": 0}, {"B": 1, "H": 1, "Nq": 0, "Nk": 3}))


def test_a_module_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from fusion.codegen.triton.check import check_module

    check_module("generated.py", case("alibi", d=16).spec.to_json(), ["Nq=20", "Nk=40"])
    assert "allowed" in capsys.readouterr().out


def test_the_same_spec_gives_the_same_text() -> None:
    spec = case("left_padded", d=16).spec
    sizes = (1, 2, 33, 40)
    text = Kernel(spec).source(sizes)
    assert text == Kernel(spec.from_json(spec.to_json())).source(sizes)
    assert text.startswith(f"# block_sparse: {Kernel(spec).choice(sizes)}\n")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["plain", "causal", "left_padded", "left_padded_inf", "bias", "alibi", "documents"])
@pytest.mark.parametrize("splits", [2, 5])
def test_split_keys(name: str, splits: int) -> None:
    for options in ({}, {"sinks": True}, {"off_by_one": True}, {"normalizer": Normalizer.SAFE_SOFTMAX}):
        c = case(name, d=16, d_v=20, **options)
        for shape in ({"B": 1, "H": 2, "Nq": 3, "Nk": 150}, {"B": 1, "H": 1, "Nq": 1, "Nk": 20}):
            operands, sizes = draw(c, shape)
            got = Kernel(c.spec, SMALL, splits=splits)(operands, sizes)
            assert_as_exact_as_eager(got, c, operands)


def test_how_many_splits() -> None:
    from fusion.planning.gpu import splits_for

    assert splits_for(programs=8, n_k=16384, keys=64, processors=132) == 33
    assert splits_for(programs=8, n_k=200, keys=64, processors=132) == 1
    assert splits_for(programs=1000, n_k=16384, keys=64, processors=132) == 1


def test_heads_inside_the_last_dimension() -> None:
    """V as a projection leaves it, [B, N, H * d], its heads shared by two query heads each."""
    c = case("causal", d=16, group=2)
    head = integers.floordiv(coord("b1"), 2)
    v = Operand(dtype="float32", rank=3, name="v")
    spec = dataclasses.replace(
        c.spec, operands=(*c.spec.operands[:2], v), v=(coord("b0"), J, integers.add(integers.mul(16, head), E))
    )
    plain, sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 40})
    operands = [*plain[:2], plain[2].transpose(1, 2).flatten(2)]
    assert_as_exact_as_eager(Kernel(spec, SMALL)(operands, sizes), c, plain)
    run = Differentiable(spec, SMALL)
    out, statistics = run.outputs(operands, sizes)
    assert run.without_kernels((True, True, True)) is None
    q, k, v = run.backward(out, out, statistics, operands, sizes, (True, True, True))
    v = v.unflatten(2, (2, 16)).transpose(1, 2)
    assert_gradients_as_exact_as_eager((q, k, v), c, plain, out, (True, True, True))


def test_which_blocks_are_done_again() -> None:
    """Those of masks with a finite fill under which a row may have no live key, or scores may be as low as the fill."""
    causal, padded_rows = case("causal").spec, case("left_padded").spec
    assert causal.mask is not None
    for fill, expected in ((-math.inf, False), (-3e38, False), (-65504.0, True)):
        mask = dataclasses.replace(causal.mask, fill=fill, full=SCORE)
        assert dead_rows_matter(dataclasses.replace(causal, mask=mask)) is expected
    assert not dead_rows_matter(case("left_padded_inf").spec)
    assert dead_rows_matter(padded_rows) and dead_rows_matter(case("causal_last_key").spec)
    assert not dead_rows_matter(dataclasses.replace(padded_rows, normalizer=Normalizer.NONE))


@pytest.mark.parametrize("tile", [SMALL, ROTATED])
def test_values_at_irregular_places(tile: Tile) -> None:
    """Pairs of keys share a row of V, as where an index map divides: addresses are made anew for each tile."""
    c = case("window", d=16)
    index = (coord("b0"), coord("b1"), integers.floordiv(J, 2), E)
    spec = dataclasses.replace(c.spec, v=index)
    for shape in SHAPES:
        operands, sizes = draw(c, shape)
        read = [*operands[:2], operands[2].repeat_interleave(2, 2)[:, :, : shape["Nk"]]]
        assert_as_exact_as_eager(Kernel(spec, tile)(operands, sizes), c, read)
