"""Keys of a head cut into parts, which threads take in any order: row by row and in tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.launch import Kernel
from fusion.errors import RefusedChoiceError
from fusion.ir import Normalizer
from fusion.ir.expr import ROW_SUM
from fusion.ir.spec import AuxOutput
from fusion.machine import Machine, with_cores
from fusion.planning.choice import Choice, Tile
from fusion.planning.cpu_planner import LEAST_PART, CpuPlanner, rows_choice
from fusion.planning.register_tiles import tilings_for
from tests import emulation
from tests.codegen.mlir.cases import (
    TARGETS,
    Case,
    assert_as_exact_as_eager,
    assert_calls_as_exact_as_eager,
    case,
    draw,
    on_threads,
)  # fmt: skip
from tests.numerics import assert_same


class Parts:
    """A planner that cuts the keys into so many parts. tile: row by row where there is none."""

    def __init__(self, parts: int, tile: Tile | None = None):
        self.parts, self.tile = parts, tile

    def choose(self, sizes, existing=()) -> Choice:
        if self.tile is None:
            return rows_choice("split_k", 16, sizes[-1], self.parts)
        return Choice(schedule="split_k", tile=self.tile, keys=sizes[-1], splits=self.parts)


def kernel(c: Case, parts: int, target: str = "best", tiled: bool = False) -> Kernel:
    """tiled: in items of two register tiles of rows."""
    tilings, unit = tilings_for(c.spec, TARGETS[target]), TARGETS[target]
    rows, keys = unit.register_tile(tilings[0].planes)
    tile = Tile(rows=2 * rows, keys=64 // keys * keys) if tiled else None
    return Kernel(c.spec, tilings, unit, Parts(parts, tile))


CASES = pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("plain", {}),
        ("plain", {"normalizer": Normalizer.NONE}),
        ("plain", {"normalizer": Normalizer.SAFE_SOFTMAX, "dtype": "bfloat16"}),
        ("causal_last_key", {"group": 3}),
        ("window", {"group": 2, "dtype": "bfloat16"}),
        ("left_padded_inf", {}),
        ("left_padded", {"sinks": True}),
        ("documents", {"weight": True}),
        ("alibi", {"off_by_one": True}),
        ("soft_cap", {"d_v": 24, "group": 12}),
    ],
)


@pytest.mark.one_in(2)
@CASES
@pytest.mark.parametrize("parts", [2, 3, 16])
def test_parts_of_the_keys_are_merged(name: str, fields: dict, parts: int) -> None:
    c = case(name, **fields)
    run = kernel(c, parts)
    for n_q, n_k in ((1, 1), (1, 70), (1, 1300), (3, 2000), (8, 333)):
        operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": n_q, "Nk": n_k}, "heads_inside")
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@CASES
def test_parts_in_tiles(name: str, fields: dict) -> None:
    c = case(name, **fields)
    for parts, n_q, n_k in ((2, 17, 1300), (3, 130, 700), (3, 40, 2000), (16, 9, 5000), (4, 100, 70)):
        operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": n_q, "Nk": n_k}, "heads_inside")
        assert_as_exact_as_eager(kernel(c, parts, tiled=True)(operands, sizes), c, operands)


def test_parts_without_a_key_of_an_item() -> None:
    """Bounds of scores, on tiles of AMX: the keys of a window end before some parts begin."""
    c, target = case("window", "bfloat16"), emulation.AMX
    with emulation.compiling(target):
        tile = Tile(rows=2 * target.register_tile(1)[0], keys=64)
        run = Kernel(c.spec, tilings_for(c.spec, target), target, Parts(3, tile))
        operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 130, "Nk": 700})
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["avx2", "multiply-add", "generic"])
def test_other_vectors(target: str, dtype: str, tiled: bool) -> None:
    c = case("left_padded_inf", group=2, dtype=dtype)
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 60 if tiled else 2, "Nk": 900})
    assert_as_exact_as_eager(kernel(c, 4, target, tiled)(operands, sizes), c, operands)


def test_each_part_packs_its_own_keys() -> None:
    """Items of several blocks of rows, whose parts a single thread takes one after the other."""
    c = case("plain", d=64, d_v=64)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 300, "Nk": 3000})
    outs = on_threads(kernel(c, 5, tiled=True), operands, sizes)
    assert_as_exact_as_eager(outs[0], c, operands)
    for other in outs[1:]:
        assert_same(other, outs[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("where", [0, 2], ids=["q", "v"])
@pytest.mark.parametrize("tiled", [False, True])
def test_special_values_in_one_part(tiled: bool, where: int, value: float, parts: int) -> None:
    c = case("plain")
    run, calls = kernel(c, parts, tiled=tiled), []
    for _ in range(4):  # the error of the one large value decides: that of one call is luck
        operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 30 if tiled else 2, "Nk": 800})
        operands[where][0, 0, -1, 3] = value
        calls.append(operands)
    assert_calls_as_exact_as_eager([run(operands, sizes) for operands in calls], c, calls)


@pytest.mark.parametrize("tiled", [False, True])
def test_whoever_merges_the_result_is_the_same(tiled: bool) -> None:
    c = case("left_padded_inf", group=2)
    run = kernel(c, 8, tiled=tiled)
    operands, sizes = draw(c, {"B": 2, "H": 1, "Nq": 40 if tiled else 2, "Nk": 4000})
    first, *others = [out for _ in range(20) for out in on_threads(run, operands, sizes)]
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["best", "avx2"])
def test_keys_beyond_a_row_are_not_read(group: int, dtype: str, target: str) -> None:
    c = case("window", group=group, dtype=dtype)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 1, "Nk": 5000})
    expected = kernel(c, 1, target)(operands, sizes)
    seen = [x.clone() for x in operands]
    for x in seen[1:3]:
        x[:, :, 1:] = float("nan")  # the window of the first query ends with the first key
    assert_same(kernel(c, 7, target)(seen, sizes), expected)


@pytest.mark.parametrize("n_q", [1, 12, 40])
def test_planned_parts_do_not_depend_on_the_number_of_threads(n_q: int) -> None:
    c, target = case("causal_last_key"), TARGETS["best"]
    machine = replace(with_cores(Machine.detect(), 2), cores=2)
    run = Kernel(c.spec, tilings_for(c.spec, target), target, CpuPlanner(c.spec, machine))
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": n_q, "Nk": 20_000})
    assert run.choice(sizes).splits > 1
    outs = on_threads(run, operands, sizes)
    assert_as_exact_as_eager(outs[0], c, operands)
    assert_same(outs[1], outs[0])
    assert_same(outs[2], outs[0])


def splits(name: str, cores: int, heads: int, n_k: int, n_q: int = 1) -> Choice:
    machine = replace(Machine.detect(), cores=cores)
    return CpuPlanner(case(name).spec, machine).choose((1, heads, n_q, n_k))


def test_keys_are_cut_where_heads_do_not_fill_the_cores() -> None:
    assert splits("plain", 2, 1, 16384).splits > 1 and splits("plain", 2, 1, 16384).schedule == "split_k"
    assert splits("plain", 8, 4, 16384).splits >= 2
    assert splits("plain", 1, 1, 16384).splits == 1
    assert splits("plain", 2, 512, 1024).splits == 1
    assert splits("plain", 2, 1, 2 * LEAST_PART - 1).splits == 1
    assert splits("plain", 2, 1, LEAST_PART).schedule == "flash"


def test_a_mask_that_makes_pieces_unequal_makes_them_smaller() -> None:
    assert splits("causal_last_key", 2, 4, 16384).splits > splits("plain", 2, 4, 16384).splits
    assert splits("window", 2, 1, 16384).splits == 1  # its one key is too little work


def test_more_queries_go_row_by_row_where_that_is_predicted_to_take_less() -> None:
    tile, c = (48, 8), case("plain")

    def chosen(seconds: float, n_q: int, made: tuple[Choice, ...] = ()) -> int:
        planner = CpuPlanner(c.spec, Machine.detect(), lambda *_: {tile: seconds}, tile)
        return planner.choose((1, 8, n_q, 16), made).tile.rows

    assert [chosen(1.0, n_q) for n_q in (9, 32, 33)] == [1, 1, 48]
    assert [chosen(1e-9, n_q) for n_q in (8, 9, 32)] == [1, 48, 48]
    compiled = Choice(schedule="flash", tile=Tile(rows=48, keys=8), keys=16)
    rows = rows_choice("flash", Machine.detect().lanes(), 16)
    assert chosen(1e-4, 16, (compiled,)) == 48  # one that exists is kept, unless another saves much
    assert chosen(1.0, 16, (compiled,)) == 1
    assert chosen(1e-9, 16, (rows,)) == 1
    assert [chosen(s, 16, (rows, compiled)) for s in (1.0, 1e-9)] == [1, 48]
    assert chosen(1e-9, 33, (rows,)) == 48
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 31, "Nk": 45})
    assert_as_exact_as_eager(kernel(c, 1)(operands, sizes), c, operands)


def test_pairs_of_bfloat16_are_predicted_to_take_less_where_rows_share_keys() -> None:
    """So more queries go row by row."""
    plain = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"})

    def seconds(dtype: str, isa: frozenset[str], d: int = 64) -> float:
        machine = replace(Machine.detect(), isa=isa, cores=1)
        planner = CpuPlanner(case("plain", dtype, d, d).spec, machine)
        return planner._seconds(rows_choice("flash", 16, 4096), (1, 8, 16, 4096))

    pairs = plain | {"avx512_bf16"}
    assert seconds("bfloat16", pairs) < 0.6 * seconds("bfloat16", plain)
    assert seconds("float32", pairs) == seconds("float32", plain)
    assert seconds("bfloat16", pairs, 40) == seconds("bfloat16", plain, 40)


@pytest.mark.parametrize("target", ["best", "avx2"])
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (32, 96), (48, 64), (64, 24), (8, 256)])
def test_bfloat16_in_pairs_of_elements(d: int, d_v: int, target: str) -> None:
    c = case("bias", "bfloat16", d, d_v, group=2)
    for layout in ("packed", "columns", "gaps"):
        operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 2, "Nk": 77}, layout)
        assert_as_exact_as_eager(kernel(c, 1, target)(operands, sizes), c, operands)


def test_keys_are_cut_where_blocks_of_rows_do_not_fill_the_cores() -> None:
    one = splits("plain", 2, 1, 16384, n_q=40)
    assert one.splits > 1 and one.schedule == "split_k" and one.tile.rows > 1
    assert splits("plain", 1, 1, 16384, n_q=40).splits == 1
    assert splits("plain", 2, 2, 16384, n_q=40).splits == 1
    assert splits("plain", 2, 3, 16384, n_q=40).splits > 1  # a third block, for two cores
    assert splits("plain", 2, 1, 2 * LEAST_PART - 1, n_q=40).splits == 1
    many = splits("plain", 64, 1, 50176, n_q=256)
    assert many.splits >= 16 and many.tile.rows * many.splits >= 64 * 48


def test_blocks_that_do_not_fit_the_cache_are_not_weighed() -> None:
    machine = replace(Machine.detect(), cores=2)
    wide = CpuPlanner(case("plain", d=1024, d_v=1024).spec, machine)
    assert wide.choose((1, 1, 500, 4096)).splits == 1


def test_further_outputs_keep_whole_keys() -> None:
    c = case("plain")
    sums = AuxOutput(value=ROW_SUM, dims=("b0", "b1", "i"), dtype="float32")
    spec = replace(c.spec, aux_outputs=(sums,))
    machine = replace(Machine.detect(), cores=2)
    assert CpuPlanner(spec, machine).choose((1, 1, 40, 16384)).splits == 1
    with pytest.raises(RefusedChoiceError, match="more than the output is wanted"):
        kernel(replace(c, spec=spec), 2, tiled=True).prepare((1, 1, 40, 16384))
