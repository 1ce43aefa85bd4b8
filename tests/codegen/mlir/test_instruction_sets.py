"""A sample of kernels for each instruction set on any x86 processor: newer instructions than it has are emulated, and
with the limit to AVX2 LLVM itself uses nothing newer."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.caching import OncePerKey
from fusion.codegen import cpu
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.backward.lanes import FUSED
from fusion.ir import Normalizer
from fusion.ir.expr import ROW_MAX
from fusion.ir.ops import apply
from fusion.ir.spec import AuxOutput
from fusion.planning.choice import query_stationary
from fusion.planning.register_tiles import Target, tilings_for
from fusion.runtime import kernels
from tests import emulation
from tests.codegen.mlir.cases import Case, assert_as_exact_as_eager, assert_trains_as_exact_as_eager, case, draw
from tests.fuzz import quick
from tests.numerics import assert_runs_as_exact_as_eager, assert_same
from tests.passes import test_mixed_heads as mixed_heads

SETS = {"avx2": emulation.AVX2, "avx512": emulation.AVX512, "pairs": emulation.PAIRS, "amx": emulation.AMX,
        "arm pairs": emulation.ARM_PAIRS}  # fmt: skip
SIZES = {"B": 1, "H": 2, "Nq": 70, "Nk": 150}


def plan(c: Case, target: Target, *, by_rows: bool = False, optimised: bool = False) -> quick.Plan:
    tiling = None if by_rows else tilings_for(c.spec, target)[0]
    schedule = query_stationary(c.spec)
    return quick.Plan(target=target, tiling=tiling, schedule=schedule, span=512, optimised=optimised)


def check(c: Case, chosen: quick.Plan) -> None:
    with quick.compiling_for(chosen):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        operands, sizes = draw(c, SIZES | ({} if chosen.tiling else {"Nq": 2}), "heads_inside")
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", "float32"), ("causal", "bfloat16"), ("soft_cap", "float16"), ("brain_bias", "bfloat16"),
     ("bool_mask", "float32")],
)  # fmt: skip
@pytest.mark.parametrize("target", SETS)
def test_forward(target: str, name: str, dtype: str) -> None:
    c = case(name, dtype, 40, 24, group=2)
    check(c, plan(c, SETS[target]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", "float32"), ("causal", "bfloat16"), ("soft_cap", "bfloat16"), ("left_padded", "float16")],
)
@pytest.mark.parametrize("target", SETS)
def test_keys_in_parts(target: str, name: str, dtype: str) -> None:
    c = case(name, dtype, 40, 24, group=2)
    chosen = plan(c, SETS[target])
    assert chosen.tiling is not None
    chosen = replace(chosen, tiling=replace(chosen.tiling, keys=64), cuts=True)
    with quick.compiling_for(chosen):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        for n_k in (334, 335):  # two parts, and three
            operands, sizes = draw(c, SIZES | {"Nk": n_k}, "heads_inside")
            assert run.choice(sizes).splits > 1
            assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", SETS)
def test_few_queries(target: str, dtype: str) -> None:
    c = case("left_padded", dtype, 40, 24, group=2)
    check(c, plan(c, SETS[target], by_rows=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "fields"),
    [("causal_last_key", {"d_v": 160}), ("window", {"d_v": 32}), ("left_padded_inf", {"d_v": 96}),
     ("documents", {"weight": True}), ("plain", {"normalizer": Normalizer.NONE})],
)  # fmt: skip
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("target", ["pairs", "amx"])
def test_rows_that_share_keys(target: str, name: str, fields: dict, group: int) -> None:
    c = case(name, "bfloat16", 64, **({"d_v": 64} | fields), group=group)
    with quick.compiling_for(chosen := replace(plan(c, SETS[target], by_rows=True), span=96)):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        for n_q, n_k in ((1, 5), (3, 150), (2, 333)):
            operands, sizes = draw(c, SIZES | {"Nq": n_q, "Nk": n_k}, "heads_inside")
            assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("target", SETS)
def test_scores_near_zero(target: str) -> None:
    """The square root's derivative is large there, and as wrong as a score is for its own size."""
    c = case("plain", "float16", 4)
    root = apply("sqrt", apply("abs", c.spec.score))
    c = replace(c, spec=replace(c.spec, score=root), program=replace(c.program, eager=lambda s, i, j: s.abs().sqrt()))
    with quick.compiling_for(chosen := plan(c, SETS[target])):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        for seed in range(4):
            torch.manual_seed(seed)
            assert_trains_as_exact_as_eager(run, c, SIZES | {"Nk": 600})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_mixed_heads(name: str, dtype: torch.dtype) -> None:
    """Five heads fill no whole number of the blocks that are mixed together, and sums begin anew twice."""
    inputs = mixed_heads.drawn(dtype, h=5, n_q=70, n_k=150)
    function = mixed_heads.with_biases_behind
    chosen = quick.Plan(target=SETS[name], tiling=None, schedule="", span=64, optimised=False)
    apart = mock.patch.multiple(cpu, _kernels=OncePerKey(), target_for=lambda spec, machine: SETS[name])
    with quick.compiling_for(chosen), apart, torch.no_grad():
        kernels.forget()
        compiled = torch.compile(function, backend="fusion", options={"strict": True})
        assert_runs_as_exact_as_eager(compiled, function, *inputs, dtype=dtype)
    kernels.forget()


