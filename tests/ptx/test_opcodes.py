"""Single opcodes against numpy, and faults of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import arithmetic, conversions, matrices, movement  # noqa: F401  (they register opcodes)
from tests.ptx.memory import Fault, Memory, Shared
from tests.ptx.program import Program
from tests.ptx.wave import Wave

LANES = np.arange(32)
F = np.random.default_rng(0).standard_normal(32).astype(np.float32)
G = np.random.default_rng(1).standard_normal(32).astype(np.float32)
INTEGERS = np.random.default_rng(2).integers(-(2**31), 2**31, 32).astype(np.int32)


def executed(body: str, tensors=(), shared: int = 256, blocks: int = 1, **registers: np.ndarray) -> Wave:
    """Blocks of 32 threads after these statements."""
    program = Program(f".visible .entry kernel(\n)\n{{\n{body}\nret;\n}}\n")
    wave = Wave(program, [(n, 0, 0) for n in range(blocks)], (blocks, 1, 1), 32, shared, Memory(list(tensors)), {}, {})
    for name, value in registers.items():
        wave.put(f"%{name}", value, None)
    with np.errstate(all="ignore"):
        wave.run()
    return wave


WORDS = INTEGERS.view(np.uint32)
NAN = np.where(LANES % 3 == 0, np.float32("nan"), F)


@pytest.mark.parametrize(
    ("line", "a", "b", "expected"),
    [
        ("add.f32 %r9, %r1, %r2;", F, G, F + G),
        ("fma.rn.f32 %r9, %r1, %r2, %r2;", F, G, (F.astype(np.float64) * G + G).astype(np.float32)),
        ("max.f32 %r9, %r1, %r2;", NAN, G, np.fmax(NAN, G)),
        ("max.NaN.f32 %r9, %r1, %r2;", NAN, G, np.maximum(NAN, G)),
        ("min.f32 %r9, %r1, %r2;", NAN, G, np.fmin(NAN, G)),
        ("max.f32 %r9, %r1, %r2, 0f3F800000;", NAN, G, np.fmax(np.fmax(NAN, G), np.float32(1))),
        ("mov.b64 %rd1, {%r1, %r2};\nmul.rn.f32x2 %rd2, %rd1, %rd1;\nmov.b64 {_, %r9}, %rd2;", F, G, G * G),
        ("mov.b64 %rd1, {%r1, %r3};\nadd.rn.f32x2 %rd2, %rd1, %rd1;\nmov.b64 {%r9, _}, %rd2;", F, G, F + F),
        ("mov.b64 %rd1, {%r1, %r3};\nadd.rn.f32x2 %rd2, %rd1, %rd1;\nmov.b64 {_, %r9}, %rd2;", F, G, F * np.nan),
        ("abs.f16x2 %r9, %r1;", WORDS, WORDS, WORDS & 0x7FFF7FFF),
        ("ex2.approx.f32 %r9, %r1;", F, G, np.exp2(F.astype(np.float64)).astype(np.float32)),
        ("ex2.approx.ftz.f32 %r9, %r1;", np.full(32, np.float32(-140)), G, np.zeros(32, np.float32)),
        ("mad.lo.cc.u32 %r8, %r1, %r2, %r1;\nmadc.hi.u32 %r9, %r1, %r2, 7;", WORDS, WORDS[::-1].copy(),
         (WORDS.astype(np.uint64) * WORDS[::-1] + WORDS + (np.uint64(7) << np.uint64(32)) >> np.uint64(32))
         .astype(np.uint32)),
        ("mul.lo.s32 %r9, %r1, %r2;", INTEGERS, INTEGERS, INTEGERS * INTEGERS),
        ("mul.hi.u32 %r9, %r1, %r2;", INTEGERS.view(np.uint32), LANES.astype(np.uint32),
         (INTEGERS.view(np.uint32).astype(np.uint64) * LANES.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)),
        ("cvt.s64.s32 %rd1, %r1;\nmul.lo.s64 %rd1, %rd1, 4294967297;\ncvt.s64.s32 %rd2, %r2;\n"
         "mul.hi.s64 %rd3, %rd1, %rd2;\ncvt.u32.u64 %r9, %rd3;", INTEGERS, INTEGERS[::-1].copy(), np.array(
            [int(x) * 4294967297 * int(y) >> 64 & 0xFFFFFFFF for x, y in zip(INTEGERS, INTEGERS[::-1], strict=True)],
            np.uint32)),
        ("cvt.u16.u32 %rs1, %r1;\nmul.hi.s16 %rs2, %rs1, 10923;\ncvt.s32.s16 %r9, %rs2;", INTEGERS, INTEGERS,
         (INTEGERS.astype(np.int16).astype(np.int32) * 10923 >> 16)),
        ("div.s32 %r9, %r1, 7;", INTEGERS, INTEGERS, np.trunc(INTEGERS / 7).astype(np.int32)),
        ("rem.s32 %r9, %r1, 7;", INTEGERS, INTEGERS, np.fmod(INTEGERS, 7)),
        ("shr.s32 %r9, %r1, 40;", INTEGERS, INTEGERS, INTEGERS >> 31),
        ("shl.b32 %r9, %r1, 3;", INTEGERS, INTEGERS, INTEGERS << 3),
        ("bfe.s32 %r9, %r1, 4, 8;", INTEGERS, INTEGERS, (INTEGERS << 20) >> 24),
        ("lop3.b32 %r9, %r1, %r2, %r1, 0x96;", INTEGERS, INTEGERS[::-1].copy(), INTEGERS[::-1]),
        ("prmt.b32 %r9, %r1, %r2, 0x0123;", INTEGERS, INTEGERS, INTEGERS.byteswap()),
        ("prmt.b32 %r9, %r1, %r3, 0x3210U;", INTEGERS, INTEGERS, INTEGERS),  # %r3 was not written
        ("prmt.b32 %r9, %r3, %r4, 0x3340U;", INTEGERS, INTEGERS, np.full(32, np.int32(-1))),  # neither was
        ("selp.b32 %r9, %r1, %r2, 1;", INTEGERS, -INTEGERS, INTEGERS),
        ("cvt.rzi.s32.f32 %r9, %r1;", 100 * F, G, (100 * F).astype(np.int32)),
        ("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", INTEGERS, INTEGERS, INTEGERS[LANES ^ 5]),
        ("shfl.sync.idx.b32 %r9, %r1, 3, 31, -1;", INTEGERS, INTEGERS, np.repeat(INTEGERS[3], 32)),
        ("redux.sync.max.s32 %r9, %r1, -1;", INTEGERS, INTEGERS, np.repeat(INTEGERS.max(), 32)),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_results(line: str, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> None:
    wave = executed(line, r1=a, r2=b)
    np.testing.assert_array_equal(wave.registers["%r9"].view(np.asarray(expected).dtype), expected)


def test_high_words_of_64_bits() -> None:
    a = WORDS.astype(np.uint64) << np.uint64(32) | WORDS[::-1]
    wave = executed("mul.hi.u64 %rd9, %rd1, -3689348814741910323;", rd1=a)
    expected = [int(x) * (2**64 - 3689348814741910323) >> 64 for x in a]
    np.testing.assert_array_equal(wave.registers["%rd9"], np.array(expected, np.uint64))


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    wave = executed("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", r1=F, r2=G)
    pairs = torch.from_numpy(np.stack([G, F], 1)).to(torch.bfloat16).view(torch.int32)[:, 0].numpy()
    np.testing.assert_array_equal(wave.registers["%r9"].view(np.int32), pairs)


@pytest.mark.parametrize("opcode", ["sub.rn.bf16x2", "sub.rn.bf16"])
def test_differences_of_bfloat16(opcode: str) -> None:
    a, b = (torch.from_numpy(np.concatenate([x, y])).bfloat16() for x, y in ((F, G), (G[::-1].copy(), 9 * F)))
    if opcode.endswith("bf16"):
        a, b = a[:32], b[:32]
    bits = lambda x: x.view(torch.int16).numpy().view(np.uint16 if opcode.endswith("bf16") else np.uint32)
    name = "rs" if opcode.endswith("bf16") else "r"
    wave = executed(f"{opcode} %{name}9, %{name}1, %{name}2;", **{f"{name}1": bits(a), f"{name}2": bits(b)})
    np.testing.assert_array_equal(wave.registers[f"%{name}9"], bits(a - b))


def test_a_sum_of_bfloat16_is_rounded_once() -> None:
    """The product lies in the middle of two numbers, and float32 has no number for the sum."""
    bits = lambda x: np.full(32, torch.tensor(x).bfloat16().view(torch.uint16).item(), np.uint16)
    body = "fma.rn.bf16 %rs9, %rs1, %rs2, %rs3;"
    wave = executed(body, rs1=bits(1 + 2.0**-7), rs2=bits(1.5), rs3=bits(-(2.0**-40)))
    np.testing.assert_array_equal(wave.registers["%rs9"], bits(1.5 + 2.0**-7))


def test_local_memory_belongs_to_a_thread() -> None:
    body = ".local .align 4 .b8 __local_depot0[8];\nmov.b64 %SPL, __local_depot0;\nst.local.b32 [%SPL+4], %r1;\n"
    wave = executed(body + "ld.local.b32 %r9, [%SPL+4];", r1=INTEGERS)
    np.testing.assert_array_equal(wave.registers["%r9"].view(np.int32), INTEGERS)


def test_addresses_of_32_bits_wrap_around() -> None:
    body = ".local .align 4 .b8 __local_depot0[8];\nst.local.b32 [%r2+8], %r1;\n"
    wave = executed(body + "ld.local.b32 %r9, [4];", r1=INTEGERS, r2=np.full(32, -4, np.int32))
    np.testing.assert_array_equal(wave.registers["%r9"].view(np.int32), INTEGERS)


def test_threads_diverge_and_meet() -> None:
    body = "setp.lt.s32 %p1, %r1, 10;\n@%p1 bra $L1;\nmov.b32 %r9, 1;\nbra.uni $L2;\n$L1:\nmov.b32 %r9, 2;\n$L2:\n"
    wave = executed(body + "add.s32 %r9, %r9, 1;", r1=LANES.astype(np.int32))
    np.testing.assert_array_equal(wave.registers["%r9"], np.where(LANES < 10, 3, 2))


def test_threads_wait_at_a_barrier_for_those_of_a_branch_that_lies_behind_it() -> None:
    body = "setp.lt.s32 %p1, %r1, 10;\nmov.b32 %r9, 1;\n@%p1 bra $L3;\n$L1:\nbar.sync 0;\nbra.uni $L2;\n"
    wave = executed(body + "$L3:\nmov.b32 %r9, 2;\nbra.uni $L1;\n$L2:\n", r1=LANES.astype(np.int32))
    np.testing.assert_array_equal(wave.registers["%r9"], np.where(LANES < 10, 2, 1))


def test_a_product_of_a_warp() -> None:
    """m16n8k16: elements of the factors lie as the manual's figures say."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 16, generator=generator).half(), torch.randn(16, 8, generator=generator).half()
    row, column = LANES >> 2, 2 * (LANES & 3)
    pair = lambda low, high: np.stack([low.numpy(), high.numpy()], 1).view(np.uint32)[:, 0]
    left = [
        pair(a[row + 8 * (r & 1), column + 8 * (r >> 1)], a[row + 8 * (r & 1), column + 1 + 8 * (r >> 1)])
        for r in range(4)
    ]
    right = [pair(b[column + 8 * r, row], b[column + 1 + 8 * r, row]) for r in range(2)]
    registers = {f"r{n}": value for n, value in enumerate([*left, *right])} | {"r6": np.zeros(32, np.float32)}
    line = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r10, %r11, %r12, %r13}, {%r0, %r1, %r2, %r3}, "
    wave = executed(line + "{%r4, %r5}, {%r6, %r6, %r6, %r6};", **registers)
    product = (a.double() @ b.double()).float().numpy()
    for r in range(4):
        found = wave.registers[f"%r{10 + r}"].view(np.float32)
        np.testing.assert_array_equal(found, product[row + 8 * (r >> 1), column + (r & 1)])


