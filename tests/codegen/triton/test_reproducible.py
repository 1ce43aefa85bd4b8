"""GPU kernels of specs that are `reproducible`: a row has the same bits alone and in any company, in training as in
inference."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="kernels need triton")
pytest.importorskip("torch_mlir", reason="random problems come with kernels for CPUs")

from fusion.codegen import triton
from fusion.codegen.triton import autotune
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.gradients import gradients_of
from fusion.codegen.triton.launch import Kernel
from fusion.ir.spec import AttentionSpec, AuxOutput, Reduction
from fusion.machine import of_target
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.refusals import Reason
from tests.codegen.mlir.cases import assert_as_exact_as_eager, case, draw
from tests.fuzz import specs
from tests.ptx.emulated import emulated
from tests.reproducible import Call, Problem, part, same_bits

CASES = [pytest.param(seed, marks=() if seed < 6 else pytest.mark.long) for seed in range(100)]
TILE = Tile(rows=16, keys=16, warps=4, stages=1)
HALF = Tile(rows=64, keys=32, warps=4, stages=2)


def problem(seed: int, trained: bool = False) -> tuple[Problem, random.Random]:
    """The problem of a seed that GPU kernels take, and how to draw calls. trained: kernels make its gradients."""
    rng = random.Random(f"reproducible on GPUs {seed}")
    torch.manual_seed(seed)
    candidates = (specs.drawn(number) for number in itertools.count(seed, 1000))
    fits = lambda spec: triton.supports(spec) is None and (not trained or bool(needed(spec)))
    drawn = next(d for d in candidates if fits(replace(d.spec, reproducible=True)))
    result = Problem(drawn, rng, rng.choice((1, 7, 40, 70)), rng.choice((20, 40, 130)))
    result.spec = replace(result.spec, reproducible=True)
    return result, rng


def needed(spec: AttentionSpec) -> tuple[bool, ...]:
    """Which of Q, K and V have gradients; empty where kernels make none."""
    needs = tuple(n < 3 and operand.torch_dtype.is_floating_point for n, operand in enumerate(spec.operands))
    return needs if any(needs) and Differentiable(spec).without_kernels(needs) is None else ()


def check_calls(drawn: Problem, calls: list[Call], tile: Tile | None = None) -> None:
    """Compare the rows of calls, in inference and training, with those of the call of all rows."""
    kernel, training, dims = Kernel(drawn.spec, tile), Differentiable(drawn.spec, tile), drawn.spec.output.dims
    whole = kernel(*drawn.given(drawn.whole))
    for call in calls:
        expected = part(whole, call, dims.index("b0"), dims.index("i"))
        operands, sizes = drawn.given(call)
        assert same_bits(kernel(operands, sizes), expected), call
        assert same_bits(training.outputs(operands, sizes)[0], expected), call


@pytest.mark.parametrize("seed", CASES)
def test_a_row_has_the_same_bits_in_every_call(seed: int) -> None:
    """Batch, rows beside it, keys that are masked at the end, and whether statistics are wanted differ."""
    drawn, rng = problem(seed)
    check_calls(drawn, list(drawn.calls(rng, 4)))


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Attention within documents, by the numbers of those of rows and keys."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(own[:, :, None] == others[:, None, :])[:, None])


def test_listed_tiles_come_in_the_order_of_the_keys() -> None:
    """Which of them need the mask follows from the rows of a block."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    document = torch.tensor([30, 110, 60]).repeat_interleave(torch.tensor([30, 110, 60]))[None]
    options = {"inner": "eager", "reproducible": True, "tile_maps": "always"}
    run = torch.compile(packed, backend="fusion", dynamic=True, options=options)
    with torch.no_grad():
        whole = run(q, k, v, document, document)
        for first, last in ((20, 50), (45, 77), (130, 200)):
            rows = run(q[:, :, first:last], k, v, document[:, first:last], document)
            assert same_bits(rows, whole[:, :, first:last]), (first, last)


@pytest.mark.parametrize("name", ["causal_last_key", "window", "left_padded", "bias"])
def test_all_tiles_run_the_same_instructions(name: str) -> None:
    """One call of the loop's function (and one where rows have no live key), one text for training and inference, and
    no variants for strides of what scores read."""
    spec = replace(case(name, "bfloat16").spec, reproducible=True)
    sizes = [2, 4, 100, 100]
    text = Kernel(spec).source(sizes)
    assert text == Kernel(spec, statistics=True).source(sizes) == Differentiable(spec).source(sizes)
    calls = re.findall(r"visit_keys\([^()]*\)", text.split("def attention_forward(")[1])
    assert len(calls) == (1 if name == "bias" else 2)
    assert all(re.search(r"KEYS,\s+True,", call) and "False" not in call for call in calls)
    fixed = text.split("do_not_specialize=[")[1].split("]")[0]
    assert '"Nq"' in fixed and "q_stride" not in fixed and ("bias_stride_1" in fixed) == (name == "bias")


