"""Matrix products of warps (mma) and of groups of four warps (wgmma), summed exactly and rounded once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from tests.ptx.program import Run, list_of, opcode
from tests.ptx.values import from_bfloat16
from tests.ptx.wave import GROUP, UNSIGNED, WARP, Mask, Wave

CHUNK = 16
"""Bytes that lie side by side in shared memory, however a factor is swizzled."""


def rounded(sums: np.ndarray) -> np.ndarray:
    """float32 of exact sums. Devices truncate, which tests of float32 put in its place."""
    return sums.astype(np.float32)


def _widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """float64 of the bits of an element."""
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return (from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16)).astype(np.float64)


def _elements(wave: Wave, registers: list[str], kind: str, mask: Mask) -> np.ndarray:
    """Elements [registers, warps, 8, 4, those in a register]: a lane has one place of an 8 x 4 grid."""
    bits = np.ascontiguousarray(wave.get_active(registers, np.uint32, mask).T).reshape(len(registers), -1, 8, 4, 1)
    return _widened(bits if kind == "tf32" else bits.view(np.uint16), kind)


def _left(wave: Wave, registers: list[str], kind: str, mask: Mask) -> np.ndarray:
    """The factor [warps, 16, K] that warps hold in registers."""
    elements = _elements(wave, registers, kind, mask)
    pairs = elements.reshape(-1, 2, *elements.shape[1:])  # the upper and the lower eight rows
    return pairs.transpose(2, 1, 3, 0, 4, 5).reshape(elements.shape[1], 16, -1)


def _right(wave: Wave, registers: list[str], kind: str, mask: Mask) -> np.ndarray:
    """The factor [warps, K, 8] that warps hold in registers."""
    elements = _elements(wave, registers, kind, mask)
    return elements.transpose(1, 0, 3, 4, 2).reshape(elements.shape[1], -1, 8)


def _rows_of_lanes(values: np.ndarray) -> np.ndarray:
    """Sums [threads, 2 registers for each 4 columns] as [warps, 16, N]."""
    lanes = values.reshape(-1, 8, 4, values.shape[1] // 4, 2, 2)
    return lanes.transpose(0, 4, 1, 3, 2, 5).reshape(len(lanes), 16, -1)


def _lanes_of_rows(sums: np.ndarray) -> np.ndarray:
    """The reverse of `_rows_of_lanes`."""
    rows = sums.reshape(-1, 2, 8, sums.shape[-1] // 8, 4, 2)
    return rows.transpose(0, 2, 4, 3, 1, 5).reshape(len(rows) * WARP, -1)


@opcode("mma")
def _mma(parts: list[str], args: list[str], line: str) -> Run:
    (d, a, b, c), kind = map(list_of, args), parts[7]
    if not parts[3].startswith("m16n8k") or kind not in ("bf16", "f16", "tf32"):
        raise NotImplementedError(f"the emulator has no such product: {line}")

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole(mask, WARP, f"a product in divergent code: {line}")
        sums = _rows_of_lanes(wave.get_active(c, np.float32, mask))
        result = _left(wave, a, kind, mask) @ _right(wave, b, kind, mask) + sums
        wave.put_active(d, _lanes_of_rows(rounded(result)), mask)

    return run


@functools.lru_cache(maxsize=4096)
def _chunks(descriptor: int, rows: int, depth: int, size: int, transposed: int) -> np.ndarray:
    """Places of the chunks of a factor in shared memory, by the descriptor of its layout: [rows, chunks of a row], or
    [chunks of a column, depth] of one that is stored transposed."""
    start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle, across = descriptor >> 62 & 3, CHUNK // size
    width = {0: 16, 1: 128, 2: 64, 3: 32}[swizzle]
    step = (across, 1) if transposed else (1, across)
    r, k = np.meshgrid(np.arange(0, rows, step[0]), np.arange(0, depth, step[1]), indexing="ij")
    if transposed:
        at = (r // (width // size)) * lead + (k // 8) * stride + (k % 8) * width + (r % (width // size)) * size
    elif swizzle:
        at = (r // 8) * stride + (r % 8) * width + k * size
    else:
        at = (r // 8) * stride + (k // across) * lead + (r % 8) * CHUNK
    at = at + start
    return at ^ (((at >> 7) & {1: 7, 2: 3, 3: 1}[swizzle]) << 4) if swizzle else at


def _described(
    wave: Wave, groups: np.ndarray, descriptors: list[int], rows: int, depth: int, kind: str, transposed: int, line: str
) -> np.ndarray:
    """The factor [groups, rows, depth] in shared memory."""
    size = 4 if kind == "tf32" else 2
    places = np.stack([_chunks(descriptor, rows, depth, size, transposed) for descriptor in descriptors])
    warps = np.repeat(groups * (GROUP // WARP), places[0].size)
    chunks = wave.shared.load(places.reshape(-1), CHUNK, warps, line, several=True).view(UNSIGNED[size])
    if transposed:
        chunks = chunks.reshape(*places.shape, -1).swapaxes(2, 3)
    return _widened(np.ascontiguousarray(chunks).reshape(len(groups), rows, depth), kind)


def _group_products(
    parts: list[str], args: list[str], line: str
) -> Callable[[Wave, np.ndarray, Mask], Callable[[np.ndarray], np.ndarray]]:
    """Function that reads the descriptors, and a left factor in registers, of these groups of warps at once. It returns
    a function of some of the groups (numbers among them): the factors' products [groups, 64, N]."""
    sizes = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4])
    n, depth, kind = int(sizes.group(1)), int(sizes.group(2)), parts[6]
    in_registers = args[1].startswith("{")
    flags = [int(flag) for flag in args[6:]]
    left_transposed, right_transposed = (0, *flags[:1]) if in_registers and flags else flags[:2] or (0, 0)

    def begin(wave: Wave, groups: np.ndarray, mask: Mask) -> Callable[[np.ndarray], np.ndarray]:
        described = lambda operand: wave.get(operand, np.uint64)[groups * GROUP].tolist()
        right, left = described(args[2]), [] if in_registers else described(args[1])
        registers = _left(wave, list_of(args[1]), kind, mask).reshape(-1, 64, depth) if in_registers else None

        def factor(descriptors: list[int], some: np.ndarray, rows: int, transposed: int) -> np.ndarray:
            chosen = [descriptors[number] for number in some]
            return _described(wave, groups[some], chosen, rows, depth, kind, transposed, line)

        def product(some: np.ndarray) -> np.ndarray:
            a = factor(left, some, 64, left_transposed) if registers is None else registers[some]
            return a @ factor(right, some, n, right_transposed).swapaxes(1, 2)

        return product

    return begin