def test_copies_are_not_there_before_they_are_waited_for() -> None:
    source = torch.arange(128, dtype=torch.int32)
    address = (source.data_ptr() + 16 * LANES).astype(np.uint64)
    copy = "cp.async.cg.shared.global [%r1], [%rd1], 16;\ncp.async.commit_group;\n"
    places = {"r1": (16 * LANES).astype(np.uint32), "rd1": address}
    early = executed(copy + "ld.shared.b32 %r9, [%r1];", [source], 512, **places)
    late = executed(copy + "cp.async.wait_group 0;\nld.shared.b32 %r9, [%r1];", [source], 512, **places)
    assert (early.registers["%r9"] == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(late.registers["%r9"], 4 * LANES)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r9, [%rd1 + 4];", "outside of all tensors"),
        ("ld.global.b32 %r9, [%rd1 + 2];", "not aligned"),
        ("ld.shared.b32 %r9, [%r1 + 256];", "outside of shared memory"),
        ("add.s32 %r9, %r8, 1;", "read before it is written"),
        ("setp.lt.s32 %p1, %r1, 10;\n@%p1 bar.sync 0;", "barrier in divergent code"),
    ],
)
def test_faults(body: str, message: str) -> None:
    tensor = torch.zeros(32, dtype=torch.int32)
    addresses = (tensor.data_ptr() + 4 * LANES).astype(np.uint64)
    with pytest.raises(Fault, match=message):
        executed(body, [tensor], rd1=addresses, r1=(4 * LANES).astype(np.uint32))


