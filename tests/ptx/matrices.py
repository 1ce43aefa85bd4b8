"""Matrix products of warps (mma) and of groups of four warps (wgmma), summed exactly and rounded once."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.ptx.block import UNSIGNED, Block, Mask
from tests.ptx.memory import SEVERAL
from tests.ptx.program import Run, list_of, opcode
from tests.ptx.values import from_bfloat16

_ROW, _COLUMN = np.arange(32) >> 2, np.arange(32) & 3
"""Row, and first of a pair of columns, of a thread's elements within an 8 x 8 fragment."""


def _widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 of the bits of an element."""
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def _left(block: Block, registers: list[str], kind: str) -> np.ndarray:
    """The factor [warps, 16, K] that warps hold in registers."""
    single = kind == "tf32"
    depth = 2 * len(registers) if single else 4 * len(registers)
    a = np.zeros((block.threads // 32, 16, depth), np.float32)
    for r, name in enumerate(registers):
        bits, rows = block.get(name, np.uint32).reshape(-1, 32), _ROW + 8 * (r & 1)
        if single:
            a[:, rows, _COLUMN + 4 * (r >> 1)] = _widened(bits, kind)
            continue
        for half in (0, 1):
            a[:, rows, 2 * _COLUMN + half + 8 * (r >> 1)] = _widened((bits >> 16 * half).astype(np.uint16), kind)
    return a


def _right(block: Block, registers: list[str], kind: str) -> np.ndarray:
    """The factor [warps, K, 8] that warps hold in registers."""
    single = kind == "tf32"
    b = np.zeros((block.threads // 32, (4 if single else 8) * len(registers), 8), np.float32)
    for r, name in enumerate(registers):
        bits = block.get(name, np.uint32).reshape(-1, 32)
        if single:
            b[:, _COLUMN + 4 * r, _ROW] = _widened(bits, kind)
            continue
        for half in (0, 1):
            b[:, 2 * _COLUMN + half + 8 * r, _ROW] = _widened((bits >> 16 * half).astype(np.uint16), kind)
    return b


@opcode("mma")
def _mma(parts: list[str], args: list[str], line: str) -> Run:
    (d, a, b, c), kind = map(list_of, args), parts[7]
    if not parts[3].startswith("m16n8k") or kind not in ("bf16", "f16", "tf32"):
        raise NotImplementedError(f"the emulator has no such product: {line}")

    def run(block: Block, mask: Mask) -> None:
        assert mask is None, f"a product in divergent code: {line}"
        sums = np.zeros((block.threads // 32, 16, 8))
        for r, name in enumerate(c):
            sums[:, _ROW + 8 * (r >> 1), 2 * _COLUMN + (r & 1)] = block.get(name, np.float32).reshape(-1, 32)
        left, right = _left(block, a, kind), _right(block, b, kind)
        result = (left.astype(np.float64) @ right.astype(np.float64) + sums).astype(np.float32)
        for r, name in enumerate(d):
            block.put(name, result[:, _ROW + 8 * (r >> 1), 2 * _COLUMN + (r & 1)].reshape(-1), None)

    return run


def _described(
    block: Block, descriptor: int, rows: int, depth: int, kind: str, transposed: int, line: str
) -> np.ndarray:
    """The factor [rows, depth] in shared memory, by the descriptor of its layout."""
    size = 4 if kind == "tf32" else 2
    start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = descriptor >> 62 & 3
    width = {0: 16, 1: 128, 2: 64, 3: 32}[swizzle]
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    if transposed:
        across = width // size
        at = (r // across) * lead + (k // 8) * stride + (k % 8) * width + (r % across) * size
    elif swizzle:
        at = (r // 8) * stride + (r % 8) * width + k * size
    else:
        across = 16 // size
        at = (r // 8) * stride + (k // across) * lead + (r % 8) * 16 + (k % across) * size
    at = at + start
    if swizzle:
        at = at ^ (((at >> 7) & {1: 7, 2: 3, 3: 1}[swizzle]) << 4)
    places = at.reshape(-1)
    bits = block.shared.load(places, size, np.full(len(places), SEVERAL), line).view(UNSIGNED[size])
    bits = bits.reshape(rows, depth)
    return _widened(bits, kind)


def _group_products(parts: list[str], args: list[str], line: str) -> Callable[[Block], Callable[[], np.ndarray]]:
    """Function of a block: the factors' product [groups, 64, N]; the left one in registers is read at once."""
    sizes = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4])
    n, depth, kind = int(sizes.group(1)), int(sizes.group(2)), parts[6]
    in_registers = args[1].startswith("{")
    flags = [int(flag) for flag in args[6:]]
    left_transposed, right_transposed = (0, *flags[:1]) if in_registers and flags else flags[:2] or (0, 0)

    def begin(block: Block) -> Callable[[], np.ndarray]:
        firsts = np.arange(0, block.threads, 128)
        right = [int(d) for d in block.get(args[2], np.uint64)[firsts]]
        if in_registers:
            held = _left(block, list_of(args[1]), kind).reshape(-1, 64, depth)
            left = lambda group: held[group]
        else:
            descriptors = [int(d) for d in block.get(args[1], np.uint64)[firsts]]
            left = lambda group: _described(block, descriptors[group], 64, depth, kind, left_transposed, line)

        def product() -> np.ndarray:
            factors = (
                (left(g), _described(block, d, n, depth, kind, right_transposed, line)) for g, d in enumerate(right)
            )
            return np.stack([a.astype(np.float64) @ b.T.astype(np.float64) for a, b in factors])

        return product

    return begin


def _wait(most: int) -> Run:
    def run(block: Block, mask: Mask) -> None:
        while len(block.product_groups) > most:
            for again, before, line in block.product_groups.popleft():
                if not np.array_equal(again(), before, equal_nan=True):
                    block.hazards.append(f"shared memory changed under {line[:80]}")

    return run


def _commit(block: Block, mask: Mask) -> None:
    block.product_groups.append(block.products)
    block.products = []


@opcode("wgmma")
def _wgmma(parts: list[str], args: list[str], line: str) -> Run:
    if parts[1] in ("fence", "commit_group"):
        return _commit if parts[1] == "commit_group" else lambda block, mask: None
    if parts[1] == "wait_group":
        return _wait(int(args[0], 0))
    registers, begin = list_of(args[0]), _group_products(parts, args, line)

    def run(block: Block, mask: Mask) -> None:
        assert mask is None, f"a product in divergent code: {line}"
        product = begin(block)
        result = product()
        block.products.append((product, result, line))
        rows, adds = result.reshape(block.threads // 32, 16, -1), block.get(args[3], np.bool_)
        for number, name in enumerate(registers):
            j, r = divmod(number, 4)
            value = rows[:, _ROW + 8 * (r >> 1), 8 * j + 2 * _COLUMN + (r & 1)].reshape(-1)
            value = np.where(adds, value + block.get(name, np.float32), value) if adds.any() else value
            block.put(name, value.astype(np.float32), None)

    return run
