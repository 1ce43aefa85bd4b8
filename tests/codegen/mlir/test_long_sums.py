"""Sums over very many keys: equal ones, whose terms are all rounded the same way, are the worst case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir.expr import const, substitute
from fusion.planning.register_tiles import Target, tilings_for
from tests import emulation
from tests.codegen.mlir.cases import (
    HERE,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
    masked,
)

TARGETS = {"here": HERE, "avx512": emulation.AVX512}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", [emulation.AVX2, emulation.AVX512, emulation.AMX], ids=["avx2", "avx512", "amx"])
@pytest.mark.parametrize("keys", [512, 640])
def test_many_equal_weights_beside_larger_ones(keys: int, target: Target) -> None:
    """A finite fill makes most weights equal. Sums as short as eager's lose no more to them."""
    c = case("documents")
    score = substitute(c.spec.score, {const(torch.finfo(torch.float32).min): const(-5.0)})
    program = replace(c.program, eager=lambda s, i, j, document: masked(s, document[0, i] == document[0, j], -5.0))
    c = replace(c, spec=replace(c.spec, score=score), program=program)
    with emulation.compiling(target):
        long_blocks = replace(tilings_for(c.spec, target)[0], keys=256)
        kernel = Kernel(c.spec, [long_blocks], target)
        operands, sizes = draw(c, {"B": 2, "H": 4, "Nq": keys, "Nk": keys})
        operands[3].copy_(torch.arange(keys) // (keys // 5))
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "keys", "value"),
    [("float16", 1 << 19, 1 + 15 / 1024), pytest.param("bfloat16", 1 << 19, 1 + 3 / 128, marks=pytest.mark.long)],
)  # fmt: skip
def test_outputs_of_narrow_dtypes(dtype: str, keys: int, value: float, target: str) -> None:
    c = case("plain", dtype, d=16)
    used: Target = TARGETS[target]
    with emulation.compiling(used):
        kernel = Kernel(c.spec, tilings_for(c.spec, used), used)
        kind = getattr(torch, dtype)
        q, k, v = torch.zeros(1, 1, 64, 16), torch.randn(1, 1, keys, 16), torch.full((1, 1, keys, 16), value)
        operands = [x.to(kind) for x in (q, k, v)]
        assert_as_exact_as_eager(kernel(operands, [1, 1, 64, keys]), c, operands)


@pytest.mark.parametrize("queries", [1 << 15, pytest.param(1 << 18, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_narrow_dtypes(dtype: str, queries: int) -> None:
    """Those of K and V are sums over all queries."""
    c = case("plain", dtype, d=16)
    kernel = TrainingKernel(c.spec, tilings_for(c.spec, HERE), HERE)
    kind = getattr(torch, dtype)
    q = torch.full((1, 1, queries, 16), 1 + 3 / 128).to(kind)
    k, v = (torch.randn(1, 1, 64, 16).to(kind) for _ in range(2))
    operands, sizes, needs = [q, k, v], [1, 1, queries, 64], (True,) * 3
    out, statistics = kernel.outputs(operands, sizes)
    grad = torch.full_like(out, 1 + 3 / 128)
    found = kernel.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)
