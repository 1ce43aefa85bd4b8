"""Operands that are made up hold what the spec assumes of them."""

from dataclasses import replace

import pytest
import torch

from fusion.codegen.reference.operands import NotMade, Operands
from fusion.ir import Kind, Operand, integers
from fusion.ir.expr import I, J, coord, load
from fusion.ir.ops import apply
from fusion.ir.tile_map import MapSpec, lookup
from fusion.runtime.tile_map_op import tile_map
from tests.codegen.mlir.cases import BATCH, NK, NQ, PADDED, PROGRAMS, B, case, read

BIAS = Operand(dtype="float32", rank=1, name="bias")
SIZES = {"B": 2, "H": 2, "Nq": 70, "Nk": 150}


@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_as_large_as_indices_ask_for(program: str) -> None:
    spec = case(program, d=16).spec
    made = Operands(spec, SIZES, 0).tensors()
    assert [x.shape for x in made[:3]] == [(2, 2, 70, 16), (2, 2, 150, 16), (2, 2, 150, 16)]
    assert [(str(x.dtype)[6:], x.dim()) for x in made] == [(o.dtype, o.rank) for o in spec.operands]


def test_what_is_used_as_an_index_lies_within() -> None:
    """Keys in pages of 16, by a table."""
    spec = case("plain", d=16).spec
    table = load(3, (BATCH, integers.floordiv(J, 16)), Kind.INT)
    index = (table, *spec.k[1:2], integers.mod(J, 16), spec.k[3])
    spec = replace(spec, operands=(*spec.operands, Operand(dtype="int32", rank=2, name="pages")), k=index)
    _, k, _, pages = Operands(spec, SIZES, 0).tensors()
    assert pages.shape == (2, 10) and k.shape[2] == 16 and int(pages.max()) == k.shape[0] - 1 and int(pages.min()) >= 0


def test_an_index_that_may_be_negative() -> None:
    spec = case("plain", d=16).spec
    bias = read(integers.sub(J, I))
    spec = replace(
        spec, operands=(*spec.operands, Operand(dtype="float32", rank=1, name="bias")), score=spec.score + bias
    )
    with pytest.raises(NotMade, match="an operand is read before its start: bias"):
        Operands(spec, SIZES, 0).tensors()


def test_an_operand_that_is_too_large() -> None:
    spec = case("plain", d=16).spec
    far = read(integers.mul(I, 1 << 20))
    spec = replace(
        spec, operands=(*spec.operands, Operand(dtype="float32", rank=1, name="bias")), score=spec.score + far
    )
    with pytest.raises(NotMade, match=r"an operand of the shape \[\d+\] is too large: bias"):
        Operands(spec, SIZES, 0).tensors()


@pytest.mark.parametrize("rows", [False, True])
def test_a_map_of_tiles_is_that_of_the_mask(rows: bool) -> None:
    spec = case("left_padded", d=16).spec
    assert spec.mask is not None
    live = PADDED if rows else read(BATCH, J, kind=Kind.BOOL)
    tile_live, tile_mixed = lookup(4, (BATCH,), rows)
    mask = replace(spec.mask, live=live, tile_live=tile_live, tile_mixed=tile_mixed)
    tiles = Operand(dtype="int32", rank=4, name="tiles")
    *_, padding, table = Operands(replace(spec, mask=mask, operands=(*spec.operands, tiles)), SIZES, 0).tensors()
    renumbered = read(BATCH, J, kind=Kind.BOOL, operand=0)
    live = apply("and", apply("ile", J, I), renumbered) if rows else renumbered
    own = MapSpec(sizes=("B", "Nq", "Nk"), batch=(B,), n_q=NQ, n_k=NK, live=live, full=live, rows=rows)
    expected = tile_map([padding], [2, 70, 150], own.to_json())
    cells = table.diff(dim=1).diff(dim=2), expected.diff(dim=1).diff(dim=2)
    if not rows:  # the data alone says which tiles are dead
        assert torch.equal(table, expected)
    assert not bool(((cells[0] == 0) & (cells[1] > 0))[..., 0].any())
    assert not bool(((cells[0] == 0) & (cells[1] > 0))[..., 1].any())


def test_rows_rise_and_fall_and_masks_leave_some_nothing() -> None:
    spec = case("left_padded", d=16).spec
    q, k, _, padding = Operands(spec, SIZES, 0).tensors()
    scores = (q @ k.mT)[0, 0]
    later = scores[:, 100:].mean(-1) - scores[:, :50].mean(-1)
    assert bool((later[0::4] > 5).all()) and bool((later[2::4] < -5).all())
    assert coord("b0") is BATCH and not bool(padding[1, :75].any())
