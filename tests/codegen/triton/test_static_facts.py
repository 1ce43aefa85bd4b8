"""Facts read from machine code that no device here runs: loops, units and redundancy."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.absent import absent
from benchmarks.offline.disassembly import Instruction, Loop, StaticFacts, inner_loops, redundancy, static_facts
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.ir import AttentionSpec
from fusion.machine import machine
from fusion.planning.gpu_clocks import JOINT

HOPPER = machine("h100")

LISTING = """
.text.attention_forward:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR44], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   FMNMX R5, R24, R25, !PT ;
        /*0060*/                   MUFU.EX2 R6, R5 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R56, R120, gdesc[UR8].tnspB, R56, gsb0 ;
        /*0080*/                   FFMA R7, R6, R5, R4 ;
        /*0090*/                   MUFU.EX2 R8, R7 ;
        /*00a0*/                   STL [R1+0x10], R8 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/              @!P0 BRA `(.L_x_1) ;
        /*00d0*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*00e0*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00f0*/               @P1 BRA `(.L_x_2) ;
        /*0100*/                   EXIT ;
"""


def test_inner_loops_of_a_listing() -> None:
    """The loop that contains another, and the one without products, are not among them."""
    (loop,) = inner_loops(LISTING)
    assert len(loop.body) == 11
    assert sum(instruction.multiplies for instruction in loop.body) == 3
    assert loop.products == {"HGMMA 64x64x16": 2, "HGMMA 64x128x16": 1}
    assert loop.exponentials == (2, 1)
    assert loop.spills == 1 and not loop.serialised


def test_products_that_all_wait_are_serialised() -> None:
    product = Instruction("HGMMA.64x64x16.F32.BF16", "R24, gdesc[UR4], R24, gsb0")
    wait = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    assert Loop((product, wait) * 8).serialised
    assert not Loop((product, *[Instruction(product.name, "R24, gdesc[UR4], R24")] * 7, wait)).serialised


@pytest.mark.parametrize(("rows", "times"), [(64, 2), (128, 1)])
def test_redundancy_of_a_layout(rows: int, times: int) -> None:
    text = (
        "#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [8, 1], instrShape = [16, 64, 16]}>\n"
        f"%s = ttng.warp_group_dot %q, %k, %zero : tensor<{rows}x128xbf16> * tensor<128x64xbf16> "
        f"-> tensor<{rows}x64xf32, #mma> loc(#loc)\n"
    )
    assert redundancy(text) == times


def traced(d: int, causal: bool = True, d_v: int = 0) -> AttentionSpec:
    """Attention as the passes find it."""

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = q @ k.mT * d**-0.5
            if causal:
                live = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
                scores = scores.masked_fill(~live, float("-inf"))
            return torch.softmax(scores, -1) @ v

    operands = tuple(torch.empty(2, 4, 64, columns, dtype=torch.bfloat16) for columns in (d, d, d_v or d))
    with fusion.collect_reports() as reports:
        fusion.rewrite(torch.export.export(Attention(), operands))
    spec = reports[0].sites[0].spec
    assert spec is not None and (spec.mask is not None and spec.mask.full is not None) is causal
    return spec


def facts_on_hopper(d: int) -> dict[str, StaticFacts]:
    """Of the kernels that a training step launches, but for those without products."""
    spec, sizes = traced(d), [4, 16, 1024, 1024]
    q, k, v, out, grad = (torch.empty(4, 16, 1024, d, dtype=torch.bfloat16, device="meta") for _ in range(5))
    with absent(HOPPER) as launches:
        kernels = Differentiable(spec)
        kernels.outputs([q, k, v], sizes)
        statistics = torch.empty(3, 4, 16, 1024, device="meta")
        kernels.backward(grad, out, statistics, [q, k, v], sizes, (True,) * 3)
    found = {kernel.metadata.name: static_facts(kernel) for kernel in launches.kernels}
    assert found.keys() == set(launches.names)
    return {name: facts for name, facts in found.items() if facts.loops}


@pytest.mark.long
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_a_training_step_compiles_on_hopper(d: int) -> None:
    """No product waits for the one before, loops (almost) do not spill, and no warp group computes what another does.
    One kernel makes all gradients where its sums leave registers for a tile; it adds to memory 16 bytes at a time."""
    found = facts_on_hopper(d)
    assert (JOINT in found) == (d < 256) and len(found) == (2 if d < 256 else 4)
    for name, facts in found.items():
        assert not facts.serialised, name
        assert facts.main.spills <= 0.015 * len(facts.main.body), (name, facts.main.spills)
        assert facts.redundancy == 1, (name, facts.redundancy)
        added = [each.name for each in facts.main.body if each.base in ("RED", "REDG")]
        assert bool(added) == (name == JOINT) and all(".F32x4" in each for each in added)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_latent_attention_are_computed_once(causal: bool) -> None:
    """A block of 64 rows has eight warps, of which four would do for its rows: they share the keys."""
    q, k, v = (torch.empty(2, 16, 1024, columns, dtype=torch.bfloat16, device="meta") for columns in (576, 576, 512))
    kernel, sizes = Kernel(traced(576, causal, 512)), [2, 16, 1024, 1024]
    with absent(HOPPER, shared=True) as launches:
        kernel([q, k, v], sizes)
        keys = kernel.choice(sizes).tile.keys
    (facts,) = (static_facts(kernel) for kernel in launches.kernels)
    assert facts.redundancy == 1 and not facts.serialised and not facts.main.spills
    assert facts.main.products == {f"HGMMA 64x{keys // 2}x16": 576 // 16, "HGMMA 64x256x16": keys // 16}


@pytest.mark.long
def test_a_generation_compiles_nothing_after_its_first_tokens() -> None:
    """Whatever the length of the cache, or the parts that it is cut into."""
    q = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    with absent(HOPPER) as launches:
        kernel = Kernel(traced(128, causal=False))
        for n_k in (1000, 1001, 1008, 1023, 1024, 1025, 2047, 2048, 4096, 4097, 16384):
            k, v = (torch.empty(1, 32, n_k, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
            kernel([q, k, v], [1, 32, 1, n_k])
    assert sorted(kernel.metadata.name for kernel in launches.kernels) == ["attention_combine", "attention_split"]
    assert len(launches.names) == 22
