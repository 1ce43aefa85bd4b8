"""K and V read by tensor descriptors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from benchmarks.offline.facts import compile_offline
from fusion.codegen.triton.autotune import Tuner
from fusion.codegen.triton.backward import backward_kernels
from fusion.codegen.triton.descriptors import READ, boxes
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import Kernel, forward_kernels
from fusion.codegen.triton.variant import Variant
from fusion.ir import Normalizer, Operand, integers
from fusion.ir.expr import C, E, J, coord
from fusion.machine import INTERPRETER, of_target
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from tests.codegen.mlir.cases import (
    Case,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
)
from tests.codegen.triton.test_backward import check as check_gradients

PLAIN = Tile(rows=32, keys=32, warps=4, stages=1)
DESCRIBED = dataclasses.replace(PLAIN, described=True)
ROTATED = dataclasses.replace(DESCRIBED, rotated=True)
SHAPES = (
    {"B": 2, "H": 1, "Nq": 80, "Nk": 40},
    {"B": 1, "H": 2, "Nq": 17, "Nk": 75},
    {"B": 1, "H": 1, "Nq": 1, "Nk": 1},
)


def check(c: Case, tile: Tile, layout: str = "packed", shapes=SHAPES) -> Kernel:
    kernel = Kernel(c.spec, tile)
    for shape in shapes:
        operands, sizes = draw(c, shape, layout)
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    return kernel


def described(kernel: Kernel) -> list[bool]:
    """Of each module that the calls made, whether it reads K by a descriptor."""
    return ["k_tiles.load(" in variant.source for variant in kernel._variants.values()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tile", [DESCRIBED, ROTATED], ids=str)
@pytest.mark.parametrize("name", ["causal_last_key", "window", "left_padded", "bias"])
def test_outputs(name: str, tile: Tile) -> None:
    assert described(check(case(name, d=16, d_v=20), tile)) == [True]
    c = case(name, "bfloat16", 40, 80, group=2, order=("b0", "i", "b1", "e"))
    assert described(check(c, tile, "heads_inside", SHAPES[:1])) == [True]


@pytest.mark.parametrize(
    "options", [{"sinks": True}, {"off_by_one": True, "weight": True}, {"normalizer": Normalizer.NONE}]
)
def test_normalisers(options: dict) -> None:
    check(case("sigmoid", d=16, **options), DESCRIBED)


@pytest.mark.parametrize("layout", ["columns", "gaps"])
def test_tensors_that_cannot_be_described(layout: str) -> None:
    """The columns are not side by side; the first element is not aligned."""
    kernel = check(case("causal", d=16), DESCRIBED, layout, SHAPES[:1])
    assert described(kernel) == [True, False]  # what was looked at, and what ran


def test_tensors_that_are_expanded() -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 3, "Nq": 40, "Nk": 40})
    operands[1] = operands[1][:, :1].expand(operands[1].shape)
    kernel = Kernel(c.spec, DESCRIBED)
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert described(kernel) == [True, False]


@pytest.mark.parametrize("rotated", [False, True])
def test_what_lies_behind_the_keys_is_not_read(rotated: bool) -> None:
    """A cache that is filled up to some key: what follows there may be anything."""
    c = case("plain", d=40)
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 75})
    for number in (1, 2):
        cache = torch.full((2, 2, 96, 48), float("nan"))
        cache[:, :, :75, :40] = operands[number]
        operands[number] = cache[:, :, :75, :40]
    kernel = Kernel(c.spec, dataclasses.replace(DESCRIBED, rotated=rotated))
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert described(kernel) == [True]


def test_values_before_the_first_tile_are_not_read() -> None:
    """In the rotated order the first tile has none before it; infinite values there would make the sum NaN."""
    c = case("window", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 128, "Nk": 128})
    operands[2][0, 0, :32] = float("inf")
    got = Kernel(c.spec, dataclasses.replace(DESCRIBED, rotated=True))(operands, sizes)
    assert torch.isfinite(got[0, 0, 64:]).all()


@pytest.mark.parametrize("name", ["causal_last_key", "window", "left_padded", "bias"])
def test_gradients(name: str, monkeypatch) -> None:
    launched = []
    real = Variant.launch
    monkeypatch.setattr(Variant, "launch", lambda self, *rest: launched.append((self, rest[0])) or real(self, *rest))
    check_gradients(case(name, d=16, d_v=20), tile=DESCRIBED)
    c = case(name, "bfloat16", 40, 80, group=2, order=("b0", "i", "b1", "e"))
    check_gradients(c, "heads_inside", DESCRIBED, SHAPES[1:2])
    sources = [(variant.source, READ[kernel]) for variant, kernel in launched if kernel in READ]
    assert sources and all(f"{read}_tiles.load(" in text for text, names in sources for read in names)


def test_gradients_of_an_expanded_gradient() -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 40, "Nk": 40})
    run = Differentiable(c.spec, DESCRIBED)
    out, statistics = run.outputs(operands, sizes)
    for grad in (torch.ones(()).expand(out.shape), torch.ones_like(out)):
        got = run.backward(grad, out, statistics, operands, sizes, (True, True, True))
        assert_gradients_as_exact_as_eager(got, c, operands, grad, (True, True, True))


@pytest.mark.parametrize("splits", [1, 3])
def test_decoding(splits: int) -> None:
    c = case("left_padded", d=16, group=2)
    for shape in ({"B": 2, "H": 2, "Nq": 1, "Nk": 150}, {"B": 1, "H": 1, "Nq": 5, "Nk": 40}):
        operands, sizes = draw(c, shape)
        kernel = Kernel(c.spec, DESCRIBED, splits=splits)
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
        (packed,) = kernel._packing.values()
        assert described(packed) == [True]


def test_heads_inside_the_last_dimension() -> None:
    """K as a projection leaves it, [B, N, H * d]: a head's columns begin somewhere in the dimension."""
    for d, expected in ((16, True), (20, False)):  # the columns of a head that are padded would be the next head's
        c = case("causal", d=d)
        columns = integers.add(integers.mul(d, coord("b1")), C)
        k = Operand(dtype="float32", rank=3, name="k")
        spec = dataclasses.replace(
            c.spec, operands=(c.spec.operands[0], k, c.spec.operands[2]), k=(coord("b0"), J, columns)
        )
        (q, k, v), sizes = draw(c, {"B": 2, "H": 2, "Nq": 20, "Nk": 40})
        kernel = Kernel(spec, DESCRIBED)
        assert_as_exact_as_eager(kernel([q, k.transpose(1, 2).flatten(2), v], sizes), c, [q, k, v])
        assert described(kernel) == [expected]