@pytest.mark.parametrize(("first", "second"), ["wr", "rw", "ww"])
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("other", [0, 1])
def test_races(first: str, second: str, barrier: bool, other: int) -> None:
    """Two warps at one place of shared memory, between which there is a barrier or none."""
    shared, place = Shared(16), np.array([4])

    def access(how: str, warp: int, value: int) -> None:
        warps, values = np.array([warp]), np.array([[value]], np.uint32).view(np.uint8)
        shared.store(place, values, warps, how) if how == "w" else shared.load(place, 4, warps, how)

    access(first, 0, 1)
    shared.barriers += int(barrier)
    access(first, 0, 1)
    shared.barriers += int(barrier)
    if barrier or not other:
        access(second, other, 2)
        return
    with pytest.raises(Fault, match="a race"):
        access(second, other, 2)


@pytest.mark.parametrize("writer", [0, 1])
def test_one_instruction_races_with_itself(writer: int) -> None:
    places, warps = np.array([4, 4]), np.array([0, 1])
    values = np.array([[1], [2]], np.uint32).view(np.uint8)
    Shared(16).store(places, values[[0, 0]], warps, "the same bytes")
    with pytest.raises(Fault, match="two warps write"):
        Shared(16).store(places, values, warps, "others")
    shared = Shared(16)
    shared.load(places, 4, warps, "by both")
    with pytest.raises(Fault, match="another warp reads"):
        shared.store(places[:1], values[:1], warps[[writer]], "by one")