@pytest.mark.parametrize("seed", CASES[:4])
def test_gradients_have_the_bits_of_any_batch(seed: int) -> None:
    drawn, _ = problem(seed, trained=True)
    needs = needed(drawn.spec)
    training, dims = Differentiable(drawn.spec), drawn.spec.output.dims
    arriving: list[torch.Tensor] = []

    def gradients(call: Call) -> dict[int, torch.Tensor]:
        operands, sizes = drawn.given(call)
        out, statistics = training.outputs(operands, sizes)
        arriving[:] = arriving or [torch.randn(out.shape).to(out.dtype)]
        grad = part(arriving[0], call, dims.index("b0"), dims.index("i"))
        found = training.backward(grad, out, statistics, operands, sizes, needs)
        return dict(zip((n for n, needed in enumerate(needs) if needed), found, strict=True))

    whole = gradients(drawn.whole)
    for low, high in ((0, 1), (1, 3)):
        for number, found in gradients(replace(drawn.whole, batch=(low, high))).items():
            if number not in drawn.paged:
                assert same_bits(found, whole[number][low:high]), number


ROWS = {"causal_last_key": (33, 57), "bias": (33, 57), "window": (0, 57)}
"""Chunks of rows by case, which see the keys that they see in the call of all rows."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal_last_key", "bfloat16"), ("bias", "float32"), ("window", "float16"), ("bias", "float16")],
)
def test_compiled_kernels_have_the_same_bits(target: str, name: str, dtype: str) -> None:
    """On the emulator of PTX: a chunk, a single row, another batch, padding, strides of another kind, and training."""
    c = case(name, dtype, 32, group=2)
    (q, k, v, *bias), sizes = draw(c, {"B": 2, "H": 1, "Nq": 80, "Nk": 80})
    spec, tile = replace(c.spec, reproducible=True), TILE if dtype == "float32" else HALF
    tile = replace(tile, rotated=target == "sm_90" and tile is HALF)
    with emulated(target) as emulation:
        kernel = Kernel(spec, tile)
        whole = kernel([q, k, v, *bias], sizes)
        assert same_bits(Differentiable(spec, tile).outputs([q, k, v, *bias], sizes)[0], whole)
        if bias:
            unaligned = [F.pad(x, (0, 1))[..., :-1] for x in bias]
            assert same_bits(kernel([q, k, v, *unaligned], sizes), whole)
            padded = [*(F.pad(x, (0, 0, 0, 49), value=3.0) for x in (k, v)), F.pad(*bias, (0, 49), value=-torch.inf)]
            assert same_bits(kernel([q, *padded], [*sizes[:3], 80 + 49]), whole)
        for low, (first, last) in ((0, ROWS[name]), (1, ROWS[name]), (1, (ROWS[name][0], ROWS[name][0] + 1))):
            keys = last if name == "causal_last_key" else 80
            chunk = [q[low:, :, first:last], k[low:, :, :keys], v[low:, :, :keys], *(x[:, first:last] for x in bias)]
            rows = kernel(chunk, [2 - low, 2, last - first, keys])
            assert same_bits(rows, whole[low:, :, first:last]), (low, first, last)
    assert set(emulation.names) == {"attention_forward"}
    assert_as_exact_as_eager(whole, c, [q, k, v, *bias])


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_one_tile_serves_all_sizes(target: str) -> None:
    machine = of_target(target)
    for name, dtype in (("causal_last_key", "bfloat16"), ("window", "float32")):
        spec = case(name, dtype, 64, group=4).spec
        sizes = [(1, 8, 1, 1), (64, 8, 1, 40000), (1, 8, 100, 100), (4, 32, 4096, 4096)]
        planner = GpuPlanner(replace(spec, reproducible=True), machine)
        choices = [planner.choose(each) for each in sizes]
        assert len({(choice.schedule, choice.tile, choice.splits, choice.packed) for choice in choices}) == 1
        assert len({GpuPlanner(spec, machine).choose(each) for each in sizes}) > 1


def test_a_tile_that_does_not_fit_is_an_error() -> None:
    """A smaller one would take its place from then on, and rows have other bits than before."""
    c = case("plain", "float32", 16)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 3, "Nk": 20})
    for reproducible in (False, True):
        kernel = Kernel(replace(c.spec, reproducible=reproducible), Tile(rows=16, keys=32))
        raised = mock.patch.object(autotune, "_out_of_resources", lambda error: True)
        with raised, mock.patch("fusion.codegen.triton.launch._ForwardLaunches.__call__", _too_large):
            if reproducible:
                with pytest.raises(RuntimeError, match="32 keys"):
                    kernel(operands, sizes)
            else:
                kernel(operands, sizes)


def _too_large(self: object, variant: object, tile: Tile) -> None:
    if tile.keys > 16:
        raise RuntimeError(f"{tile.keys} keys")


def test_what_cannot_be_had_is_refused() -> None:
    spec = replace(case("bias").spec, reproducible=True)
    assert triton.supports(spec) is None
    sums = AuxOutput(value=specs.WEIGHT, dims=("b0", "b1", "j"), dtype="float32", reduction=Reduction.SUM, over="i")
    refusal = triton.supports(replace(spec, aux_outputs=(sums,)))
    assert refusal is not None and refusal.kind is Reason.NOT_REPRODUCIBLE
    needs = (True, True, True, True)
    assert gradients_of(spec, needs).captured
    assert "summed atomically" in str(Differentiable(spec).without_kernels(needs))
    assert Differentiable(spec).without_kernels((True, True, True, False)) is None