def test_which_operands_are_boxes() -> None:
    spec = case("plain", d=16, group=2).spec
    assert set(boxes(spec, 16, 16)) == {"q", "k", "v", "do"}
    turned = dataclasses.replace(spec, k=(*spec.k[:2], C, J))  # stored as K^T: its columns are brought to the end
    assert boxes(turned, 16, 16)["k"].dims == (0, 1, 3, 2)
    b, h = spec.v[:2]
    for index in ((b, h, integers.floordiv(J, 2), E), (b, h, integers.add(J, 1), E), (b, h, integers.add(J, E), E)):
        assert set(boxes(dataclasses.replace(spec, v=index), 16, 16)) == {"q", "k", "do"}


def test_a_tuned_form_is_left_where_tensors_cannot_be_described(monkeypatch, own_cache) -> None:
    launched: list[tuple[Variant, Tile]] = []
    real = Variant.launch

    def launch(self, name: str, programs: int, tile: Tile, *rest) -> None:
        launched.append((self, tile))
        real(self, name, programs, tile, *rest)

    monkeypatch.setattr(Variant, "launch", launch)
    c = case("soft_cap", "bfloat16", 16)  # which no kernel of SDPA computes
    planner = GpuPlanner(c.spec, INTERPRETER, tile=dataclasses.replace(PLAIN, rows=64))
    kernel = Kernel(
        c.spec,
        tuner=Tuner(clock=lambda launch, device: float(not launched[-1][1].described)),
        plan=lambda machine: planner,
    )
    for shared in (False, True):
        operands, sizes = draw(c, SHAPES[0])
        if shared:
            operands[1] = operands[1][:1].expand(operands[1].shape)
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
        variant, tile = launched[-1]
        assert tile.described and ("k_tiles.load(" in variant.source) != shared


@pytest.mark.parametrize(("name", "d"), [("causal", 128), ("alibi", 64)])
def test_registers_on_hopper(name: str, d: int) -> None:
    """Descriptors free registers; no form spills, loses products or serialises them."""
    spec, tile = case(name, "bfloat16", d).spec, Tile(rows=128, keys=64, warps=8, stages=3)
    found = []
    for order in (Order(), Order(described=True), Order(rotated=True, described=True)):
        kernels = forward_kernels(spec, d, d, False, order)
        (fact,) = compile_offline(spec, kernels, d, d, {kernels[0].name: tile}, "sm_90")
        assert fact.fits and not fact.spills and not fact.warnings and fact.matrix["wgmma"], fact
        found.append(fact.registers)
    assert found[1] < found[0]


def test_registers_of_gradients_on_hopper() -> None:
    spec = case("plain", "bfloat16", 64).spec
    texts = [backward_kernels(spec, 64, 64, (True, True, True), described)[1:] for described in (False, True)]
    tiles = GpuPlanner(spec, of_target("sm_90")).backward(64, 64)
    facts = [compile_offline(spec, kernels, 64, 64, tiles, "sm_90") for kernels in texts]
    for plain, described in zip(*facts, strict=True):
        assert (
            (described.registers, described.spills) < (plain.registers, plain.spills)
            and described.fits
            and described.matrix["wgmma"]
        ), described
        assert not described.spills and not described.warnings and not described.lost, described


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_targets(target: str) -> None:
    """Where there is no such unit, Triton makes pointers of descriptors."""
    spec = case("causal", "bfloat16", 80).spec
    kernels = forward_kernels(spec, 80, 80, False, Order(described=True))
    tile = Tile(rows=64, keys=32, warps=4, stages=2 if target.startswith("sm") else 1)
    (fact,) = compile_offline(spec, kernels, 80, 80, {kernels[0].name: tile}, target)
    assert fact.fits and not fact.lost and any(fact.matrix.values()), fact
