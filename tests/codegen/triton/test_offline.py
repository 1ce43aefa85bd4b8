"""Kernels compiled for GPUs that are not here: they fit, keep their stores, and use the matrix units."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks import offline
from benchmarks.offline.facts import Facts, OfflineCompilationError, compile_offline, facts_of
from fusion.codegen.triton import ahead_of_time
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import Kernel, combining_tile, forward_kernels, order_of, split_kernels
from fusion.ir import integers
from fusion.ir.expr import ROW_MAX, ROW_SUM
from fusion.ir.spec import AuxOutput
from fusion.machine import of_target
from fusion.planning import gpu_layout
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from tests.codegen.mlir.cases import case
from tests.codegen.triton.whole import whole

MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
LONG = pytest.mark.long


def check(facts: list[Facts]) -> None:
    for fact in facts:
        assert fact.fits, fact
        assert not fact.lost, fact
        assert not fact.warnings, fact
        if fact.kernel != "attention_backward_prepare":
            assert fact.matrix[MATRIX[fact.target]] > 0, fact


@pytest.mark.parametrize(
    ("n_q", "names"), [(1024, ["attention_forward"]), (1, ["attention_split", "attention_combine"])]
)
def test_resources_of_a_call(n_q: int, names: list[str]) -> None:
    """Facts of the kernels that it would run, in their tiles."""
    spec, target = case("plain", "bfloat16", 64).spec, "sm_90"
    kernel, sizes = Kernel(spec, plan=lambda _: GpuPlanner(spec, of_target(target))), (4, 16, n_q, 8192)
    resources = kernel.resources(sizes, target)
    assert [each.kernel for each in resources] == names
    tile = kernel.choice(sizes).tile
    kernels = (
        forward_kernels(spec, 64, 64, False, order_of(tile, False, False, 1))
        if n_q > 1
        else split_kernels(spec, 64, 64, False, order_of(tile, True, False, 1))
    )
    tiles = {names[0]: tile, names[-1]: tile if n_q > 1 else combining_tile(tile)}
    for each, fact in zip(resources, compile_offline(spec, kernels, 64, 64, tiles, target), strict=True):
        assert (each.registers, each.spills, each.shared) == (fact.registers, fact.spills, fact.shared)
        assert fact.fits and fact.registers


@pytest.mark.parametrize("target", MATRIX)
def test_forward_on_every_target(target: str) -> None:
    check(facts_of(case("alibi", "bfloat16", 64, group=4).spec, target))


@pytest.mark.parametrize("target", [t if t in ("sm_90", "gfx942") else pytest.param(t, marks=LONG) for t in MATRIX])
def test_statistics_of_rows_on_every_target(target: str) -> None:
    """With a column of ones in the place of V: its rows' maxima and sums."""
    rows = (AuxOutput(value=value, dims=("b0", "b1", "i"), dtype="float32") for value in (ROW_MAX, ROW_SUM))
    spec = replace(case("causal", "bfloat16", 64).spec, d_v=integers.integer(1), aux_outputs=tuple(rows))
    forward, aux = facts_of(spec, target)
    check([forward])
    assert aux.fits and not aux.lost and not aux.warnings


def test_float32_does_not_spill_on_hopper() -> None:
    facts = facts_of(case("causal", "float32", 64).spec, "sm_90", training=True)
    assert all(fact.fits and not fact.spills and not fact.lost for fact in facts), facts


@pytest.mark.parametrize("d", [pytest.param(64, marks=LONG), 128])
def test_loops_do_not_spill_on_hopper(d: int) -> None:
    facts = facts_of(whole(case("causal", "bfloat16", d).spec), "sm_90", training=True)
    check(facts)
    assert all(fact.spilled < 0.01 for fact in facts), facts


@pytest.mark.parametrize(("name", "d"), [("bool_mask", 128), pytest.param("bias", 64, marks=LONG)])
def test_matrices_of_scores_serialise_nothing(name: str, d: int) -> None:
    """A tensor with an element for every score, read in each tile, with its gradient."""
    facts = facts_of(case(name, "bfloat16", d).spec, "sm_90", training=True)
    check(facts)
    assert all(fact.spilled < 0.01 for fact in facts), facts


@pytest.mark.parametrize("name", ["window", *(pytest.param(name, marks=LONG) for name in ("plain", "causal"))])
def test_products_run_beside_the_exponentials_on_hopper(name: str) -> None:
    """In the rotated order a product is in flight while a tile's exponentials are issued; in the plain one none is."""
    spec = case(name, "bfloat16", 128).spec
    tile = Tile(rows=128, keys=64, warps=8, stages=3)
    for rotated in (False, True):
        kernels = forward_kernels(spec, 128, 128, False, Order(rotated=rotated))
        (fact,) = compile_offline(spec, kernels, 128, 128, {kernels[0].name: tile}, "sm_90")
        every, under = fact.exponentials
        assert not fact.spills and not fact.warnings, fact
        assert under > 0.9 * every if rotated else under == 0, fact


@pytest.mark.parametrize(
    ("d", "d_v"),
    [(192, 128), (576, 512), *(pytest.param(d, d, marks=LONG) for d in (80, 96, 256, 512))],
)
def test_heads_of_every_width_on_hopper(d: int, d_v: int) -> None:
    facts = facts_of(whole(case("causal", "bfloat16", d, d_v).spec), "sm_90")
    check(facts)
    assert all(fact.spilled < 0.01 for fact in facts), facts


