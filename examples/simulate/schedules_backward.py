"""The backward schedules as programs on the simulated memory, in the manner of `simulate.schedules`.

Given Q, K, V, O, dO and the log-sum-exp L (or, materialised, P), slow memory gets dQ, dK, dV. scale 1/sqrt(d).
"""

from __future__ import annotations

import math

import numpy as np

from .memory import TwoLevelMemory
from .rows import Tile, length, spans

Sizes = tuple[int, int, int, int]


def run_backward(name: str, arrays: dict[str, np.ndarray], *, capacity: int, tile: Tile) -> TwoLevelMemory:
    """Runs a backward schedule. arrays: Q, K, V, O, dO, L, P. Returns the memory with counts and dQ, dK, dV."""
    memory = TwoLevelMemory(capacity, **arrays)
    for grad in ("Q", "K", "V"):
        memory.reserve(f"d{grad}", arrays[grad].shape)
    memory.reserve("delta", (len(arrays["Q"]),))
    BACKWARD_PROGRAMS[name](memory, (*arrays["Q"].shape, *arrays["V"].shape), tile)
    return memory


def _delta(memory: TwoLevelMemory, n_q: int, d_v: int) -> None:
    """delta_i = sum_e dO[i,e] O[i,e], element by element."""
    for row in range(n_q):
        memory.full("delta", (1,))
        for e in range(d_v):
            memory.load("o", "O", (row, e))
            memory.load("do", "dO", (row, e))
            memory["delta"] = memory["delta"] + memory["o"] * memory["do"]
            memory.free("o", "do")
        memory.store("delta", "delta", slice(row, row + 1))
        memory.free("delta")


def _load_all(memory: TwoLevelMemory, index: slice, **blocks: str) -> None:
    for block, array in blocks.items():
        memory.load(block, array, index)


def _tile_weights(memory: TwoLevelMemory, d: int) -> None:
    """Makes p = exp(S - L)."""
    memory["p"] = np.exp(memory["q"] @ memory["k"].T / math.sqrt(d) - memory["L"][:, None])


def _tile_gradients(memory: TwoLevelMemory, d: int) -> None:
    """Makes p and ds = P o (dP - delta), scale included in ds."""
    _tile_weights(memory, d)
    memory["ds"] = memory["p"] * (memory["do"] @ memory["v"].T - memory["delta"][:, None]) / math.sqrt(d)


