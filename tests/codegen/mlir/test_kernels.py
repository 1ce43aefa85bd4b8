"""CPU kernels against the reference interpreter in float64: every score program, dtype, layout and target, odd
sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.launch import Kernel
from fusion.ir import Normalizer
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import PROGRAMS, TARGETS, Case, assert_calls_as_exact_as_eager, case, draw, on_threads

DRAWS = 4
"""Calls of which the largest errors are compared together: in a single one eager may be lucky."""
SHAPES = (
    {"B": 2, "H": 2, "Nq": 100, "Nk": 100},
    {"B": 1, "H": 3, "Nq": 33, "Nk": 300},
    {"B": 3, "H": 1, "Nq": 130, "Nk": 7},
    {"B": 1, "H": 1, "Nq": 1, "Nk": 1},
    {"B": 2, "H": 2, "Nq": 3, "Nk": 150},
)


def kernel(c: Case, target: str = "best") -> Kernel:
    return Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])


def check(c: Case, run: Kernel, layout: str = "packed", shapes: tuple[dict[str, int], ...] = SHAPES) -> None:
    for shape in shapes:
        drawn = [draw(c, shape, layout) for _ in range(DRAWS)]
        assert_calls_as_exact_as_eager([run(*call) for call in drawn], c, [operands for operands, _ in drawn])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_in_float32(name: str) -> None:
    c = case(name)
    check(c, kernel(c))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["plain", "causal", "left_padded", "bias", "alibi", "soft_cap", "bucket_table", "documents"]
)
def test_low_precision(name: str, dtype: str) -> None:
    c = case(name, dtype)
    check(c, kernel(c))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["multiply-add", "avx2", "generic"])
@pytest.mark.parametrize("name", ["causal", "left_padded_inf", "bool_mask", "alibi", "bucket_table", "soft_cap"])
def test_other_targets(name: str, target: str) -> None:
    c = case(name, "bfloat16" if name == "alibi" else "float32", 40, 24)
    check(c, kernel(c, target))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n_q", [40, 4])
@pytest.mark.parametrize("target", ["best", "multiply-add", "avx2"])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_sums_over_many_keys(name: str, target: str, n_q: int) -> None:
    c = case(name)
    check(c, kernel(c, target), shapes=({"B": 1, "H": 1, "Nq": n_q, "Nk": 40_000},))


@pytest.mark.parametrize("layout", ["heads_inside", "columns", "gaps"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strides_and_grouped_heads(layout: str, dtype: str) -> None:
    c = case("causal", dtype, 48, 20, group=2, order=("b0", "i", "b1", "e"))
    check(c, kernel(c), layout)


@pytest.mark.parametrize("target", ["best", "multiply-add"])
@pytest.mark.parametrize(("d", "d_v"), [(1, 1), (3, 5), (17, 31), (80, 96), (256, 8)])
def test_odd_widths(d: int, d_v: int, target: str) -> None:
    c = case("bias", "float32", d, d_v, order=("b0", "b1", "e", "i"))
    check(c, kernel(c, target))


@pytest.mark.parametrize("target", ["best", "avx2"])
@pytest.mark.parametrize("d", [129, 257, 2048])
def test_sums_over_many_features(d: int, target: str) -> None:
    """Scores of a few units, as sums of products that nearly cancel: every rounding of a long chain shows."""
    c = case("plain", "float32", d, 16)
    check(c, kernel(c, target), shapes=({"B": 2, "H": 3, "Nq": 40, "Nk": 33},))


@pytest.mark.parametrize("name", ["sigmoid", "clamp"])
def test_no_normaliser(name: str) -> None:
    c = case(name, normalizer=Normalizer.NONE, weight=name == "clamp")
    check(c, kernel(c))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normalizer", [Normalizer.SAFE_SOFTMAX, Normalizer.ZERO_SOFTMAX])
@pytest.mark.parametrize("name", ["left_padded_inf", "bool_mask", "plain"])
def test_rows_that_are_zero(name: str, normalizer: Normalizer) -> None:
    c = case(name, normalizer=normalizer)
    check(c, kernel(c))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["best", "multiply-add"])
@pytest.mark.parametrize("kind", ["weight", "sinks", "off_by_one"])
@pytest.mark.parametrize("name", ["plain", "left_padded"])
def test_around_the_softmax(name: str, kind: str, target: str) -> None:
    c = case(name, **{kind: True})
    check(c, kernel(c, target))


def test_output_dtype_differs() -> None:
    c = case("causal", "bfloat16", out_dtype="float32")
    check(c, kernel(c))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    c = case("causal")
    sizes = dict(zip("B H Nq Nk".split(), shape, strict=True))
    operands, values = draw(c, sizes)
    out = kernel(c)(operands, values)
    assert out.shape == (*shape[:3], 64)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["best", "generic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal_last_key", "left_padded_inf", "bias", "documents", "alibi"])
def test_few_queries(name: str, dtype: str, target: str) -> None:
    c = case(name, dtype, 40, 24, group=2, sinks=name == "bias", weight=name == "alibi")
    shapes = tuple({"B": 2, "H": 2, "Nq": n_q, "Nk": n_k} for n_q, n_k in ((1, 1), (1, 77), (8, 200)))
    check(c, kernel(c, target), "heads_inside", shapes)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("group", "d_v"), [(1, 300), (5, 24), (12, 300)])
@pytest.mark.parametrize("name", ["causal_last_key", "left_padded_inf", "window"])
def test_rows_that_read_the_same_keys(name: str, group: int, d_v: int) -> None:
    c = case(name, "float32", 40, d_v, group=group, weight=group == 5, sinks=group == 12)
    shapes = tuple({"B": 2, "H": 2, "Nq": n_q, "Nk": n_k} for n_q, n_k in ((1, 700), (3, 1300), (8, 33)))
    check(c, kernel(c), shapes=shapes)


@pytest.mark.parametrize("n", [9, 32, 129, 500])
def test_another_length_compiles_nothing(n: int) -> None:
    c = case("causal")
    run = kernel(c)
    check(c, run, shapes=({"B": 1, "H": 1, "Nq": 40, "Nk": 40},))
    before = set(run._variants)
    check(c, run, shapes=({"B": 2, "H": 1, "Nq": n, "Nk": n},))
    assert set(run._variants) == before


def test_layout_of_the_result() -> None:
    c = case("plain", order=("b0", "i", "b1", "e"))
    operands, sizes = draw(c, SHAPES[0])
    out = kernel(c)(operands, sizes)
    assert out.stride() == torch.empty(2, 100, 2, 64).transpose(1, 2).stride()


@pytest.mark.parametrize(("name", "n_q", "n_k", "group"), [("causal", 200, 200, 1), ("window", 8, 3000, 3)])
def test_results_do_not_depend_on_the_number_of_threads(name: str, n_q: int, n_k: int, group: int) -> None:
    c = case(name, group=group)
    run = kernel(c)
    operands, sizes = draw(c, {"B": 2, "H": 3, "Nq": n_q, "Nk": n_k})
    outs = on_threads(run, operands, sizes)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