TRIPS = """mov.b32 %r1, 0;
st.shared.b32 [%r1], %ctaid.x;
$L1:
bar.sync 0;
add.s32 %r1, %r1, 1;
setp.le.s32 %p1, %r1, %ctaid.x;
@%p1 bra $L1;
ld.shared.b32 %r9, [0];
"""


def test_blocks_of_a_wave_go_their_own_ways() -> None:
    """Loops of as many trips as a block has blocks before it, with barriers and shared memory of its own."""
    wave = executed(TRIPS, blocks=4)
    blocks = np.repeat(np.arange(4), 32)
    np.testing.assert_array_equal(wave.registers["%r1"], blocks + 1)
    np.testing.assert_array_equal(wave.registers["%r9"], blocks)
    np.testing.assert_array_equal(wave.shared.barriers, np.arange(1, 5))


def test_groups_of_copies_are_a_threads_own() -> None:
    """A wait for all groups but one, where half of the threads have two."""
    source = torch.arange(128, dtype=torch.int32)
    places = {"r1": (16 * LANES).astype(np.uint32), "rd1": (source.data_ptr() + 16 * LANES).astype(np.uint64)}
    body = "setp.lt.s32 %p1, %r1, 256;\ncp.async.cg.shared.global [%r1], [%rd1], 16;\ncp.async.commit_group;\n"
    body += "@%p1 cp.async.commit_group;\ncp.async.wait_group 1;\nld.shared.b32 %r9, [%r1];"
    wave = executed(body, [source], 512, **places)
    np.testing.assert_array_equal(wave.registers["%r9"], np.where(LANES < 16, 4 * LANES, 0xFFFFFFFF))


@pytest.mark.parametrize("access", ["ld.global.b32 %r9, [%rd1];", "st.global.b32 [%rd1], 7;", "add"])
def test_blocks_race_in_global_memory(access: str) -> None:
    """The block after the first meets what the first wrote; additions alone may."""
    memory = torch.zeros(32)
    addresses = np.tile((memory.data_ptr() + 4 * LANES).astype(np.uint64), 2)
    add = "red.global.add.f32 [%rd1], %r2;"
    if access == "add":
        executed(add, [memory], blocks=2, rd1=addresses, r2=np.ones(64, np.float32))
        assert (memory == 2).all()
        access = "ld.global.b32 %r9, [%rd1];"
    else:
        add = "st.global.b32 [%rd1], 5;"
    body = f"setp.eq.s32 %p1, %ctaid.x, 0;\n@%p1 {add}\n@!%p1 {access}"
    with pytest.raises(Fault, match="race in global memory"):
        executed(body, [memory], blocks=2, rd1=addresses, r2=np.ones(64, np.float32))
