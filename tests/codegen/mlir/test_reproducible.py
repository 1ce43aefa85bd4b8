"""Specs that are `reproducible`: a row has the same bits alone and in any company."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen import cpu, emitter
from fusion.ir import AttentionSpec
from fusion.ir.spec import AuxOutput, Reduction
from fusion.machine import Machine
from fusion.planning.register_tiles import REPRODUCIBLE_PART
from fusion.runtime import kernels
from tests import emulation
from tests.codegen.mlir.cases import Case, assert_as_exact_as_eager, case, draw
from tests.fuzz import specs
from tests.reproducible import NEWER, Call, Problem, kernel_of, machine_with, part, same_bits, threads, training_of

LENGTHS = {"queries": (1, 7, 40, 100, 200, 300), "keys": (40, 130, 300, 700, 2500)}
CASES = [pytest.param(seed, marks=() if seed < 4 else pytest.mark.long) for seed in range(100)]


def problem(
    seed: int, keys: tuple[int, ...] = LENGTHS["keys"], aux_outputs: bool = False
) -> tuple[Problem, Machine, random.Random]:
    """The problem of a seed, a machine and how to draw calls. aux_outputs: whether it has some."""
    rng = random.Random(f"reproducible {seed}")
    torch.manual_seed(seed)
    candidates = (specs.drawn(number) for number in itertools.count(seed, 1000))
    found = next(drawn for drawn in candidates if _has(drawn.spec, aux_outputs))
    drawn = Problem(found, rng, rng.choice(LENGTHS["queries"]), rng.choice(keys))
    drawn.spec = replace(drawn.spec, reproducible=True)
    return drawn, machine_with(rng.choice([name for name in NEWER if can_run(name)])), rng


def _has(spec: AttentionSpec, aux_outputs: bool) -> bool:
    """Whether a spec has auxiliary outputs, of rows alone, or has none."""
    return bool(spec.aux_outputs) == aux_outputs and all(aux.over != "i" for aux in spec.aux_outputs)


def can_run(name: str) -> bool:
    """Whether this processor has an instruction set; emulation is left to others."""
    here = Machine.detect().isa
    return {"avx2": "avx2", "avx512": "avx512f", "pairs": "avx512_bf16"}[name] in here


if not any(map(can_run, NEWER)):
    NEWER["avx2"] = ()  # as on Arm, with what there is
    can_run = lambda name: name == "avx2"


def test_bfloat16_is_widened_where_tiles_are_not_used() -> None:
    """Processors with AMX take longer for pairs than for multiply-adds."""
    assert not emulation.AMX.reproducible.bfloat16 and emulation.PAIRS.reproducible == emulation.PAIRS


@pytest.mark.parametrize("seed", CASES)
def test_a_row_has_the_same_bits_in_every_call(seed: int) -> None:
    """Batch, rows beside it, keys that are masked at the end, threads and tiles differ."""
    drawn, machine, rng = problem(seed)
    kernel, dims = kernel_of(drawn.spec, machine), drawn.spec.output.dims
    with threads(1):
        whole = kernel(*drawn.given(drawn.whole))
    for call in drawn.calls(rng, 10):
        with threads(call.threads):
            rows = kernel(*drawn.given(call))
        assert same_bits(rows, part(whole, call, dims.index("b0"), dims.index("i"))), call


@pytest.mark.parametrize("seed", CASES[::2])
def test_training_has_the_bits_of_inference_and_gradients_those_of_any_batch(seed: int) -> None:
    drawn, machine, rng = problem(seed, keys=(40, 130, 300, 700))
    kernel, dims = training_of(drawn.spec, machine), drawn.spec.output.dims
    needs = tuple(operand.torch_dtype.is_floating_point for operand in drawn.spec.operands)
    if kernel is None or kernel._unsupported((), needs) is not None:
        pytest.skip("its gradients are the reference interpreter's, which makes no promise")
    with threads(1):
        expected = kernel_of(drawn.spec, machine)(*drawn.given(drawn.whole))
    arriving = torch.randn(expected.shape).to(expected.dtype)

    def trained(call: Call) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        operands, sizes = drawn.given(call)
        grad = part(arriving, call, dims.index("b0"), dims.index("i"))
        with threads(call.threads):
            out, statistics = kernel.outputs(operands, sizes)
            gradients = kernel.backward(grad, out, statistics, operands, sizes, needs)
        return out, dict(zip((n for n, needed in enumerate(needs) if needed), gradients, strict=True))

    out, gradients = trained(drawn.whole)
    assert same_bits(out, expected)
    for call in drawn.calls(rng, 4):
        call = replace(call, rows=drawn.whole.rows, padded=0)
        rows, of_batch = trained(call)
        assert same_bits(rows, part(expected, call, dims.index("b0"), dims.index("i")))
        for number in {0, 1, 2} & of_batch.keys() - drawn.paged:
            low, high = call.batch
            assert same_bits(of_batch[number], gradients[number][low:high]), (call, number)
    _, on_five = trained(replace(drawn.whole, threads=5))
    assert all(same_bits(on_five[number], gradient) for number, gradient in gradients.items())


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.long) for seed in range(20)])
def test_weights_and_statistics_of_rows_have_the_same_bits(seed: int) -> None:
    drawn, machine, rng = problem(seed, keys=(40, 130, 300), aux_outputs=True)
    kernel = training_of(drawn.spec, machine)
    if kernel is None:
        assert "reference interpreter" in str(cpu.supports(drawn.spec, machine))
        return
    dims = [drawn.spec.output.dims, *(aux.dims for aux in drawn.spec.aux_outputs)]

    def results(call: Call) -> list[torch.Tensor]:
        with threads(call.threads):
            out, _, *aux = kernel.outputs(*drawn.given(call))
        return [out, *aux]

    whole = results(drawn.whole)
    for call in drawn.calls(rng, 6):
        for names, rows, every in zip(dims, results(replace(call, padded=0)), whole, strict=True):
            assert same_bits(rows, part(every, call, names.index("b0"), names.index("i"))), (call, names)


@pytest.mark.parametrize(("name", "dtype"), [("causal_last_key", "float32"), ("window", "bfloat16")])
def test_parts_of_the_keys_are_pieces_of_work_or_not(name: str, dtype: str) -> None:
    """On one core a piece has all parts of a row's keys, on many cores one."""
    c = case(name, dtype, 32, group=2)
    spec, here = replace(c.spec, reproducible=True), Machine.detect()
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 70, "Nk": 2 * REPRODUCIBLE_PART + 300})
    results = []
    for cores, count in ((1, 1), (64, 1), (64, 5)):
        kernel = kernel_of(spec, replace(here, cores=cores))
        assert kernel.choice(sizes).splits == (1 if cores == 1 else 3)
        with threads(count):
            results.append(kernel(operands, sizes))
    assert_as_exact_as_eager(results[0], c, operands)
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["left_padded", "documents", "bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_as_exact_as_ever(name: str, dtype: str) -> None:
    """Also where rows without a live key are visited a second time."""
    c = case(name, dtype, 40, 24, group=2)
    kernel = kernel_of(replace(c.spec, reproducible=True), Machine.detect())
    for n_q, n_k in ((3, 300), (150, 333)):
        operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": n_q, "Nk": n_k})
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)


def _refused(c: Case, **changes: object) -> str:
    spec: AttentionSpec = replace(c.spec, reproducible=True, **changes)
    return str(cpu.supports(spec, Machine.detect()))


def test_what_cannot_be_had_is_refused() -> None:
    c = case("plain")
    sums = AuxOutput(value=specs.WEIGHT, dims=("b0", "b1", "j"), dtype="float32", reduction=Reduction.SUM, over="i")
    assert "statistics of keys" in _refused(c, aux_outputs=(sums,))
    spec = replace(c.spec, reproducible=True)
    with emitter.registered("other", ("cuda",), lambda: cpu):
        assert "'other' on device 'cuda'" in str(kernels.unsupported(spec, "cuda"))
    assert kernels.unsupported(spec, "cpu") is None
