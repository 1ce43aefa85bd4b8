"""Decoding on CPUs over keys in pages, and over keys of which data says that they are dead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.mlir.x86 import LANES
from fusion.ir import Kind, MaskFacts, integers
from fusion.ir.expr import C, E, J, coord, load
from fusion.lowering.addresses import runs
from tests.codegen.mlir.cases import (
    BATCH,
    FMIN,
    INF,
    Case,
    assert_as_exact_as_eager,
    case,
    draw,
    fill_where,
    masked,
    read,
    tensor,
)  # fmt: skip
from tests.codegen.mlir.test_parts import kernel
from tests.numerics import assert_same

NAN = math.nan


def in_pages(c: Case, page: int) -> Case:
    """The same, with keys that are found through a table, the last operand."""
    table = load(len(c.spec.operands), (BATCH, integers.floordiv(J, page)), Kind.INT)
    k, v = ((table, integers.mod(J, page), index[1], column) for index, column in ((c.spec.k, C), (c.spec.v, E)))
    return replace(c, spec=replace(c.spec, k=k, v=v, operands=(*c.spec.operands, tensor("table", 2, "int64"))))


def stored(operands: list[torch.Tensor], page: int, transposed: bool = False) -> list[torch.Tensor]:
    """K and V as pages [pages, page, H, d] in any order, NaN in all other places, and the table behind."""
    q, k, v, *rest = operands
    count = -(-k.shape[2] // page)
    table = torch.randperm(2 * k.shape[0] * count)[: k.shape[0] * count].view(-1, count)
    pools = []
    for x in (k, v):
        pool = torch.full((2 * table.numel(), page, x.shape[1], x.shape[3]), NAN, dtype=x.dtype)
        if transposed:
            pool = pool.mT.contiguous().mT
        for b, row in enumerate(table):
            filled = torch.full((count * page, *pool.shape[2:]), NAN, dtype=x.dtype)
            filled[: x.shape[2]] = x[b].transpose(0, 1)
            pool[row] = filled.view(count, page, *pool.shape[2:])
        pools.append(pool)
    return [q, *pools, *rest, table]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", [1, 4, 8, 12, 16, 24, 32, 64])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("plain", {}),
        ("plain", {"group": 4}),
        ("window", {"group": 2}),
        ("window", {"dtype": "bfloat16"}),
        ("left_padded_inf", {"group": 4, "dtype": "bfloat16"}),
        ("documents", {"d_v": 24, "group": 3}),
    ],
)
def test_pages(name: str, fields: dict, page: int) -> None:
    c = case(name, **fields)
    for parts in (1, 3):
        run = kernel(in_pages(c, page), parts)
        for n_q, n_k in ((1, 1), (1, 77), (3, 1200), (20, 333)):
            operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": n_q, "Nk": n_k})
            assert_as_exact_as_eager(run(stored(operands, page), sizes), c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("target", ["multiply-add", "avx2", "generic"])
def test_pages_on_other_targets(target: str, group: int) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        c = case("window", dtype, group=group)
        operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 2, "Nk": 200})
        assert_as_exact_as_eager(kernel(in_pages(c, 16), 1, target)(stored(operands, 16), sizes), c, operands)


@pytest.mark.parametrize("group", [1, 4])
def test_pages_whose_columns_are_apart(group: int) -> None:
    c = case("plain", group=group)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 1, "Nk": 200})
    assert_as_exact_as_eager(kernel(in_pages(c, 16), 1)(stored(operands, 16, True), sizes), c, operands)


def test_runs() -> None:
    b0, table = coord("b0"), lambda *index: load(3, index, Kind.INT)
    page, offset = (lambda n: integers.floordiv(J, n)), (lambda n: integers.mod(J, n))
    zero, one = map(integers.integer, (0, 1))
    assert runs((table(b0, page(16)), offset(16), C), J) == (16, (zero, one, zero))
    assert runs((integers.add(integers.mul(16, table(page(16))), offset(16)), C), J)[0] == 16  # pages of one dimension
    assert runs((table(page(32)), table(page(24)), integers.mul(3, offset(24))), J)[0] == 8
    assert runs((table(b0, J), C), J)[0] == 1  # a table of keys
    assert runs((table(b0, page(16)), table(J)), J)[0] == 1
    assert runs((integers.floordiv(integers.add(table(page(8)), offset(8)), 48), C), J)[0] == 1
    assert runs((integers.mul(table(page(8)), offset(8)), C), J)[0] == 1
    assert runs((table(page(8)), integers.mul(C, offset(8))), J)[0] == 1
    assert runs((b0, J, C), J)[0] == 1  # at one distance: known otherwise


# --- dead keys --------------------------------------------------------------------------------------------------------


def by_data(fill: float, **fields) -> Case:
    """Keys that a mask [B, Nk] leaves."""
    c, live = case("padding", **fields), read(BATCH, J, kind=Kind.BOOL)
    eager = lambda s, i, j, mask: masked(s, mask[:, None, None], fill)
    spec = replace(c.spec, score=fill_where(live, fill)(c.spec.score.args[1]), mask=MaskFacts(live=live, fill=fill))
    return replace(c, spec=spec, program=replace(c.program, eager=eager))


ENDS = [(0, 0), (0, 1), (0, 16), (0, 700), (3, 4), (16, 700), (333, 334), (690, 700), (699, 700), (17, 650)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("fill", [-INF, FMIN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dead_ends(dtype: str, fill: float, group: int, parts: int) -> None:
    """Rows without a live key are what they are in eager mode, too: NaN, or a mean over all keys."""
    c = by_data(fill, dtype=dtype, group=group)
    run = kernel(c, parts)
    operands, sizes = draw(c, {"B": len(ENDS), "H": 2, "Nq": 1, "Nk": 700})
    for row, (low, high) in zip(operands[3], ENDS, strict=True):
        row[low:high] = True
        row[:low] = row[high:] = False
    operands[3][-1, 200:500] = False
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("group", [1, 4])
def test_dead_ends_are_not_read(group: int, page: int | None, parts: int) -> None:
    c = by_data(-INF, group=group)
    run = kernel(c if page is None else in_pages(c, page), parts)
    for low, high in ENDS[1:]:
        operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 1, "Nk": 700})
        operands[3][:] = (torch.arange(700) >= low) & (torch.arange(700) < high)
        first, end = low // LANES * LANES, -(-high // LANES) * LANES
        given = [x.clone() for x in operands]
        for x in given[1:3]:
            x[:, :, :first] = x[:, :, end:] = NAN
        out, clean = (run(x if page is None else stored(x, page), sizes) for x in (given, operands))
        assert_same(out, clean)
        assert_as_exact_as_eager(out, c, operands)