def _wait(pending: int, line: str) -> Run:
    """The products of all groups but the last `pending` ones, once more: nothing may have changed."""

    def run(wave: Wave, mask: Mask) -> None:
        waits = np.isin(np.arange(wave.threads // GROUP), wave.whole(mask, GROUP, f"in divergent code: {line}"))
        products, wave.products = wave.products, []
        for product, result, groups, number, text in products:
            ends = waits[groups] & (number < wave.committed["products"][groups] - pending)
            if ends.any() and not np.array_equal(product(np.flatnonzero(ends)), result[ends], equal_nan=True):
                wave.hazards.append(f"shared memory changed under {text[:80]}")
            if not ends.all():
                left = np.flatnonzero(~ends)
                again = lambda some, product=product, left=left: product(left[some])
                wave.products.append((again, result[left], groups[left], number[left], text))

    return run


@opcode("wgmma")
def _wgmma(parts: list[str], args: list[str], line: str) -> Run:
    if parts[1] == "wait_group":
        return _wait(int(args[0], 0), line)

    def commit(wave: Wave, mask: Mask) -> None:
        wave.committed["products"][wave.whole(mask, GROUP, f"in divergent code: {line}")] += 1

    if parts[1] in ("fence", "commit_group"):
        return commit if parts[1] == "commit_group" else lambda wave, mask: None
    registers, begin = list_of(args[0]), _group_products(parts, args, line)

    def run(wave: Wave, mask: Mask) -> None:
        groups = wave.whole(mask, GROUP, f"a product in divergent code: {line}")
        product = begin(wave, groups, mask)
        result = product(np.arange(len(groups)))
        wave.products.append((product, result, groups, wave.committed["products"][groups], line))
        values, adds = _lanes_of_rows(result), wave.get(args[3], np.bool_)[slice(None) if mask is None else mask]
        if adds.any():
            values = np.where(adds[:, None], values + wave.get_active(registers, np.float32, mask), values)
        wave.put_active(registers, rounded(values), mask)

    return run
