"""Functions of score programs on GPUs: where they may be less exact, and where integers become floats."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.absent import absent, meta
from benchmarks.offline.disassembly import static_facts
from fusion.codegen.triton.launch import Kernel, forward_kernels
from fusion.ir import AttentionSpec
from fusion.ir.expr import Expr, walk
from fusion.machine import machine
from fusion.planning.choice import Tile
from tests.numerics import assert_as_exact_as_eager, assert_same

UNIT_ERROR = 2.0**-11
"""Relative, of NVIDIA's instruction for tanh (PTX ISA, tanh.approx.f32)."""


def traced(score, *captured: torch.Tensor, dtype: torch.dtype = torch.bfloat16, d: int = 64) -> AttentionSpec:
    """The spec of a softmax over score(q @ k.mT, *captured)."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, *captured):
            return torch.softmax(score(q @ k.mT, *captured), -1) @ v

    operands = tuple(torch.empty(2, 4, 64, d, dtype=dtype) for _ in range(3))
    with fusion.collect_reports() as reports:
        fusion.rewrite(torch.export.export(Attention(), (*operands, *captured)))
    (site,) = reports[0].sites
    assert site.fused, site.reason
    return site.spec


def capped(s: torch.Tensor) -> torch.Tensor:
    return 20 * torch.tanh(s / 20)


def alibi(s: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return s + slopes[:, None, None] * (j - i)


def tangents(spec: AttentionSpec) -> list[Expr]:
    return [part for part in walk(spec.score) if part.op == "tanh"]


def test_a_tanh_that_the_model_rounds_to_bfloat16_is_marked() -> None:
    """And no other, nor where its argument is rebuilt; what is marked goes through JSON."""
    for dtype, score, rounded in (
        (torch.bfloat16, capped, True),
        (torch.float16, capped, False),
        (torch.float32, capped, False),
        (torch.bfloat16, lambda s: capped(s.float()).to(s.dtype), False),
        (torch.bfloat16, lambda s: capped(s.transpose(-1, -2)).transpose(-1, -2), True),
    ):
        spec = traced(score, dtype=dtype)
        (found,) = tangents(spec)
        assert (found.attr == "bfloat16") is rounded, (dtype, spec.score)
        assert tangents(AttentionSpec.from_json(spec.to_json())) == [found]
    text = forward_kernels(traced(capped), 64, 64, False)[0].text
    assert "tanh_bfloat16(" in text and "UNIT_TANH: tl.constexpr" in text
    assert "UNIT_TANH" not in forward_kernels(traced(capped, dtype=torch.float16), 64, 64, False)[0].text


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("cap", [20.0, 50.0, 200.0])
@pytest.mark.parametrize("sign", ["all", "random"])
def test_the_units_error_is_below_the_rounding_of_bfloat16(cap: float, size: float, sign: str) -> None:
    """Softmax and both products with a tanh that is off by all that the instruction may be."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 128, 64).bfloat16() for _ in range(3))
    q = q * size

    def attention(q, k, v, tanh=torch.tanh):
        return torch.softmax(cap * tanh(q @ k.mT / (8 * cap)), -1) @ v

    def unit(x):
        off = torch.ones_like(x) if sign == "all" else torch.randn_like(x).sign()
        return torch.tanh(x) * (1 + UNIT_ERROR * off)

    ours = attention(q.float(), k.float(), v.float(), unit).bfloat16()
    assert_as_exact_as_eager(ours, attention(q, k, v), attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("offset", [0, 1 << 20])
def test_distances_are_converted_by_rows_and_columns(offset: int) -> None:
    """One conversion for a row and one for a column of a tile, and the same numbers: float32 holds both."""
    spec = traced(alibi, torch.empty(4, dtype=torch.float32), dtype=torch.float32)
    text = forward_kernels(spec, 64, 64, False)[0].text
    loop, _, kernel = text.partition("\n\n\n")
    assert loop.count(", tl.float32)") - loop.count("KEYS], 0.0, tl.float32)") == 1, loop
    assert "tl.cast(i0 + n, tl.float32)" in kernel or "i0 - i" in kernel, kernel
    i, j, first = torch.arange(offset, offset + 128)[:, None], torch.arange(2 * offset + 64), offset
    assert_same((j - first).float() - (i - first).float(), (j - i).float())


def test_what_decides_is_divided_as_it_is_written() -> None:
    """Triton's own division may be off by two units on GPUs."""

    def blocks(s: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        return (s / 3).masked_fill((i / 41).floor() != (j / 41).floor(), -torch.inf)

    spec, device = traced(blocks), machine("h100")
    text = forward_kernels(spec, 64, 64, False)[0].text
    assert text.count("div_rn") == 2 and " / 41" not in text, text
    operands = [meta(torch.empty(2, 4, 64, 64, dtype=torch.bfloat16)) for _ in range(3)]
    with absent(device) as launches:
        Kernel(spec, Tile(rows=64, keys=64, warps=4, stages=2))(operands, [2, 4, 64, 64])
    assert "div.rn.f32" in launches.kernels[0].asm["ptx"]


@pytest.mark.long
@pytest.mark.parametrize("target", ["a100", "h100"])
def test_soft_caps_take_the_unit(target: str) -> None:
    """Its loop has half as many instructions again as without a cap, at most."""
    device, lengths = machine(target), {}
    operands = [meta(torch.empty(4, 16, 1024, 128, dtype=torch.bfloat16)) for _ in range(3)]
    for name, score in (("full", lambda s: s), ("capped", capped)):
        with absent(device) as launches:
            Kernel(traced(score, d=128), Tile(rows=128, keys=64, warps=8, stages=2))(operands, [4, 16, 1024, 1024])
        facts = static_facts(launches.kernels[0])
        assert not facts.main.spills, facts.main.body
        lengths[name] = len(facts.main.body)
        tanh = sum(instruction.name.startswith("MUFU.TANH") for instruction in facts.main.body)
        assert bool(tanh) is (name == "capped"), facts.main.body
    assert lengths["capped"] <= 1.5 * lengths["full"], lengths