def _queries_at_rest(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """dQ with a query block at rest."""
    n_q, d, n_k, _ = sizes
    for rows in spans(n_q, tile["B_o"]):
        _load_all(memory, rows, q="Q", do="dO", L="L", delta="delta")
        memory.full("dq", (length(rows), d))
        for keys in spans(n_k, tile["B_p"]):
            _load_all(memory, keys, k="K", v="V")
            _tile_gradients(memory, d)
            memory["dq"] = memory["dq"] + memory["ds"] @ memory["k"]
            memory.free("k", "v", "p", "ds")
        memory.store("dq", "dQ", rows)
        memory.free("q", "do", "L", "delta", "dq")


def backward_split(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """Three kernels: delta; dK and dV with a key block at rest; dQ with a query block at rest."""
    n_q, d, n_k, d_v = sizes
    _delta(memory, n_q, d_v)
    for keys in spans(n_k, tile["B_c"]):
        _load_all(memory, keys, k="K", v="V")
        memory.full("dk", (length(keys), d))
        memory.full("dv", (length(keys), d_v))
        for rows in spans(n_q, tile["B_r"]):
            _load_all(memory, rows, q="Q", do="dO", L="L", delta="delta")
            _tile_gradients(memory, d)
            memory["dv"] = memory["dv"] + memory["p"].T @ memory["do"]
            memory["dk"] = memory["dk"] + memory["ds"].T @ memory["q"]
            memory.free("q", "do", "L", "delta", "p", "ds")
        memory.store("dk", "dK", keys)
        memory.store("dv", "dV", keys)
        memory.free("k", "v", "dk", "dv")
    _queries_at_rest(memory, sizes, tile)


def backward_apart(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """Four kernels: delta; dK and then dV with a key block at rest; dQ with a query block at rest."""
    n_q, d, n_k, d_v = sizes
    _delta(memory, n_q, d_v)
    for keys in spans(n_k, tile["B_c"]):
        _load_all(memory, keys, k="K", v="V")
        memory.full("dk", (length(keys), d))
        for rows in spans(n_q, tile["B_r"]):
            _load_all(memory, rows, q="Q", do="dO", L="L", delta="delta")
            _tile_gradients(memory, d)
            memory["dk"] = memory["dk"] + memory["ds"].T @ memory["q"]
            memory.free("q", "do", "L", "delta", "p", "ds")
        memory.store("dk", "dK", keys)
        memory.free("k", "v", "dk")
    for keys in spans(n_k, tile["B_c"]):
        memory.load("k", "K", keys)
        memory.full("dv", (length(keys), d_v))
        for rows in spans(n_q, tile["B_r"]):
            _load_all(memory, rows, q="Q", do="dO", L="L")
            _tile_weights(memory, d)
            memory["dv"] = memory["dv"] + memory["p"].T @ memory["do"]
            memory.free("q", "do", "L", "p")
        memory.store("dv", "dV", keys)
        memory.free("k", "dv")
    _queries_at_rest(memory, sizes, tile)


def backward_fused(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """FlashAttention's backward: a key block at rest, dQ read, added to and written for every tile."""
    n_q, d, n_k, d_v = sizes
    _delta(memory, n_q, d_v)
    for rows in spans(n_q, tile["B_r"]):
        memory.full("dq", (length(rows), d))
        memory.store("dq", "dQ", rows)
        memory.free("dq")
    for keys in spans(n_k, tile["B_c"]):
        _load_all(memory, keys, k="K", v="V")
        memory.full("dk", (length(keys), d))
        memory.full("dv", (length(keys), d_v))
        for rows in spans(n_q, tile["B_r"]):
            _load_all(memory, rows, q="Q", do="dO", L="L", delta="delta", dq="dQ")
            _tile_gradients(memory, d)
            memory["dv"] = memory["dv"] + memory["p"].T @ memory["do"]
            memory["dk"] = memory["dk"] + memory["ds"].T @ memory["q"]
            memory["dq"] = memory["dq"] + memory["ds"] @ memory["k"]
            memory.store("dq", "dQ", rows)
            memory.free("q", "do", "L", "delta", "dq", "p", "ds")
        memory.store("dk", "dK", keys)
        memory.store("dv", "dV", keys)
        memory.free("k", "v", "dk", "dv")


def _product_of_rows(memory: TwoLevelMemory, sizes: Sizes, tile: Tile, matrix: str, right: str, target: str) -> None:
    """target = matrix @ right with a block of target's rows at rest. matrix: [N_q, N_k]."""
    n_q, _, n_k, _ = sizes
    columns = memory.result(right).shape[1]
    for rows in spans(n_q, tile["B_r"]):
        memory.full("out", (length(rows), columns))
        for keys in spans(n_k, tile["B_c"]):
            memory.load("a", matrix, (rows, keys))
            memory.load("b", right, keys)
            memory["out"] = memory["out"] + memory["a"] @ memory["b"]
            memory.free("a", "b")
        memory.store("out", target, rows)
        memory.free("out")


def _product_of_columns(memory: TwoLevelMemory, sizes: Sizes, tile: Tile, matrix: str, right: str, target: str) -> None:
    """target = matrix^T @ right with a block of target's rows (the matrix's columns) at rest."""
    n_q, _, n_k, _ = sizes
    columns = memory.result(right).shape[1]
    for keys in spans(n_k, tile["B_c"]):
        memory.full("out", (length(keys), columns))
        for rows in spans(n_q, tile["B_r"]):
            memory.load("a", matrix, (rows, keys))
            memory.load("b", right, rows)
            memory["out"] = memory["out"] + memory["a"].T @ memory["b"]
            memory.free("a", "b")
        memory.store("out", target, keys)
        memory.free("out")


def backward_materialized(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """FlashAttention paper, Alg. 3: dV, dP, dS, dQ, dK as kernels over stored matrices."""
    n_q, d, n_k, _ = sizes
    memory.reserve("dP", (n_q, n_k))
    memory.reserve("dS", (n_q, n_k))
    _product_of_columns(memory, sizes, tile, "P", "dO", "dV")
    for rows in spans(n_q, tile["B_r"]):
        memory.load("do", "dO", rows)
        for keys in spans(n_k, tile["B_c"]):
            memory.load("v", "V", keys)
            memory["dp"] = memory["do"] @ memory["v"].T
            memory.store("dp", "dP", (rows, keys))
            memory.free("v", "dp")
        memory.free("do")
    whole = 2 * n_k + 1 <= memory.capacity
    for row in range(n_q):
        _softmax_gradient_row(memory, row, list(spans(n_k, n_k if whole else tile["B_c"])), d)
    _product_of_rows(memory, sizes, tile, "dS", "K", "dQ")
    _product_of_columns(memory, sizes, tile, "dS", "Q", "dK")


def _softmax_gradient_row(memory: TwoLevelMemory, row: int, chunks: list[slice], d: int) -> None:
    """dS = P o (dP - sum(P o dP)) for one row; a row in several chunks is read twice."""
    memory.full("sum", (1,))
    for keys in chunks:
        memory.load("p", "P", (row, keys))
        memory.load("dp", "dP", (row, keys))
        memory["sum"] = memory["sum"] + (memory["p"] * memory["dp"]).sum()
        if len(chunks) > 1:
            memory.free("p", "dp")
    for keys in chunks:
        if len(chunks) > 1:
            memory.load("p", "P", (row, keys))
            memory.load("dp", "dP", (row, keys))
        memory["dp"] = memory["p"] * (memory["dp"] - memory["sum"]) / math.sqrt(d)
        memory.store("dp", "dS", (row, keys))
        memory.free("p", "dp")
    memory.free("sum")


def backward_small_cache(memory: TwoLevelMemory, sizes: Sizes, tile: Tile) -> None:
    """P and dS tile by tile over pieces of the head dimensions, spilled; then three blocked products."""
    n_q, d, n_k, d_v = sizes
    memory.reserve("P", (n_q, n_k))
    memory.reserve("dS", (n_q, n_k))
    _delta(memory, n_q, d_v)
    for rows in spans(n_q, tile["B_r"]):
        _load_all(memory, rows, L="L", delta="delta")
        for keys in spans(n_k, tile["B_c"]):
            _blocked_product(memory, "p", "Q", "K", rows, keys, tile["B_d"])
            _blocked_product(memory, "ds", "dO", "V", rows, keys, tile["B_d"])
            memory["p"] = np.exp(memory["p"] / math.sqrt(d) - memory["L"][:, None])
            memory["ds"] = memory["p"] * (memory["ds"] - memory["delta"][:, None]) / math.sqrt(d)
            memory.store("p", "P", (rows, keys))
            memory.store("ds", "dS", (rows, keys))
            memory.free("p", "ds")
        memory.free("L", "delta")
    for matrix, right, target, transposed in (
        ("P", "dO", "dV", True),
        ("dS", "Q", "dK", True),
        ("dS", "K", "dQ", False),
    ):
        _tiled_product(memory, tile, matrix, right, target, transposed)


def _blocked_product(
    memory: TwoLevelMemory, name: str, left: str, right: str, rows: slice, keys: slice, step: int
) -> None:
    """Block `name` = left[rows] @ right[keys]^T, `step` of the summed dimension at a time."""
    memory.full(name, (length(rows), length(keys)))
    for depth in spans(memory.result(left).shape[1], step):
        memory.load("a", left, (rows, depth))
        memory.load("b", right, (keys, depth))
        memory[name] = memory[name] + memory["a"] @ memory["b"].T
        memory.free("a", "b")


def _tiled_product(memory: TwoLevelMemory, tile: Tile, matrix: str, right: str, target: str, transposed: bool) -> None:
    """target = matrix (or its transpose) @ right with B_o x B_e tiles of target, B_p of the summed dimension at a
    time.
    """
    summed, columns = memory.result(right).shape
    for rows in spans(len(memory.result(target)), tile["B_o"]):
        for part in spans(columns, tile["B_e"]):
            memory.full("out", (length(rows), length(part)))
            for depth in spans(summed, tile["B_p"]):
                memory.load("a", matrix, (depth, rows) if transposed else (rows, depth))
                memory.load("b", right, (depth, part))
                memory["out"] = memory["out"] + (memory["a"].T if transposed else memory["a"]) @ memory["b"]
                memory.free("a", "b")
            memory.store("out", target, (rows, part))
            memory.free("out")


BACKWARD_PROGRAMS = {
    "backward_split": backward_split,
    "backward_apart": backward_apart,
    "backward_fused": backward_fused,
    "backward_materialized": backward_materialized,
    "backward_small_cache": backward_small_cache,
}
