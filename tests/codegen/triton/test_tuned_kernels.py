"""Kernels whose tiles are measured, or do not fit: their results and gradients in Triton's interpreter, with injected
clocks and refused launches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from triton.runtime.errors import OutOfResources, PTXASError

from fusion.codegen.triton.autotune import Tuner, agree
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.codegen.triton.variant import Variant
from fusion.planning.choice import Choice, Tile
from fusion.runtime.guards import failures_raised
from tests import numerics
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_gradients_as_exact_as_eager, case, draw

SHAPE = {"B": 1, "H": 2, "Nq": 20, "Nk": 20}
REFUSALS = [
    OutOfResources(300_000, 232_448, "shared memory"),
    PTXASError("ptxas error: Entry function 'attention_forward' uses too much shared data"),
    RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
]


pytestmark = pytest.mark.usefixtures("own_cache", "interpreters_tiles")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tile]]:
    """The kernels that were launched, with their tiles."""
    seen: list[tuple[str, Tile]] = []
    real = Variant.launch

    def launch(self, name: str, programs: int, tile: Tile, *rest) -> None:
        seen.append((name, tile))
        real(self, name, programs, tile, *rest)

    monkeypatch.setattr(Variant, "launch", launch)
    return seen


class Clock:
    """Seconds of the last launch, by kernel and tile."""

    def __init__(self, launched: list[tuple[str, Tile]], seconds: Callable[[str, Tile], float]):
        self.launched, self.seconds, self.calls = launched, seconds, 0

    def __call__(self, launch: Callable[[], None], device: torch.device) -> float:
        self.calls += 1
        return self.seconds(*self.launched[-1])


def prefers(rows: int, keys: int) -> Callable[[str, Tile], float]:
    return lambda name, tile: 1.0 + abs(math.log2(tile.rows / rows)) + abs(math.log2(tile.keys / keys))


def tile_of(kernel: Kernel, sizes: list[int]) -> tuple[int, int]:
    tile = kernel.choice(sizes).tile
    return tile.rows, tile.keys


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_kernel_runs_in_the_fastest_tile(launched) -> None:
    c = case("alibi", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=Clock(launched, prefers(16, 32))))
    assert tile_of(kernel, sizes) == (32, 16) and not kernel.choice(sizes).measured
    for _ in range(2):
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert [(tile.rows, tile.keys) for _, tile in launched[-2:]] == [(16, 32)] * 2
    assert kernel.choice(sizes) == Choice(schedule="block_sparse", tile=launched[-1][1], keys=sizes[-1], measured=True)
    launched.clear()
    another = Kernel(c.spec, tuner=Tuner())
    another(operands, sizes)
    assert [(tile.rows, tile.keys) for _, tile in launched] == [(16, 32)]
    assert tile_of(another, sizes) == (16, 32)
    assert tile_of(Kernel(c.spec), sizes) == (32, 16)


def test_schedules_are_tried_at_the_fastest_tile(launched) -> None:
    """First tiles with the table's schedule, then the fastest of them with others; what is faster still is taken."""
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)

    def seconds(name: str, tile: Tile) -> float:
        return prefers(16, 32)(name, tile) - 0.1 * tile.described

    kernel = Kernel(c.spec, tuner=Tuner(clock=Clock(launched, seconds)))
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    tiles = list(dict.fromkeys(tile for _, tile in launched))
    plain = [tile for tile in tiles if not (tile.described or tile.rotated)]
    assert tiles[: len(plain)] == plain and {(t.rows, t.keys) for t in tiles[len(plain) :]} == {(16, 32)}
    assert launched[-1][1].described and (launched[-1][1].rows, launched[-1][1].keys) == (16, 32)


@pytest.mark.parametrize("wrong", ["another value", "nothing written"])
def test_a_tile_with_another_result_is_not_used(wrong: str, launched, monkeypatch, caplog) -> None:
    """As of a compiler's mistake: forward and backward kernels are tried, but not chosen."""
    real, spoilt = Variant.launch, {"attention_forward": 32, "attention_backward_keys": 16}  # not the table's keys

    def launch(self, name: str, programs: int, tile: Tile, precision: str, arguments: tuple) -> None:
        if tile.keys != spoilt.get(name):
            real(self, name, programs, tile, precision, arguments)
        elif wrong == "another value":
            real(self, name, programs, tile, precision, arguments)
            arguments[2]["out" if name == "attention_forward" else "dv"][..., -1, :].mul_(1.1)
        else:
            launched.append((name, tile))

    monkeypatch.setattr(Variant, "launch", launch)
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    clock = Clock(launched, lambda name, tile: float(tile.keys != spoilt.get(name)))
    run = Differentiable(c.spec, tuner=Tuner(clock=clock))
    out, statistics = run.outputs(operands, sizes)
    assert_as_exact_as_eager(out, c, operands)
    got = run.backward(out, out, statistics, operands, sizes, (True, True, True))
    assert_gradients_as_exact_as_eager(got, c, operands, out, (True, True, True))
    assert all((name, keys) in {(n, tile.keys) for n, tile in launched} for name, keys in spoilt.items())
    assert all(f"{name} in tiles of" in caplog.text for name in spoilt)


