"""Faults put into emitters and lowerings: each kernel that has one fails its proof, and is not used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from fusion import caching, proof
from fusion.codegen.cpu import launch
from fusion.codegen.cpu.backward import BackwardCall
from fusion.codegen.cpu.derived import Sum
from fusion.codegen.mlir import kernel, scope, skeleton, tile
from fusion.codegen.mlir.aux_outputs import AuxOutputs, TrainingStatistics
from fusion.codegen.mlir.backward.kernel import BackwardKernel
from fusion.codegen.mlir.backward.lanes import KeyLanes
from fusion.codegen.mlir.by_rows.kernel import RowKernel
from fusion.codegen.mlir.dense import DenseLoad, DistanceTable
from fusion.codegen.mlir.rows import PackedRows, RowReader
from fusion.codegen.mlir.skeleton import KernelFunction
from fusion.codegen.mlir.softmax import Exponent, GroupSoftmax
from fusion.codegen.mlir.stream import Sequential
from fusion.codegen.mlir.tile import Tiles
from fusion.codegen.mlir.vectormath import VectorMath
from fusion.codegen.reference import gradients as of_rows
from fusion.errors import KernelProofError
from fusion.ir import AttentionSpec, Kind, Normalizer, Operand, integers
from fusion.ir.expr import ONE, ROW_SUM, WEIGHT, ZERO, C, I, J, const, coord, load
from fusion.ir.ops import apply, where
from fusion.ir.spec import AuxOutput, Reduction
from fusion.lowering import backward_plan as backward
from fusion.lowering import elementary, rows
from fusion.passes.specify.masks import understand
from fusion.planning.choice import query_stationary
from fusion.planning.register_tiles import Target, Tiling
from fusion.proof import Proof
from tests.codegen.mlir.cases import NK, case
from tests.codegen.test_aux_outputs import ENTROPY, FAR, LOG_SUM
from tests.fuzz import quick

SMALL = Target(lanes=4, tile_rows=2, tile_groups=1)
"""Kernels for it are short, and soon compiled."""
SIZES = {"B": 2, "H": 4, "Nq": 40, "Nk": 60}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """put: puts it in. spec: of an attention that meets it. by_rows, trained: its kernel."""

    put: Callable[[], Any]
    spec: AttentionSpec
    by_rows: bool = False
    trained: bool = False

    @property
    def of(self) -> tuple[AttentionSpec, bool, bool]:
        return self.spec, self.by_rows, self.trained


def method(owner: type, name: str, change: Callable[..., Any]) -> Callable[[], Any]:
    """Another body of a method. change: takes the method, and what it takes."""
    right = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda self, *given: change(right, self, *given), create=True)


def function(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], Any]:
    """Another body of a function that a module has."""
    right = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, functools.partial(change, right))


def aux(value: Any, dims: str = "b0 b1 i", reduction: Reduction = Reduction.NONE, over: str = "") -> AuxOutput:
    return AuxOutput(value=value, dims=tuple(dims.split()), dtype="float32", reduction=reduction, over=over)


def spec(name: str = "plain", *outputs: AuxOutput, d: int = 8, **how: Any) -> AttentionSpec:
    return replace(case(name, d=d, **how).spec, aux_outputs=outputs)


def dropped() -> AttentionSpec:
    """Weights are dropped by a hash of their position and a seed."""
    plain = spec()
    drawn = apply("hash", load(3, (), Kind.INT), integers.add(integers.mul(I, NK), J))
    weight = where(apply("ilt", drawn, const(1 << 30)), const(2.0), const(0.0))
    seed = Operand(dtype="int64", rank=0, name="seed")
    return replace(plain, operands=(*plain.operands, seed), weight=weight)


def quantised(scale: float = 0.02) -> AttentionSpec:
    """K is eight bits of which the kernel makes numbers."""
    plain = spec()
    value = apply("fmul", apply("to_float", load(1, (*plain.k[:2], J, C), Kind.INT)), const(scale))
    return replace(plain, operands=(plain.operands[0], Operand(dtype="int8", rank=4, name="k"), plain.operands[2]),
                   k_value=value)  # fmt: skip


def one(right: Callable, self: Any, *given: Any) -> Any:
    return self.b.constant(1.0, self.vector)


def nothing(right: Callable, self: Any, *given: Any) -> None:
    pass


def as_if(change: Callable[[AttentionSpec], AttentionSpec]) -> Callable[..., Any]:
    """A method of a kernel, as if its spec were another."""

    def run(right: Callable, self: Any, *given: Any) -> Any:
        with mock.patch.object(self, "spec", change(self.spec)):
            return right(self, *given)

    return run


def whole(right: Callable, self: Any, *given: Any) -> Any:
    return None if right(self, *given) is None else self.b.constant(1, "i1")


def one_key_less(right: Callable, self: Any, *given: Any) -> Any:
    low, high = right(self, *given)
    return low, self.b.most(self.b.sub(high, 1), 0)


def heads_apart(old: AttentionSpec) -> AttentionSpec:
    """Heads that share keys are every second one."""
    return replace(old, k=(old.k[0], integers.mod(coord("b1"), 2), *old.k[2:]))


def without_last_block(right: Callable, self: Any, item: Any, keys: Any) -> None:
    b, size = self.b, self.tiling.keys
    right(self, item, replace(keys, high=b.mul(b.div(b.sub(keys.high, 1), size), size)))


def swapped(right: Callable, spec: AttentionSpec, strides: Any, sizes: Any) -> dict[tuple, int]:
    found = right(spec, strides, sizes)
    return found | {("stride", 1, 2): found["stride", 1, 3], ("stride", 1, 3): found["stride", 1, 2]}


def not_kept(right: Callable, self: Any, *given: Any) -> None:
    with mock.patch.object(self, "group", replace(self.group, kept=None)):
        right(self, *given)


def without_sinks(right: Callable, self: Any, number: int) -> torch.Tensor:
    with mock.patch.object(self, "sinks", {}):
        return right(self, number)


def of_first_heads(right: Callable, self: Any, x: torch.Tensor) -> torch.Tensor:
    split = x.clone().view(self.split)
    for dim in range(1, split.dim(), 2):
        split.narrow(dim, 1, self.split[dim] - 1).zero_()
    return right(self, split)


def other_statistics(right: Callable, self: Any, rows: Any, g: Any, raw: Any, factor: Any) -> None:
    right(self, rows, g, raw, self.b.mul(factor, 0.5))


def halves(right: Callable, *given: Any) -> Any:
    return {target: term * 0.5 for target, term in right(*given).items()}


def zeros(right: Callable, *given: Any) -> Any:
    return dict.fromkeys(right(*given), ZERO)


SINKS = spec("causal", sinks=True)
CAUSAL = replace(spec("causal"), mask=understand(spec("causal").score, Normalizer.SOFTMAX))
"""With a program for whole tiles."""
TABLE = aux(WEIGHT, "b0 b1 i j")
OF_KEYS = aux(FAR, "b0 b1 j", Reduction.SUM, "i")
OF_ROWS = aux(ENTROPY, "b0 b1 i", Reduction.SUM, "j")

FAULTS = {
    # Softmax
    "sums before a new maximum are not rescaled": Fault(put=method(Exponent, "change", one), spec=spec()),
    "a maximum is stale where the sum is seen": Fault(
        put=lambda: mock.patch.object(tile, "keeps_ends", lambda spec: False), spec=spec("plain", aux(ROW_SUM))
    ),
    "keys beyond the last count": Fault(put=method(GroupSoftmax, "fill_beyond", nothing), spec=spec()),
    "maxima are those of the first keys": Fault(
        put=method(GroupSoftmax, "raise_to", lambda right, self, highest, found: highest), spec=spec()
    ),
    "exponentials are polynomials of a low degree": Fault(
        put=function(elementary, "exp2_polynomial", lambda right, degree: right(2)), spec=spec()
    ),
    "tanh is left out": Fault(put=method(VectorMath, "tanh", lambda right, self, x: x), spec=spec("soft_cap")),
    "weights after the softmax are the next key's": Fault(
        put=method(GroupSoftmax, "_times_factor", lambda right, self, key, p: right(self, self.b.add(key, 1), p)),
        spec=spec(weight=True),
    ),
    "weights are dropped by another seed": Fault(
        put=function(scope, "hash_bits", lambda right, b, key, counter: right(b, b.add(key, 1), counter)),
        spec=dropped(),
    ),
    # Rows
    "the scale of scores is lost": Fault(
        put=function(skeleton, "score_programs", lambda right, *given, **how: replace(right(*given, **how), scale=1.0)),
        spec=spec(),
    ),
    "sinks are not in the sum": Fault(
        put=function(skeleton, "row_epilogue", lambda right, found: right(replace(found, sinks=()))), spec=SINKS
    ),
    "rows are not divided by their sum": Fault(put=function(rows, "_factor", lambda right, *given: ONE), spec=spec()),
    "what is added to the sum is lost": Fault(
        put=function(skeleton, "row_epilogue", lambda right, found: right(replace(found, row_scale=None))),
        spec=spec(off_by_one=True),
    ),
    "rows of nothing are not zero": Fault(
        put=method(KernelFunction, "scaled", lambda right, self, output, factor: self.b.mul(output, factor)),
        spec=spec("left_padded_inf", normalizer=Normalizer.ZERO_SOFTMAX),
    ),
    "rows are written untransposed": Fault(
        put=lambda: mock.patch.object(skeleton, "transpose", lambda b, lines: lines), spec=spec()
    ),
    "rows are written one too early": Fault(
        put=method(KernelFunction, "_row_address",
                   lambda right, self, found, row: right(self, found, self.b.most(self.b.sub(row, 1), 0))),
        spec=spec(),
    ),
    # Keys and masks
    "the last block of keys is not visited": Fault(
        put=method(Sequential, "visit", without_last_block), spec=spec()
    ),
    "ranges of keys end one early": Fault(put=method(KernelFunction, "key_range", one_key_less), spec=spec("causal")),
    "tiles visit one key less": Fault(put=method(Tiles, "rows_and_keys", one_key_less), spec=spec("window")),
    "the mask is dropped in mixed tiles": Fault(put=method(KernelFunction, "whole", whole), spec=CAUSAL),
    "rows without a live key stay as they are": Fault(
        put=method(KernelFunction, "_alive",
                   lambda right, self, m, fill: self.b.constant(-1, right(self, m, fill).type)),
        spec=spec("left_padded"),
    ),
    "rows without a live key need no keys": Fault(
        put=lambda: mock.patch.object(kernel, "dead_rows_need_keys", lambda spec: False), spec=spec("left_padded")
    ),
    "sums of all spans of keys but the last are lost": Fault(
        put=method(Tiles, "all_sums", nothing), spec=spec()
    ),
    # Operands
    "keys that are packed serve all heads": Fault(
        put=method(RowReader, "identity", lambda right, self: [0]), spec=spec()
    ),
    "what is packed is not forgotten": Fault(put=method(PackedRows, "note", nothing), spec=spec()),
    "heads that share keys are the wrong ones": Fault(
        put=method(KernelFunction, "_readers", as_if(heads_apart)), spec=spec(group=2)
    ),
    "strides of keys are swapped": Fault(put=function(launch, "operand_values", swapped), spec=spec()),
    "a staged bias is the next key's": Fault(
        put=method(DenseLoad, "read", lambda right, self, target, key: right(self, target, self.b.add(key, 1))),
        spec=spec("bias"),
    ),
    "a bias by distance is the next one's": Fault(
        put=method(DistanceTable, "read", lambda right, self, row, key: right(self, self.b.add(row, 1), key)),
        spec=spec("bucket_table"),
    ),
    "the scale of stored keys is lost": Fault(
        put=method(KernelFunction, "_readers", as_if(lambda old: replace(old, k_value=quantised(0.04).k_value))),
        spec=quantised(),
    ),
    # Row by row
    "parts of keys are added as they are": Fault(put=method(Exponent, "factor", one), spec=spec(), by_rows=True),
    "the maximum is the first key's": Fault(
        put=method(Exponent, "larger", lambda right, self, m, x, hint="m": m), spec=spec(), by_rows=True
    ),
    "the last key of a row is left out": Fault(
        put=method(RowKernel, "key_range", one_key_less), spec=spec("causal_last_key"), by_rows=True
    ),
    # auxiliary outputs
    "kept weights are not rescaled": Fault(put=method(GroupSoftmax, "rescale", not_kept), spec=spec("plain", TABLE)),
    "weights are written undivided": Fault(
        put=method(AuxOutputs, "_values",
                   lambda right, self, found, kept, scored, key, _: right(self, found, kept, scored, key, None)),
        spec=spec("plain", TABLE),
    ),
    "sums over queries begin with what was there": Fault(
        put=method(AuxOutputs, "begin", nothing), spec=spec("plain", OF_KEYS)
    ),
    # Gradients
    "gradients of scores are halves": Fault(
        put=function(backward, "of_score", halves), spec=spec(), trained=True
    ),
    "gradients through weights after the softmax are lost": Fault(
        put=function(backward, "of_weight", zeros), spec=spec(weight=True), trained=True
    ),
    "statistics of rows are halves": Fault(
        put=method(TrainingStatistics, "write", other_statistics), spec=spec(), trained=True
    ),
    "the mask is dropped in mixed tiles of the backward": Fault(
        put=method(BackwardKernel, "whole", whole), spec=CAUSAL, trained=True
    ),
    "the last query of a block of keys is left out": Fault(
        put=method(KeyLanes, "rows", one_key_less), spec=spec("causal"), trained=True
    ),
    "gradients of a bias are lost": Fault(
        put=method(BackwardCall, "_assemble", without_sinks), spec=spec("bias"), trained=True
    ),
    "gradients of sinks have another sign": Fault(
        put=method(BackwardCall, "_weight_of", lambda right, self, *given: -right(self, *given)),
        spec=SINKS, trained=True,
    ),
    "gradients of keys are those of the first head of a group": Fault(
        put=method(Sum, "of", of_first_heads),
        spec=spec(group=2), trained=True,
    ),
    "the slope of rows is that of a softmax": Fault(
        put=lambda: mock.patch.object(of_rows, "slope", lambda spec: ONE * 2.0),
        spec=spec(off_by_one=True), trained=True,
    ),
    "gradients at auxiliary outputs are lost": Fault(
        put=function(backward, "aux_gradients", lambda right, *given: replace(right(*given), weight=ZERO)),
        spec=spec("plain", OF_ROWS), trained=True,
    ),
    "gradients at a log-sum-exp are lost": Fault(
        put=function(backward, "aux_gradients", lambda right, *given: replace(right(*given), log_sum=ZERO)),
        spec=spec("plain", aux(LOG_SUM)), trained=True,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(caching, "enabled", lambda: False)
    proof._verdicts.clear()
    yield
    proof._verdicts.clear()


def run(found: AttentionSpec, by_rows: bool, trained: bool) -> None:
    """Make a kernel, which proves itself, and call it, its gradients too where it is trained."""
    tiling = None if by_rows else Tiling(groups=2, group_block=1, keys=24, planes=0)
    chosen = quick.Plan(
        target=SMALL, tiling=tiling, schedule=query_stationary(found), span=96, optimised=False, cuts=False
    )
    sizes = [*(SIZES | ({"Nq": 1} if by_rows else {})).values()]
    with quick.compiling_for(chosen):
        made = quick.kernel(found, chosen, trained or bool(found.aux_outputs))
        assert made is not None
        made = made.proved(Proof(spec=found))
        made.prepare(sizes)
        if trained:
            operands = proof.Operands(found, dict(zip(found.sizes, sizes, strict=True)), 0).tensors()
            out, statistics, *outputs = made.outputs(operands, sizes)
            needs = tuple(operand.is_floating_point() for operand in operands)
            arriving = [torch.randn(x.shape) for x in outputs]
            made.backward(torch.randn(out.shape), out, statistics, operands, sizes, needs, arriving)


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_with_a_fault_is_not_used(name: str) -> None:
    with FAULTS[name].put(), pytest.raises(KernelProofError, match="computes something else than its spec"):
        run(*FAULTS[name].of)


@pytest.mark.parametrize("number", range(len({fault.of for fault in FAULTS.values()})))
def test_without_a_fault_it_is(number: int) -> None:
    run(*list(dict.fromkeys(fault.of for fault in FAULTS.values()))[number])


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 40 and sum(fault.trained for fault in FAULTS.values()) >= 10