@pytest.mark.parametrize(("target", "dtype"), [("pairs", "bfloat16"), ("avx512", "float32")])
def test_a_row_does_not_depend_on_others_that_share_its_keys(target: str, dtype: str) -> None:
    """Keys that only others see have weight 0. They are multiplied in pairs, its last one alone, or with one of those;
    or several sums are added to in turns."""
    c = case("window", dtype, 64, 64)
    with quick.compiling_for(chosen := plan(c, SETS[target], by_rows=True)):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        (q, *rest), sizes = draw(c, SIZES | {"Nq": 32, "Nk": 40})
        every = run([q, *rest], sizes)
        for n_q in (25, 27, 30):
            fewer = [n_q if n == 32 else n for n in sizes]
            assert_same(run([q[:, :, :n_q].clone(), *rest], fewer), every[:, :, :n_q])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("target", ["pairs", "amx", "arm pairs"])
def test_special_values_stay_where_they_are(target: str, where: int, value: float) -> None:
    """On tiles an element of V is multiplied with the weight of its column, and with 0 for the column beside it; in
    pairs, the last of an odd number of keys with a key that does not exist."""
    c = case("plain", "bfloat16", 64, 96, group=4)
    with quick.compiling_for(chosen := replace(plan(c, SETS[target], by_rows=True), span=96)):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        operands, sizes = draw(c, SIZES | {"Nq": 2, "Nk": 151}, "heads_inside")
        for place in (1, -1)[: 1 if where == 0 else 2]:
            changed = [x.clone() for x in operands]
            changed[where][0, 1, place, 5] = value
            assert_as_exact_as_eager(run(changed, sizes), c, changed)


def check_gradients(c: Case, chosen: quick.Plan, extents: dict[str, int]) -> TrainingKernel:
    with quick.compiling_for(chosen):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        assert_trains_as_exact_as_eager(run, c, extents)
    return run


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", SETS)
def test_gradients(target: str, dtype: str) -> None:
    c = case("brain_bias", dtype, 40, 24)
    check_gradients(c, plan(c, SETS[target]), SIZES)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", SETS)
def test_the_backward_makes_the_weights_of_the_forward(target: str, dtype: str, aux: bool) -> None:
    """With a single key each is 1, however large its score, so that the gradient of V is what arrives."""
    c = case("plain", dtype, 40, 24)
    largest = AuxOutput(value=ROW_MAX, dims=("b0", "b1", "i"), dtype="float32")
    c = replace(c, spec=replace(c.spec, aux_outputs=(largest,) if aux else ()))
    chosen = plan(c, SETS[target])
    with quick.compiling_for(chosen):
        run = quick.kernel(c.spec, chosen, trained=True)
        assert isinstance(run, TrainingKernel)
        operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 33, "Nk": 1}, "heads_inside")
        operands = [100 * operands[0], *operands[1:]]
        out, statistics, *found = run.outputs(operands, sizes)
        grad = torch.ones_like(out)
        *_, grad_v = run.backward(grad, out, statistics, operands, sizes, (False, False, True), [None] * len(found))
    assert_same(grad_v, torch.full_like(grad_v, 33))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("d", "n_q", "n_k"), [(5, 70, 3), (72, 131, 150), (136, 9, 49), (8, 20, 5000)])
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("avx2", "float32"), ("avx512", "float32"), ("pairs", "bfloat16"), ("arm pairs", "bfloat16")],
)
def test_all_gradients_in_one_kernel_of_multiply_adds(target: str, dtype: str, d: int, n_q: int, n_k: int) -> None:
    """Queries, keys and columns that fill neither steps nor blocks nor register tiles."""
    c = case("causal", dtype, d, 24)
    run = check_gradients(c, plan(c, SETS[target]), SIZES | {"H": 16, "Nq": n_q, "Nk": n_k})
    assert FUSED in {kind for kind, *_ in run._compiled}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_limited_to_avx2(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LLVM optimises for users: it may turn what is written into something that the processor needs help with."""
    monkeypatch.setenv("FUSION_MAX_ISA", "avx2")
    c = case("brain_bias", dtype, 40, 24)
    check(c, plan(c, emulation.AVX2, optimised=True))
    check(c, plan(c, emulation.AVX2, optimised=True, by_rows=True))
    odd = case("plain", dtype, 8, 19, normalizer=Normalizer.NONE)  # columns that are copied one by one
    check(odd, plan(odd, emulation.AVX2, optimised=True, by_rows=True))