def test_when_results_agree() -> None:
    torch.manual_seed(0)
    exact = torch.randn(3, 50, 64, dtype=torch.float64)
    exact[1] *= 1e-3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first, second = exact.to(dtype), (exact * (1 + torch.finfo(dtype).eps)).to(dtype)
        assert agree(first, second)
        second[0, 3, :16] = 0  # a tile of columns left out
        assert not agree(second, first)
        for value in (math.nan, math.inf):
            assert not agree(torch.full_like(first, value), first)
            first[2, 4, 5] = value
            assert agree(first, first.clone())


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "bucket_table"])
def test_gradients_are_right_while_measuring_and_after(name: str, launched) -> None:
    """Gradients of captured tensors are added up: those that were added while measuring must be gone."""
    c = case(name, d=16)
    spec = c.spec
    operands, sizes = draw(c, SHAPE)
    needs_ = tuple(o.is_floating_point() for o in operands)
    clock = Clock(launched, prefers(16, 16))
    run = Differentiable(spec, tuner=Tuner(clock=clock))
    alone = Differentiable(spec, Tile(rows=16, keys=16, warps=4, stages=1))
    for turn in range(2):
        out, statistics = run.outputs(operands, sizes)
        grad = torch.randn(out.shape)
        before = clock.calls
        got = run.backward(grad, out, statistics, operands, sizes, needs_)
        assert (clock.calls > before) == (turn == 0)
        seen = list(launched)
        for ours, theirs in zip(got, alone.backward(grad, out, statistics, operands, sizes, needs_), strict=True):
            assert torch.equal(ours, theirs)
        launched[:] = seen
    last = dict(launched)
    for kernel in ("attention_backward_queries", "attention_backward_keys"):
        assert (last[kernel].rows, last[kernel].keys) == (16, 16)


def packed(q, k, v, numbers):
    keep = numbers[:, None, :, None] == numbers[:, None, None, :]
    return torch.softmax((q @ k.mT).masked_fill(~keep, -1e30), -1) @ v


def test_lists_of_tiles_follow_the_tile(launched, emits) -> None:
    inputs = [torch.randn(1, 1, 40, 16) for _ in range(3)]
    numbers = torch.arange(40).div(20, rounding_mode="floor")[None]
    made: list[Differentiable] = []
    seconds = {"attention_backward_keys": prefers(16, 32)}

    def differentiable(spec):
        clock = Clock(launched, lambda name, tile: seconds.get(name, prefers(32, 16))(name, tile))
        made.append(Differentiable(spec, tuner=Tuner(clock=clock)))
        return made[-1]

    emits(Kernel, differentiable)
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True, "tile_maps": "always"}
    compiled = torch.compile(packed, backend="fusion", options=options)
    for _ in range(2):
        launched.clear()
        weight = torch.randn(1, 1, 40, 16)

        def gradients(function, dtype=torch.float32, weight=weight):
            given = [t.to(dtype).clone().requires_grad_() for t in inputs]
            return torch.autograd.grad(function(*given, numbers), given, weight.to(dtype))

        with failures_raised():
            found = gradients(compiled)
        numerics.assert_as_exact_as_eager(found, gradients(packed), gradients(packed, torch.float64))
    assert made
    names = [name for name, _ in launched]
    assert names.count("attention_backward_prepare") == 1, names
    last = dict(launched)
    assert last["attention_backward_prepare"].rows == last["attention_backward_keys"].rows == 16
    assert last["attention_row_blocks"].rows == 16 and last["attention_row_blocks"].keys == 32


# -- tiles that do not fit ---------------------------------------------------------------------------------------------


@pytest.fixture
def limited(launched, monkeypatch) -> Callable[[Callable[[Tile], bool], Exception], None]:
    """Makes launches of tiles that do not fit raise."""
    real = Variant.launch

    def limit(room: Callable[[Tile], bool], error: Exception) -> None:
        def launch(self, name: str, programs: int, tile: Tile, *rest) -> None:
            if not room(tile):
                raise error
            real(self, name, programs, tile, *rest)

        monkeypatch.setattr(Variant, "launch", launch)

    return limit


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_smaller_tile_is_taken_where_one_does_not_fit(error: Exception, limited, launched, caplog) -> None:
    c = case("alibi", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: tile.rows * tile.keys <= 256, error)
    kernel = Kernel(c.spec)
    with caplog.at_level(logging.INFO, "fusion"):
        for _ in range(2):
            assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert len([r for r in caplog.records if "does not fit" in r.message]) == 1
    assert {(tile.rows, tile.keys) for _, tile in launched} == {(16, 16)}


def test_gradients_in_smaller_tiles(limited, launched) -> None:
    c = case("bias", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: tile.rows * tile.keys <= 256, REFUSALS[0])
    run = Differentiable(c.spec)
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape)
    needs_ = (True,) * len(operands)
    got = run.backward(grad, out, statistics, operands, sizes, needs_)
    assert_gradients_as_exact_as_eager(got, c, operands, grad, needs_)
    assert {tile.rows * tile.keys for _, tile in launched} == {256}


def test_the_error_is_shown_where_nothing_fits_and_others_always(limited) -> None:
    c = case("plain", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: False, REFUSALS[0])
    with pytest.raises(OutOfResources):
        Kernel(c.spec)(operands, sizes)
    limited(lambda tile: False, RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        Kernel(c.spec)(operands, sizes)
