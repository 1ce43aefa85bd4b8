"""Kernels prove themselves before their first use: right ones once, wrong ones are not used."""

import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusion import caching, proof
from fusion.codegen import cpu, triton
from fusion.codegen.emitter import Edges
from fusion.codegen.mlir.by_rows.kernel import RowKernel
from fusion.codegen.mlir.softmax import Exponent
from fusion.errors import KernelProofError
from fusion.lowering import gradients as lowering
from fusion.planning.choice import Tile
from fusion.proof import Proof
from fusion.report.report import collect_reports
from fusion.runtime import kernels
from fusion.torch_private.dynamo import counters
from tests.codegen.mlir.cases import assert_as_exact_as_eager as assert_right
from tests.codegen.mlir.cases import case, draw
from tests.numerics import assert_as_exact_as_eager
from tests.passes.test_aux_outputs import gradients

SIZES = (2, 4, 50, 60)


def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def tensors(n=150):
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 16) for _ in range(3)]


def compiled(function=attention, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="fusion", options={"inner": "aot_eager", **options})


@pytest.fixture(autouse=True)
def new_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of any kernel, in the process or on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    forget()
    counters["fusion"].clear()
    yield
    forget()


def forget() -> None:
    kernels.forget()
    for kept in (cpu._kernels, cpu._training, proof._verdicts):
        kept.clear()


def not_rescaled():
    """Sums before a new maximum stay as they are."""
    return mock.patch.object(Exponent, "change", lambda self, m, m_new: self.b.constant(1.0, self.vector))


def half_gradients():
    """Of scores."""
    right = lowering.of_score
    half = lambda program, targets: {target: term * 0.5 for target, term in right(program, targets).items()}
    return mock.patch("fusion.lowering.backward_plan.of_score", half)


def test_a_right_kernel_is_proved_once() -> None:
    inputs = tensors()
    compiled(strict=True)(*inputs)
    assert counters["fusion"]["kernels_proved"] == 1
    forget()  # as in another process
    compiled(strict=True)(*inputs)
    assert counters["fusion"]["kernels_proved"] == 1 and not counters["fusion"]["invalid"]


def test_a_wrong_kernel_is_not_used() -> None:
    inputs = tensors()
    with not_rescaled(), collect_reports() as reports:
        ours = compiled()(*inputs)
    (site,) = reports[0].sites
    assert not site.fused and "computes something else than its spec: the result is off" in site.reason
    assert "a defect of fusion" in site.reason and counters["fusion"]["invalid"] == 1
    assert_as_exact_as_eager(ours, attention(*inputs), attention(*(x.double() for x in inputs)))


def test_a_wrong_kernel_is_an_error_where_that_is_asked_for() -> None:
    with not_rescaled(), pytest.raises(Exception, match="a kernel of .* computes something else than its spec"):
        compiled(strict=True)(*tensors())


def test_a_wrong_verdict_is_kept_in_the_process() -> None:
    with not_rescaled(), collect_reports() as reports:
        compiled()(*tensors())
        compiled()(*tensors())
        assert counters["fusion"]["kernels_proved"] == 1 and counters["fusion"]["invalid"] == 2
        forget()
        compiled()(*tensors())
    assert not any(report.fused for report in reports) and counters["fusion"]["kernels_proved"] == 2


def test_what_cannot_be_tried_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given):
        raise KeyError("an operation that is not known here")

    monkeypatch.setattr(proof, "run_all", fails)
    inputs = tensors()
    assert_as_exact_as_eager(
        compiled(strict=True)(*inputs), attention(*inputs), attention(*(x.double() for x in inputs))
    )
    assert counters["fusion"]["kernels_not_proved"] and not counters["fusion"]["invalid"]


def test_nothing_is_proved_where_nothing_is_verified() -> None:
    with not_rescaled(), collect_reports() as reports:
        compiled(verify=False)(*tensors())
    assert reports[0].fused and not counters["fusion"]["kernels_proved"]


def test_what_was_not_verified_is_proved_where_it_is_wanted_later() -> None:
    with not_rescaled(), collect_reports() as reports:
        compiled(verify=False)(*tensors())
        compiled()(*tensors())
    assert [report.fused for report in reports] == [1, 0]


def test_wrong_gradients_are_left_to_the_reference_interpreter() -> None:
    """Their kernels are made in the first backward."""
    inputs = tensors()
    with half_gradients():
        ours = gradients(compiled(strict=True), inputs)
    assert counters["fusion"]["invalid"] == 1
    wide = [x.double() for x in inputs]
    assert_as_exact_as_eager(ours, gradients(attention, inputs), gradients(attention, wide))


def test_kernels_that_are_made_for_later_sizes_prove_themselves() -> None:
    """One query is another kernel than many, made at the first call with it."""
    c = case("plain", d=16)
    run = kernels.executor(c.spec.to_json(), "cpu")
    with mock.patch.object(RowKernel, "_largest", lambda self, x: x):
        for n, invalid in ((150, 0), (1, 1)):
            operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": n, "Nk": 150})
            assert_right(run(operands, sizes), c, operands)
            assert counters["fusion"]["invalid"] == invalid


@pytest.mark.parametrize("program", ["left_padded", "documents", "transposed_bias", "window"])
def test_kernels_for_gpus_go_through_the_same(program: str) -> None:
    spec = case(program, d=16).spec
    kernel = triton.Kernel(spec, tile=Tile(rows=32, keys=16, warps=4, stages=1))
    Proof(spec=spec).results(kernel, SIZES, Edges(rows=32, keys=16), program)
    training = triton.Differentiable(spec, Tile(rows=32, keys=16, warps=4, stages=1))
    needs = tuple(operand.torch_dtype.is_floating_point for operand in spec.operands)
    Proof(spec=spec).gradients(training, SIZES, Edges(rows=32, keys=16), program, needs, ())


def test_a_wrong_kernel_for_gpus_is_seen() -> None:
    c = case("causal", d=16)
    other = triton.Kernel(case("plain", d=16).spec, tile=Tile(rows=32, keys=16, warps=4, stages=1))
    with pytest.raises(KernelProofError, match="the result is off by"):
        Proof(spec=c.spec).results(other, SIZES, Edges(rows=32, keys=16), "")


def test_a_kernel_that_raises_is_wrong_and_one_that_lacks_memory_is_not_tried() -> None:
    def kernel(operands, sizes):
        raise problem

    spec, edges = case("plain", d=16).spec, Edges(rows=32, keys=16)
    problem: Exception = ValueError("no tile")
    with pytest.raises(KernelProofError, match="it raises ValueError: no tile, with B = 2, H = 2"):
        Proof(spec=spec).results(kernel, SIZES, edges, "raises")
    problem = MemoryError()
    Proof(spec=spec).results(kernel, SIZES, edges, "lacks memory")
    assert counters["fusion"]["kernels_not_proved"]


def test_a_result_of_another_shape_or_with_other_nans_is_wrong() -> None:
    spec, edges = case("plain", d=16).spec, Edges(rows=32, keys=16)
    with pytest.raises(KernelProofError, match=r"the result has the shape \[3\]"):
        Proof(spec=spec).results(lambda operands, sizes: torch.zeros(3), SIZES, edges, "shape")
    nans = lambda operands, sizes: torch.full_like(operands[0], math.nan)
    with pytest.raises(KernelProofError, match="NaN or infinities at"):
        Proof(spec=spec).results(nans, SIZES, edges, "nan")


def test_verdicts_lie_beside_the_kernels(tmp_path: Path) -> None:
    compiled(strict=True)(*tensors())
    assert [path.name for path in caching.directory().glob("proof_*")]
