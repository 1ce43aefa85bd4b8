"""CPU kernels that read keys and values stored in float8."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.export import attention_module
from fusion.codegen.cpu.launch import Kernel
from fusion.errors import MlirExportError
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import HERE, TARGETS, assert_as_exact_as_eager, case
from tests.float8 import FORMATS, drawn, every_number, is_same, narrow


@pytest.mark.one_in(2)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_every_number_is_widened_exactly(format_: torch.dtype, queries: int) -> None:
    """A query of zeros with a single key has its value for a result: subnormal numbers, infinities and NaN included."""
    c = narrow(case("plain", "bfloat16", 16), format_)
    (q, k, _), sizes = drawn(c, {"B": 1, "H": 16, "Nq": queries, "Nk": 1})
    v = every_number(format_).view(1, 16, 1, 16)
    kernel = Kernel(c.spec, tilings_for(c.spec, HERE), HERE)
    is_same(kernel([torch.zeros_like(q), k, v], sizes), v.bfloat16().expand(1, 16, queries, 16))


@pytest.mark.parametrize(
    ("format_", "dtype", "which", "target"),
    [
        (FORMATS[0], "bfloat16", "kv", "best"),
        (FORMATS[1], "float32", "qk", "avx2"),
    ],
)
def test_as_exact_as_eager(format_: torch.dtype, dtype: str, which: str, target: str) -> None:
    c = narrow(case("causal", dtype, 24, 16, group=2), format_, which)
    kernel = Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    for layout, queries in (("gaps", 1), ("columns", 75)):
        operands, sizes = drawn(c, {"B": 2, "H": 1, "Nq": queries, "Nk": 75}, layout)
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)


def test_exported_functions_take_no_float8() -> None:
    c = narrow(case("plain", d=16), FORMATS[0])
    with pytest.raises(MlirExportError, match="k is float8_e4m3fn; convert it before the export"):
        attention_module(c.spec, [(1, 1, 8, 16)] * 3, [1, 1, 8, 8])
