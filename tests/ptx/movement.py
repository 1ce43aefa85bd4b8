"""Opcodes that move data: loads and stores, atomic additions, asynchronous copies, shuffles, barriers."""

from __future__ import annotations

import re

import numpy as np

from tests.ptx.memory import Fault
from tests.ptx.program import list_of, opcode
from tests.ptx.values import DTYPES


def vector_of(parts):
    vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    return vector, DTYPES[parts[-1]]


def active_threads(block, mask):
    return np.arange(block.threads) if mask is None else np.flatnonzero(mask)


@opcode("ld")
def _ld(parts, args, line):
    if parts[1] == "param":
        dt = DTYPES[parts[-1]]
        name = args[1].strip("[] ")

        def param(block, mask):
            bits = block.parameters[name]
            size = np.dtype(dt).itemsize
            value = np.frombuffer(bits[:size], dt)[0]
            wide = np.int64(value) if args[0].startswith("%rd") and dt is np.int32 else value
            block.put(args[0], np.full(block.threads, wide), mask)

        return param
    vector, dt = vector_of(parts)
    size, names = np.dtype(dt).itemsize, list_of(args[0])

    def run(block, mask):
        at, which = block.address(args[1]), active_threads(block, mask)
        if parts[1] == "global":
            got = block.memory.load(at[which], vector * size, line)
        else:
            got = block.load_shared(at[which], vector * size, line)
        values = np.ascontiguousarray(got).view(dt)
        for k, name in enumerate(names):
            full = np.zeros(block.threads, dt)
            full[which] = values[:, k]
            block.put(name, full, mask)

    return run


@opcode("st")
def _st(parts, args, line):
    vector, dt = vector_of(parts)
    names = list_of(args[1])

    def run(block, mask):
        at, which = block.address(args[0]), active_threads(block, mask)
        values = np.stack([block.get(name, dt)[which] for name in names], 1)
        values = np.ascontiguousarray(values).view(np.uint8).reshape(len(which), -1)
        if parts[1] == "global":
            block.memory.store(at[which], values, line)
        else:
            block.store_shared(at[which], values, line)

    return run


@opcode("atom")
def _atom(parts, args, line):
    assert parts[1] == "global" and "add" in parts and parts[-1] == "f32", line
    names, values = list_of(args[0]), list_of(args[2])

    def run(block, mask):
        at, which = block.address(args[1]), active_threads(block, mask)
        added = np.stack([block.get(v, np.float32)[which] for v in values], 1)
        old = block.memory.add(at[which], added, line)
        for k, name in enumerate(names):
            full = np.zeros(block.threads, np.float32)
            full[which] = old[:, k]
            block.put(name, full, mask)

    return run


@opcode("red")
def _red(parts, args, line):
    values = list_of(args[1])

    def run(block, mask):
        at, which = block.address(args[0]), active_threads(block, mask)
        block.memory.add(at[which], np.stack([block.get(v, np.float32)[which] for v in values], 1), line)

    return run


@opcode("cp")
def _cp(parts, args, line):
    if parts[1] == "async" and "commit_group" in parts:

        def commit(block, mask):
            block.copy_groups.append(block.copies)
            block.copies = []

        return commit
    if "wait_group" in parts or "wait_all" in parts:
        most = int(args[0], 0) if args else 0

        def wait(block, mask):
            while len(block.copy_groups) > most:
                for at, data in block.copy_groups.popleft():
                    block.store_shared(at, data, line)

        return wait
    assert parts[1] == "async" and parts[3] == "shared", line

    def copy(block, mask):
        which, nbytes = active_threads(block, mask), int(args[2], 0)
        to, source = block.address(args[0])[which], block.address(args[1])[which]
        real = block.get(args[3], np.uint32)[which] if len(args) > 3 else np.full(len(which), nbytes, np.uint32)
        data = np.zeros((len(which), nbytes), np.uint8)
        whole = real == nbytes
        if (~whole & (real != 0)).any():
            raise Fault(f"part of a copy: {line}")
        data[whole] = block.memory.load(source[whole], nbytes, line)
        block.copies.append((to, data))
        block.store_shared(to, np.full_like(data, 0xFF), line)  # NaN until it is waited for

    return copy


