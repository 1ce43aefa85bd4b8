"""Faults put into GPU kernels on purpose: that their PTX shows each, and whether Triton's interpreter does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton import module
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_gradients_as_exact_as_eager, case, draw
from tests.ptx import emulated as emulator
from tests.ptx.emulated import emulated
from tests.ptx.memory import Fault

HALF = Tile(rows=64, keys=32, warps=4, stages=2)
SINGLE = Tile(rows=16, keys=16, warps=4, stages=1)


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault: a pattern of the Triton text or of its PTX and what replaces it. contracted: the fault is contraction.
    interpreter: whether Triton's interpreter shows it; None where it would access memory outside of tensors.
    gradients: whether it is one of the kernels of the backward."""

    text: tuple[str, str] | None = None
    ptx: tuple[str, str] | None = None
    contracted: bool = False
    case: tuple[str, str, int] = ("causal", "bfloat16", 64)
    target: str = "sm_80"
    interpreter: bool | None = True
    keys: int = 70
    described: bool = False
    gradients: bool = False


FAULTS = {
    "sums are not rescaled": Injected(text=(r"l = l \* alpha", "l = l")),
    "the accumulator is not rescaled": Injected(text=(r"acc = acc \* alpha", "acc = acc + 0 * alpha")),
    "the causal mask is off by one": Injected(text=("j <= i,", "j <= i + 1,")),
    "one key beyond the last counts": Injected(text=("j_ok = j < stop", "j_ok = j <= stop"),
                                               case=("plain", "float32", 16)),
    "one key beyond the last is read": Injected(text=("key_ok = key < stop", "key_ok = key <= stop"),
                                                interpreter=None),
    "keys are read with the stride of values": Injected(text=(r"\* k_stride_2", "* v_stride_2")),
    "indices are not int64": Injected(text=(r"tl\.int64", "tl.int32"), case=("plain", "bfloat16", 16), keys=17,
                                      interpreter=None),
    "copies are not waited for": Injected(ptx=(r"cp\.async\.wait_group.*", ""), interpreter=False),
    "barriers are missing": Injected(ptx=(r"bar\.sync\s+0;", ""), interpreter=False),
    "products are not waited for": Injected(ptx=(r"wgmma\.wait_group.*", ""), target="sm_90", interpreter=False),
    "one group of copies too few is waited for": Injected(ptx=(r"(cp\.async\.wait_group\s+)0", r"\g<1>1"),
                                                          interpreter=False),
    "a matrix is read without its transposition": Injected(ptx=(r"(ldmatrix\S*)\.trans", r"\1"), interpreter=False),
    "lanes reduce with another neighbour": Injected(ptx=(r"(shfl\.sync\.bfly\.b32.*), 2,", r"\1, 1,"),
                                                   interpreter=False),
    "results of rows that do not exist are stored": Injected(ptx=(r"@%p\d+ (st\.global)", r"\1"), interpreter=False),
    "products with sums are contracted": Injected(contracted=True, case=("plain", "float32", 16), keys=1024,
                                                  interpreter=False),
    "values have another swizzle": Injected(ptx=(r"4611686293305294848", "-9223371899415822336"), target="sm_90",
                                            interpreter=False),
    "copies of boxes are not waited for": Injected(ptx=(r"mbarrier\.try_wait.*;", "setp.eq.b32 complete, 0, 0;"),
                                                   target="sm_90", described=True, interpreter=False),
    "a barrier expects too few bytes": Injected(ptx=(r"(expect_tx.*), 4096;", r"\1, 2048;"), target="sm_90",
                                                described=True, interpreter=False),
    "delta is left out": Injected(text=(r"dp - delta", "dp"), gradients=True),
    "gradients of one row too many are summed": Injected(text=(r"rows_ok = \(rows < Nq\)", "rows_ok = (rows <= Nq)"),
                                                         gradients=True),
    "keys of the next block count, too": Injected(text=(r"first = program % key_blocks \* KEYS",
                                                        "first = program % key_blocks * (KEYS - 1)"), gradients=True,
                                                  interpreter=False),
}  # fmt: skip


@contextlib.contextmanager
def injected(fault: Injected) -> Iterator[list[str]]:
    """Texts that the fault was put into."""
    load, execute, texts = module.load, emulator.execute, list[str]()

    def changed(text: str, change: tuple[str, str] | None) -> str:
        result = text if change is None else re.sub(*change, text)
        texts.extend([result] if result != text else [])
        return result

    with (
        mock.patch.object(module, "load", lambda text, *others: load(changed(text, fault.text), *others)),
        mock.patch.object(emulator, "execute", lambda ptx, *others: execute(changed(ptx, fault.ptx), *others)),
        mock.patch.dict(module.EXACT, enable_fp_fusion=fault.contracted),
    ):
        yield texts


def _check(fault: Injected, tile: Tile) -> None:
    """Run the kernel and compare. K's rows lie apart, with NaN between them where the memory is small."""
    c = case(*fault.case)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": min(fault.keys, 70), "Nk": fault.keys})
    if fault.contracted:
        operands[0].mul_(40)
        operands[1][..., 0, :] = operands[0][..., 0, :] / operands[0][..., 0, :].norm() * 9
    k, far = operands[1], fault.keys == 17
    stride = 2**27 if far else k.shape[-1] + 16  # 16 rows of 2**27: 2**31, most of it never touched
    size = (fault.keys - 1) * stride + k.shape[-1]
    room = torch.empty(size, dtype=k.dtype) if far else torch.full((size,), torch.nan, dtype=k.dtype)
    operands[1] = room.as_strided(k.shape, (size, size, stride, 1)).copy_(k)
    if not fault.gradients:
        assert_as_exact_as_eager(Kernel(c.spec, tile)(operands, sizes), c, operands)
        return
    run, needs = Differentiable(c.spec, tile), (True, True, True)
    out, statistics = run.outputs(operands, sizes)
    grad = torch.ones_like(out)
    gradients = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(gradients, c, operands, grad, needs)


def _shows(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, Fault):
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(name: str) -> None:
    fault = FAULTS[name]
    tile = SINGLE if fault.case[1] == "float32" else replace(HALF, described=fault.described)
    with emulated(fault.target):
        assert not _shows(lambda: _check(fault, tile))
        with injected(fault) as texts:
            assert _shows(lambda: _check(fault, tile))
        assert texts or fault.contracted, "the fault has to be written anew"
    if fault.interpreter is not None:
        with injected(fault):
            assert _shows(lambda: _check(fault, tile)) == fault.interpreter
