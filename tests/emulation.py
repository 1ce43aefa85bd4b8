"""Instructions that this processor may not have, as functions: kernels for AMX, AVX-512 and pairs of bfloat16, on x86
and on Arm, run anywhere, slowly.

    with emulation.compiling(emulation.AMX):
        kernel = Kernel(spec, tilings_for(spec, emulation.AMX), emulation.AMX)

A kernel's text calls such an instruction by its LLVM intrinsic (`codegen/mlir/x86.py`, `arm.py`). `emulated` puts a
call of a function of the same text in its place, which does what the manual says with vectors that LLVM cuts to what
there is. Left out are exceptions, results that are denormal, masks other than all lanes, and that Arm's products of
pairs are rounded to odd.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch

from fusion.codegen.cpu import machine_code
from fusion.codegen.mlir.builder import PTR, Builder, Value, shape_of, vector_of
from fusion.codegen.mlir.values import TILE
from fusion.codegen.mlir.vectormath import VectorMath
from fusion.codegen.mlir.x86 import BF16, F32, WORDS
from fusion.codegen.mlir.x86 import BYTES as OCTETS
from fusion.machine import Machine
from fusion.planning.register_tiles import Target, target_of

HERE = target_of(Machine.detect())
AVX2 = Target(lanes=8, tile_rows=4, tile_groups=3)
AVX512 = Target(lanes=16, avx512=True, tile_rows=8, tile_groups=3)
PAIRS = replace(AVX512, pairs=True, looks_up_bytes=True)
ARM_PAIRS = Target(lanes=4, pairs=True, tile_rows=4, tile_groups=4)
AMX = replace(AVX512, amx=True, looks_up_bytes=True)
AMX_FP16 = replace(AMX, float16=True)

HALF, HELD = "vector<16xbf16>", "vector<256xi32>"
"""Half a line of bfloat16; what a tile is held in."""
BYTES, LINE = 1024, 64
"""Of a tile, and of one of its 16 rows."""

Write = Callable[..., Value | None]
_written: dict[str, tuple[tuple[str, ...], str | None, Write]] = {}


def runs_here(target: Target) -> bool:
    """Whether this processor has the instructions of a target."""
    pairs = not target.pairs or (target.lanes == HERE.lanes and (HERE.pairs or HERE.amx))
    tiles = target.amx <= HERE.amx and target.float16 <= HERE.float16
    return target.avx512 <= HERE.avx512 and pairs and tiles


@contextlib.contextmanager
def compiling(target: Target) -> Iterator[None]:
    """Within it, kernels for a target run on this processor, and none is kept on disk."""
    engine = machine_code._engine
    made = engine if runs_here(target) else lambda source: engine(emulated(source))
    with mock.patch.multiple(machine_code, _engine=made, _object_name=lambda source: None):
        yield


def emulated(source: str) -> str:
    """A module's text without those instructions. bfloat16 are words in it: on some processors LLVM cannot even move
    vectors of them."""
    text = re.sub(r'llvm\.call_intrinsic "llvm\.((?:x86\.(?!sse)|aarch64)[^"]*)"', r"func.call @\1", source)
    text = re.sub(r"arith\.(truncf|extf) (%\S+) : (\S+) to (\S+)", _conversion, text)
    text = re.sub(r"(-?\d\.\d+e[+-]\d+)(>?) : (\S*bf16)", _word, text)
    used = [name for name in _written if f"@{name}(" in text]
    text = text.rstrip().removesuffix("}") + "".join(map(_function, used)) + "}\n"
    return re.sub("(?<!_)(?<!_v)bf16", "i16", text.replace(TILE, HELD))  # types, not names


def _word(found: re.Match[str]) -> str:
    """A constant of bfloat16 by its bits."""
    number, end, kind = found.groups()
    return f"{torch.tensor(float(number), dtype=torch.bfloat16).view(torch.int16)}{end} : {kind}"


def _conversion(found: re.Match[str]) -> str:
    op, value, source, target = found.groups()
    if "bf16" not in source + target:
        return found[0]
    return f"func.call @{op}_{shape_of(source)[0]}({value}) : ({source}) -> {target}"


def _as(name: str, types: Sequence[str], result: str | None) -> Callable[[Write], Write]:
    """The function that stands for an intrinsic."""

    def register(write: Write) -> Write:
        _written[name] = tuple(types), result, write
        return write

    return register


@functools.cache
def _function(name: str) -> str:
    types, result, write = _written[name]
    b, parameters = Builder(), [Value(f"%p{number}", type_) for number, type_ in enumerate(types)]
    found = write(b, *parameters)
    header = ", ".join(f"{value}: {value.type}" for value in parameters)
    returned = "" if result is None else f" {found} : {result}"
    arrow = "" if result is None else f" -> {result}"
    alone = 'attributes {llvm.passthrough = ["noinline"]}'
    return f"func.func private @{name}({header}){arrow} {alone} {{\n{b.text()}\n  return{returned}\n}}\n"


def _floor(b: Builder, x: Value) -> Value:
    return b.unary("math.floor", x, "floor")


@_as("x86.avx512.mask.reduce.ps.512", (F32, "i32", F32, "i16", "i32"), F32)
def _fraction(b: Builder, x: Value, *_: Value) -> Value:
    """x - floor(x); 0 of infinities."""
    return b.select(b.compare("oeq", b.unary("math.absf", x), float("inf")), 0.0, b.sub(x, _floor(b, x)))


@_as("x86.avx512.mask.scalef.ps.512", (F32, F32, F32, "i16", "i32"), F32)
def _scaled(b: Builder, x: Value, power: Value, *_: Value) -> Value:
    """x * 2**floor(power), the power in four parts, each of which is a float32."""
    whole = b.least(b.most(_floor(b, power), -400.0), 400.0)
    for part in range(4):
        quarter = _floor(b, b.mul(b.add(whole, float(part)), 0.25))
        exponent = b.add(b.op(f"arith.fptosi {quarter} : {F32} to {WORDS}", WORDS), 127)
        x = b.mul(x, b.bitcast(b.binary("arith.shli", exponent, 23), F32))
    return b.select(b.compare("uno", power, power), power, x)


@_as("x86.avx512.mask.cvtps2dq.512", (F32, WORDS, "i16", "i32"), WORDS)
def _nearest(b: Builder, x: Value, *_: Value) -> Value:
    """The nearest integers, the even ones of two."""
    return b.op(f"arith.fptosi {b.unary('math.roundeven', x)} : {F32} to {WORDS}", WORDS)


@_as("x86.avx512.rcp14.ps.512", (F32, F32, "i16"), F32)
def _reciprocal(b: Builder, x: Value, *_: Value) -> Value:
    """1 / x, of which the lowest bits are wrong: they are zero."""
    quotient = b.div(1.0, x)
    kept = b.bitcast(b.binary("arith.andi", b.bitcast(quotient, WORDS), -512), F32)
    return b.select(b.compare("olt", b.unary("math.absf", quotient), float("inf")), kept, quotient)


@_as("truncf_0", ("f32",), "bf16")
@_as("truncf_4", ("vector<4xf32>",), "vector<4xbf16>")
@_as("truncf_16", (F32,), HALF)
def _narrow(b: Builder, x: Value) -> Value:
    return VectorMath(b, avx512=False).narrow(x, "bf16")


@_as("extf_0", ("bf16",), "f32")
@_as("extf_4", ("vector<4xbf16>",), "vector<4xf32>")
@_as("extf_16", (HALF,), F32)
def _widen(b: Builder, x: Value) -> Value:
    lanes = shape_of(x.type)[0]
    words = b.convert("arith.extui", b.bitcast(x, vector_of("i16", lanes)), "i32")
    return b.bitcast(b.binary("arith.shli", words, 16), vector_of("f32", lanes))


@_as("x86.avx512bf16.cvtne2ps2bf16.512", (F32, F32), BF16)
def _narrow_two(b: Builder, high: Value, low: Value) -> Value:
    return b.shuffle(_narrow(b, low), _narrow(b, high), range(32))


@_as("aarch64.neon.bfdot.v4f32.v8bf16", ("vector<4xf32>", *["vector<8xbf16>"] * 2), "vector<4xf32>")
@_as("x86.avx512bf16.dpbf16ps.512", (F32, BF16, BF16), F32)
def _add_pairs(b: Builder, total: Value, left: Value, right: Value) -> Value:
    return _pairs(b, _pairs(b, total, left, right, 1), left, right, 0)


def _pairs(b: Builder, total: Value, left: Value, right: Value, odd: int) -> Value:
    """total + the products of the even or the odd bfloat16 of two vectors of pairs."""
    words = vector_of("i32", shape_of(total.type)[0])
    return b.fma(*(_element(b, b.bitcast(pairs, words), odd) for pairs in (left, right)), total)


def _element(b: Builder, words: Value, odd: int) -> Value:
    """The first or second bfloat16 of each word, as float32; 0 in place of denormal ones."""
    bits = b.binary("arith.andi", words, -65536) if odd else b.binary("arith.shli", words, 16)
    denormal = b.compare("eq", b.binary("arith.andi", bits, 0x7F800000), 0)
    return b.bitcast(b.select(denormal, 0, bits), vector_of("f32", shape_of(bits.type)[0]))


@_as("x86.avx512.vpermi2var.qi.512", (OCTETS, OCTETS, OCTETS), OCTETS)
def _from_two_tables(b: Builder, low: Value, index: Value, high: Value) -> Value:
    """Of two tables of 64 bytes, those at an index of seven bits."""
    table, places = _memory(b), _memory(b)
    for number, line in enumerate((low, high)):
        b.store(line, b.at(table, number * LINE, "i8"), align=1)
    b.store(b.binary("arith.andi", index, 127), places, align=1)
    with b.loop(0, LINE, hint="lane") as lane:
        place = b.at(places, lane, "i8")
        number = b.convert("arith.extui", b.load(place, "i8"), "i64")
        b.store(b.load(b.at(table, number, "i8"), "i8"), place)
    return b.load(places, OCTETS, align=1)


def _memory(b: Builder, tile: Value | None = None) -> Value:
    """Room for a tile, which may be there already."""
    at = b.op(f"llvm.alloca {b.constant(BYTES, 'i64')} x i8 {{alignment = 64 : i64}} : (i64) -> {PTR}", PTR, "tile")
    if tile is not None:
        b.store(tile, at, align=64)
    return at


def _copy(b: Builder, source: Value, source_step: Value | int, target: Value, target_step: Value | int) -> None:
    """The 16 rows of a tile; steps in bytes."""
    with b.loop(0, 16, hint="row") as row:
        line = b.load(b.at(source, b.mul(row, source_step), "i8"), WORDS, "line", align=1)
        b.store(line, b.at(target, b.mul(row, target_step), "i8"), align=1)


@_as("x86.tilezero.internal", ("i16", "i16"), HELD)
def _zero(b: Builder, *_: Value) -> Value:
    return b.constant(0, HELD)


@_as("x86.tileloadd64.internal", ("i16", "i16", PTR, "i64"), HELD)
def _load(b: Builder, rows: Value, columns: Value, address: Value, step: Value) -> Value:
    memory = _memory(b)
    _copy(b, address, step, memory, LINE)
    return b.load(memory, HELD, align=64)


@_as("x86.tilestored64.internal", ("i16", "i16", PTR, "i64", HELD), None)
def _store(b: Builder, rows: Value, columns: Value, address: Value, step: Value, tile: Value) -> None:
    _copy(b, _memory(b, tile), LINE, address, step)


def _half_element(b: Builder, words: Value, odd: int) -> Value:
    """The first or second float16 of each word, as float32."""
    bits = b.convert("arith.trunci", b.binary("arith.shrui", words, 16) if odd else words, "i16")
    return b.convert("arith.extf", b.bitcast(bits, vector_of("f16", shape_of(bits.type)[0])), "f32")


def _tile_product(element: Callable[[Builder, Value, int], Value]) -> Write:
    return lambda b, rows, columns, depth, *tiles: _multiply(b, *tiles, element)


for _name, _of in (("bf16", _element), ("fp16", _half_element)):
    _as(f"x86.tdp{_name}ps.internal", ("i16", "i16", "i16", HELD, HELD, HELD), HELD)(_tile_product(_of))


def _multiply(
    b: Builder, total: Value, left: Value, right: Value, element: Callable[[Builder, Value, int], Value]
) -> Value:
    """Each row of the sum, by the pairs of a row of `left`: even and odd products are summed apart."""
    sums, lines, pairs = (_memory(b, tile) for tile in (total, left, right))
    with b.loop(0, 16, hint="row") as row:
        start = b.mul(row, LINE)
        zero = [b.constant(0.0, F32)] * 2
        with b.carry(0, 16, 1, zero, hint="pair") as (loop, pair, halves):
            word = b.load(b.at(b.at(lines, start, "i8"), pair, "i32"), "i32", "word")
            one = b.broadcast(word, 16)
            line = b.load(b.at(pairs, b.mul(pair, LINE), "i8"), WORDS, "line")
            loop.yields(*(b.fma(element(b, one, n), element(b, line, n), half) for n, half in enumerate(halves)))
        here = b.at(sums, start, "i8")
        b.store(b.add(b.load(here, F32, "sum"), b.add(*loop.results)), here)
    return b.load(sums, HELD, align=64)
