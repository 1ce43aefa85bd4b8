"""What is read from machine code that no device here runs: loops, units, redundancy, and predicted clocks."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.disassembly import Instruction, Loop, inner_loops
from fusion.codegen.triton.static_facts import redundancy
from fusion.codegen.triton.timeline import RATES, clocks_of

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
    assert loop.units == {"tensor": 3, "control": 3, "alu": 1, "special": 2, "fma": 1, "memory": 1}
    assert loop.products == {"HGMMA 64x64x16": 2, "HGMMA 64x128x16": 1}
    assert loop.exponentials == (2, 1)
    assert loop.spills == 1 and not loop.serialised


def test_products_that_all_wait_are_serialised() -> None:
    product = Instruction("HGMMA.64x64x16.F32.BF16", "R24, gdesc[UR4], R24, gsb0")
    wait = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    assert Loop((product, wait) * 8).serialised
    assert not Loop((product, *[Instruction(product.name, "R24, gdesc[UR4], R24")] * 7, wait)).serialised


def test_clocks_of_a_product() -> None:
    """64 x 64 x 16 multiply-adds at 2048 a clock for each of two warp groups; with 32 columns both factors come from
    shared memory at 192 bytes a clock, of which there are 128."""
    wide = Instruction("HGMMA.64x64x16.F32.BF16", "R24, gdesc[UR4], R24, gsb0")
    narrow = Instruction("HGMMA.64x32x16.F32.BF16", "R24, gdesc[UR4], R24, gsb0")
    assert clocks_of(Loop((wide,)), 8, RATES[90]).tensor == 64
    assert clocks_of(Loop((narrow,)), 8, RATES[90]).tensor == 1.5 * 32
    registers = Instruction(narrow.name, "R24, R120, gdesc[UR4], R24, gsb0")
    assert clocks_of(Loop((registers,)), 8, RATES[90]).tensor == 32


def test_what_runs_under_a_product_takes_no_more_time() -> None:
    product = Instruction("HGMMA.64x128x16.F32.BF16", "R24, R4, gdesc[UR4], R24, gsb0")
    wait = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    work = (Instruction("FFMA", "R7, R6, R5, R4"),) * 40
    under = clocks_of(Loop((product, *work, wait)), 8, RATES[90])
    after = clocks_of(Loop((product, wait, *work)), 8, RATES[90])
    assert under.issue == after.issue and under.tensor == after.tensor
    assert under.trip < after.trip <= after.tensor + after.issue
    assert under.trip >= under.busiest


@pytest.mark.parametrize(("rows", "times"), [(64, 2), (128, 1)])
def test_redundancy_of_a_layout(rows: int, times: int) -> None:
    text = (
        "#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [8, 1], instrShape = [16, 64, 16]}>\n"
        f"%s = ttng.warp_group_dot %q, %k, %zero : tensor<{rows}x128xbf16> * tensor<128x64xbf16> "
        f"-> tensor<{rows}x64xf32, #mma> loc(#loc)\n"
    )
    assert redundancy(text) == times