@opcode("bar")
def _bar(parts, args, line):
    def run(block, mask):
        if mask is not None and parts[1] == "sync" and args[0] == "0" and len(args) == 1:
            raise Fault(f"barrier in divergent code: {line}")

    return run


@opcode("shfl")
def _shfl(parts, args, line):
    how = parts[2]

    def run(block, mask):
        to = args[0].split("|")
        a = block.get(args[1], np.uint32)
        b, c = block.get(args[2], np.uint32).astype(np.int64), block.get(args[3], np.uint32).astype(np.int64)
        lane, segment, clamp = block.lane, (c >> 8) & 31, c & 31
        top, low = (lane & segment) | (clamp & ~segment), lane & segment
        if how == "bfly":
            j = lane ^ b
            ok = j <= top
        elif how == "up":
            j = lane - b
            ok = j >= top
        elif how == "down":
            j = lane + b
            ok = j <= top
        else:
            j = low | (b & ~segment)
            ok = j <= top
        j = np.where(ok, j, lane)
        block.put(to[0], a[(np.arange(block.threads) // 32) * 32 + j], mask)
        if len(to) > 1:
            block.put(to[1], ok, mask)

    return run


@opcode("redux")
def _redux(parts, args, line):
    dt = DTYPES[parts[-1]]

    def run(block, mask):
        a = block.get(args[1], dt).reshape(-1, 32)
        reduce = {
            "add": np.sum,
            "min": np.min,
            "max": np.max,
            "and": np.bitwise_and.reduce,
            "or": np.bitwise_or.reduce,
        }[parts[2]]
        out = np.repeat(np.asarray(reduce(a, axis=1)).astype(dt), 32)
        block.put(args[0], out, mask)

    return run


@opcode("ldmatrix")
def _ldmatrix(parts, args, line):
    names = list_of(args[0])
    trans = "trans" in parts
    assert parts[-1] == "b16"

    def run(block, mask):
        assert mask is None, line
        at = block.address(args[1]).reshape(-1, 32)
        warps = at.shape[0]
        lane = np.arange(32)
        for m, name in enumerate(names):
            rows = at[:, 8 * m : 8 * m + 8]
            data = block.load_shared(rows.reshape(-1), 16, line).view(np.uint16).reshape(warps, 8, 8)
            if trans:
                lo, hi = data[:, 2 * (lane & 3), lane >> 2], data[:, 2 * (lane & 3) + 1, lane >> 2]
            else:
                lo, hi = data[:, lane >> 2, 2 * (lane & 3)], data[:, lane >> 2, 2 * (lane & 3) + 1]
            block.put(name, (lo.astype(np.uint32) | (hi.astype(np.uint32) << 16)).reshape(-1), mask)

    return run


@opcode("stmatrix")
def _stmatrix(parts, args, line):
    names, trans = list_of(args[1]), "trans" in parts

    def run(block, mask):
        assert mask is None, line
        at = block.address(args[0]).reshape(-1, 32)
        warps, lane = at.shape[0], np.arange(32)
        for m, name in enumerate(names):
            a = block.get(name, np.uint32).reshape(warps, 32)
            data = np.zeros((warps, 8, 8), np.uint16)
            for half in (0, 1):
                bits = ((a >> (16 * half)) & 0xFFFF).astype(np.uint16)
                if trans:
                    data[:, 2 * (lane & 3) + half, lane >> 2] = bits
                else:
                    data[:, lane >> 2, 2 * (lane & 3) + half] = bits
            rows = at[:, 8 * m : 8 * m + 8].reshape(-1)
            block.store_shared(rows, data.reshape(-1, 8).view(np.uint8).reshape(-1, 16), line)

    return run


@opcode("fence", "membar", "griddepcontrol")
def _order(parts, args, line):
    return lambda block, mask: None