@pytest.mark.parametrize(
    ("name", "d", "d_v"),
    [pytest.param("alibi", 96, 96, marks=LONG), pytest.param("causal", 192, 128, marks=LONG), ("bias", 256, 256)],
)
def test_gradients_of_wide_heads_on_hopper(name: str, d: int, d_v: int) -> None:
    spec = case(name, "bfloat16", d, d_v).spec
    facts = {fact.kernel: fact for fact in facts_of(spec, "sm_90", training=True)}
    queries = facts["attention_backward_queries"]
    assert queries.fits and queries.spilled < 0.01 and not queries.warnings and queries.matrix["wgmma"], queries


@pytest.mark.parametrize("n_q", [pytest.param(1, marks=LONG), 16])
def test_latent_attention_on_hopper(n_q: int) -> None:
    """Decoding with 128 query heads for one key head; V is read from K's tile."""
    spec = gpu_layout.packed(case("plain", "bfloat16", 576, 512, group=128).spec, 128)
    tile = GpuPlanner(spec, of_target("sm_90")).tile_for(128 * n_q, 16384, 576, 512)
    order = order_of(tile, split=False, shared=True, packed=128)
    tiles = {"attention_forward": tile, "attention_split": tile, "attention_combine": combining_tile(tile)}
    for kernels in (split_kernels(spec, 576, 512, False, order), forward_kernels(spec, 576, 512, False, order)):
        for fact in compile_offline(spec, kernels, 576, 512, tiles, "sm_90"):
            assert fact.fits and not fact.warnings and not fact.lost and fact.spilled < 0.01, fact
            assert fact.matrix["wgmma"] or fact.kernel == "attention_combine", fact


def packed(q, k, v, numbers):
    i, j = torch.arange(256)[:, None], torch.arange(256)
    keep = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (j <= i)
    return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf), -1) @ v


@pytest.mark.parametrize("apart", [pytest.param(False, marks=LONG), True])
@pytest.mark.parametrize("d", [pytest.param(64, marks=LONG), 128])
def test_loops_do_not_spill_where_tiles_are_listed(d: int, apart: bool) -> None:
    inputs = [torch.randn(2, 2, 256, d, dtype=torch.bfloat16) for _ in range(3)]
    numbers = torch.arange(256).div(50, rounding_mode="floor")[None].repeat(2, 1)
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True, "tile_maps": "always"}
    with torch.no_grad(), fusion.collect_reports() as reports:
        torch.compile(packed, backend="fusion", options=options)(*inputs, numbers)
    facts = {fact.kernel: fact for fact in facts_of(reports[0].sites[0].spec, "sm_90", training=True, apart=apart)}
    assert {"attention_tiles", "attention_row_blocks", *(["attention_key_tiles"] if apart else [])} < facts.keys()
    for name, fact in facts.items():
        # C7519 says of dQ's product that an instruction was put before it; no product waits for another.
        expected = ("C7519",) if name == "attention_backward_joint" else ()
        assert fact.fits and fact.spilled < 0.01 and not fact.lost and fact.warnings == expected, fact
        assert bool(fact.matrix["wgmma"]) == (name.split("_")[-1] in ("forward", "queries", "keys", "alone", "joint"))


@pytest.mark.parametrize("name", ["bucket_table", pytest.param("causal", marks=LONG)])
def test_atomic_additions_survive(name: str) -> None:
    facts = facts_of(case(name, "bfloat16", 64).spec, "sm_90", training=True)
    assert not any(fact.lost for fact in facts), facts
    assert name != "causal" or facts[-1].kernel == "attention_backward_joint"


@LONG
@pytest.mark.parametrize("target", MATRIX)
@pytest.mark.parametrize("d", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["plain", "left_padded", "bias", "soft_cap", "documents"])
def test_more(name: str, dtype: str, d: int, target: str) -> None:
    for fact in facts_of(case(name, dtype, d).spec, target, training=d <= 128):
        assert fact.fits, fact
        assert not fact.lost, fact


def test_split_keys_on_hopper() -> None:
    spec = gpu_layout.packed(case("causal", "bfloat16", 128, group=4).spec, 4)
    tile = GpuPlanner(spec, of_target("sm_90")).tile_for(4, 16384, 128, 128)
    kernels = split_kernels(spec, 128, 128, False, Order(packed=4))
    part, combine = compile_offline(spec, kernels, 128, 128, {k.name: tile for k in kernels}, "sm_90")
    assert part.fits and part.matrix["mma"] > 0 and part.spills == 0, part
    assert not part.lost and not combine.lost


def test_kernels_compile_after_others_were_interpreted(tmp_path, monkeypatch) -> None:
    """In one process, and not from Triton's cache."""
    from fusion.codegen.triton.launch import Kernel
    from fusion.planning.choice import Tile
    from tests.codegen.mlir.cases import draw

    c = case("alibi", "bfloat16", 64)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 8, "Nk": 8})
    Kernel(c.spec, Tile(rows=16, keys=16, warps=4, stages=1))(operands, sizes)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    check(facts_of(c.spec, "sm_80"))
    assert any(tmp_path.iterdir())


def test_a_kernel_that_ptxas_refuses_is_an_error(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no such target")
    monkeypatch.setattr(ahead_of_time.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(OfflineCompilationError, match="ptxas refused the kernel for sm_1: no such target"):
        offline.facts._nvidia(".target sm_1", "sm_1")
