"""What the tests of float8 operands share."""

from __future__ import annotations

import dataclasses

import torch

from fusion.ir import AttentionSpec
from tests.codegen.mlir.cases import Case, draw

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def stored(spec: AttentionSpec, format_: torch.dtype, which: str = "kv") -> AttentionSpec:
    """The spec with some of its operands, by name, stored in float8."""
    name = str(format_).removeprefix("torch.")
    operands = [dataclasses.replace(o, dtype=name) if o.name in which else o for o in spec.operands]
    return dataclasses.replace(spec, operands=tuple(operands))


def narrow(c: Case, format_: torch.dtype, which: str = "kv") -> Case:
    """The case with operands that are stored in float8."""
    return dataclasses.replace(c, spec=stored(c.spec, format_, which))


def drawn(c: Case, shape: dict[str, int], layout: str = "packed") -> tuple[list[torch.Tensor], list[int]]:
    operands, sizes = draw(c, shape, layout)
    return [x.to(o.torch_dtype) for x, o in zip(operands, c.spec.operands, strict=True)], sizes


def every_number(format_: torch.dtype) -> torch.Tensor:
    """All 256 of a format, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(format_)


def is_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal numbers, and NaN where there is NaN."""
    assert actual.dtype is expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~actual.isnan()], expected[~expected.isnan()])
