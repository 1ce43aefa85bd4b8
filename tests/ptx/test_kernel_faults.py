"""Faults put into GPU kernels on purpose: that their PTX shows each, and whether Triton's interpreter does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton import module
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import assert_as_exact_as_eager, case, draw
from tests.ptx import emulated as emulator
from tests.ptx.emulated import emulated
from tests.ptx.memory import Fault

HALF = Tile(rows=64, keys=32, warps=4, stages=2)
SINGLE = Tile(rows=16, keys=16, warps=4, stages=1)


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault: a pattern of the Triton text or of its PTX and what replaces it.
    interpreter: whether Triton's interpreter shows it; None where it would access memory outside of tensors."""

    text: tuple[str, str] | None = None
    ptx: tuple[str, str] | None = None
    case: tuple[str, str, int] = ("causal", "bfloat16", 64)
    target: str = "sm_80"
    interpreter: bool | None = True
    keys: int = 70


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
}  # fmt: skip


def _changed(text: str, change: tuple[str, str] | None) -> str:
    if change is None:
        return text
    result, count = re.subn(*change, text)
    if not count:
        raise LookupError(f"no {change[0]!r} in the kernel: the fault has to be written anew")
    return result


@contextlib.contextmanager
def injected(fault: Injected) -> Iterator[None]:
    load, execute = module.load, emulator.execute
    with (
        mock.patch.object(module, "load", lambda text, *others: load(_changed(text, fault.text), *others)),
        mock.patch.object(emulator, "execute", lambda ptx, *others: execute(_changed(ptx, fault.ptx), *others)),
    ):
        yield


def _check(fault: Injected, tile: Tile) -> None:
    """Run the kernel and compare. K's rows lie apart, with NaN between them where the memory is small."""
    c = case(*fault.case)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": fault.keys, "Nk": fault.keys})
    k, far = operands[1], fault.keys == 17
    stride = 2**27 if far else k.shape[-1] + 16  # 16 rows of 2**27: 2**31, most of it never touched
    size = (fault.keys - 1) * stride + k.shape[-1]
    room = torch.empty(size, dtype=k.dtype) if far else torch.full((size,), torch.nan, dtype=k.dtype)
    operands[1] = room.as_strided(k.shape, (size, size, stride, 1)).copy_(k)
    assert_as_exact_as_eager(Kernel(c.spec, tile)(operands, sizes), c, operands)


def _shows(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, Fault):
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(name: str) -> None:
    fault = FAULTS[name]
    tile = SINGLE if fault.case[1] == "float32" else HALF
    with emulated(fault.target):
        assert not _shows(lambda: _check(fault, tile))
        with injected(fault):
            assert _shows(lambda: _check(fault, tile))
    if fault.interpreter is not None:
        with injected(fault):
            assert _shows(lambda: _check(fault, tile)) == fault.interpreter
