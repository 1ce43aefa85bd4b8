"""The forward schedules as programs on the simulated memory, one function each.

They compute attention with numpy and move every block explicitly, so that one run checks both the result and the count.
q: [N_q, d], k: [N_k, d], v: [N_k, d_v]; scale 1/sqrt(d). Slow memory gets O [N_q, d_v] and, where the schedule keeps
it, the log-sum-exp L [N_q].
"""

from __future__ import annotations

import math

import numpy as np

from .approximate import polynomial
from .memory import TwoLevelMemory
from .rows import Tile, begin_rows, finish_rows, length, online_softmax, spans, stream


def run(
    name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, capacity: int, tile: Tile, **options: object
) -> TwoLevelMemory:
    """Runs a forward schedule on a fast memory of `capacity` elements; the memory has the counts and results."""
    memory = TwoLevelMemory(capacity, Q=q, K=k, V=v)
    memory.reserve("O", (len(q), v.shape[1]))
    memory.reserve("L", (len(q),))
    PROGRAMS[name](memory, (*q.shape, *v.shape), tile, **options)  # type: ignore[operator]
    return memory


def flash(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile, live: np.ndarray | None = None) -> None:
    """Query-stationary. `live` [row blocks, key blocks] leaves out tiles, which makes it the block-sparse schedule."""
    n_q, d, n_k, d_v = sizes
    for i, rows in enumerate(spans(n_q, tile["B_r"])):
        memory.load("q", "Q", rows)
        begin_rows(memory, rows, d_v)
        keys = [keys for j, keys in enumerate(spans(n_k, tile["B_c"])) if live is None or live[i, j]]
        for k, v in stream(memory, keys, tile["stages"]):
            memory["s"] = memory["q"] @ memory[k].T / math.sqrt(d)
            online_softmax(memory, "s", v)
            memory.free("s")
        memory.free("q")
        finish_rows(memory, "O", "L", rows)


def whole_rows(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """All scores of a block of rows before their weights, and these before the product with V."""
    n_q, d, n_k, d_v = sizes
    for rows in spans(n_q, tile["B_r"]):
        blocks = {f"s{n}": keys for n, keys in enumerate(spans(n_k, tile["B_c"]))}
        memory.load("q", "Q", rows)
        for s, keys in blocks.items():
            memory.load("k", "K", keys)
            memory[s] = memory["q"] @ memory["k"].T / math.sqrt(d)
            memory.free("k")
        memory.free("q")
        begin_rows(memory, rows, d_v)
        memory["m"] = np.max([memory[s].max(axis=1) for s in blocks], axis=0)
        for s, keys in blocks.items():
            memory.load("v", "V", keys)
            memory[s] = np.exp(memory[s] - memory["m"][:, None])
            memory["l"] = memory["l"] + memory[s].sum(axis=1)
            memory["o"] = memory["o"] + memory[s] @ memory["v"]
            memory.free("v")
        memory.free(*blocks)
        finish_rows(memory, "O", "L", rows)


def key_stationary(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """FlashAttention-1, Alg. 1: the output in slow memory is normalised at every step."""
    n_q, d, n_k, d_v = sizes
    memory.reserve("m", (n_q,))
    memory.reserve("l", (n_q,))
    state = {"o": "O", "m": "m", "l": "l"}
    for rows in spans(n_q, tile["B_r"]):
        begin_rows(memory, rows, d_v)
        for block, array in state.items():
            memory.store(block, array, rows)
        memory.free(*state)
    for keys in spans(n_k, tile["B_c"]):
        memory.load("k", "K", keys)
        memory.load("v", "V", keys)
        for rows in spans(n_q, tile["B_r"]):
            memory.load("q", "Q", rows)
            for block, array in state.items():
                memory.load(block, array, rows)
            memory["o"] = memory["o"] * memory["l"][:, None]
            memory["s"] = memory["q"] @ memory["k"].T / math.sqrt(d)
            online_softmax(memory, "s", "v")
            memory["o"] = memory["o"] / memory["l"][:, None]
            for block, array in state.items():
                memory.store(block, array, rows)
            memory.free("q", "s", *state)
        memory.free("k", "v")


def rabe_staats(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """A partial output per chunk of keys, stored; merged once the query chunk has met all keys."""
    n_q, d, n_k, d_v = sizes
    chunks = list(spans(n_k, tile["B_c"]))
    for name, shape in (
        ("part_o", (len(chunks), n_q, d_v)),
        ("part_m", (len(chunks), n_q)),
        ("part_l", (len(chunks), n_q)),
    ):
        memory.reserve(name, shape)
    state = ("o", "m", "l")
    for rows in spans(n_q, tile["B_r"]):
        memory.load("q", "Q", rows)
        for j, keys in enumerate(chunks):
            memory.load("k", "K", keys)
            memory.load("v", "V", keys)
            memory["s"] = memory["q"] @ memory["k"].T / math.sqrt(d)
            begin_rows(memory, rows, d_v)
            online_softmax(memory, "s", "v")
            for block in state:
                memory.store(block, f"part_{block}", (j, rows))
            memory.free("k", "v", "s", *state)
        memory.free("q")
        begin_rows(memory, rows, d_v)
        for j in range(len(chunks)):
            for block in state:
                memory.load(f"p{block}", f"part_{block}", (j, rows))
            maximum = np.maximum(memory["m"], memory["pm"])
            old, new = np.exp(memory["m"] - maximum), np.exp(memory["pm"] - maximum)
            memory["m"] = maximum
            memory["l"] = old * memory["l"] + new * memory["pl"]
            memory["o"] = old[:, None] * memory["o"] + new[:, None] * memory["po"]
            memory.free("po", "pm", "pl")
        finish_rows(memory, "O", "L", rows)


def split_k(
    memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile, live: np.ndarray | None = None
) -> None:
    """Each split of the keys is a query-stationary problem with its own log-sum-exp; then the splits are merged. `live`
    [row blocks, n_k]: the keys of which tiles that hold none are left out."""
    n_q, d, n_k, d_v = sizes
    splits = list(spans(n_k, tile["B_s"]))
    memory.reserve("part_o", (len(splits), n_q, d_v))
    memory.reserve("part_L", (len(splits), n_q))
    for j, split in enumerate(splits):
        for i, rows in enumerate(spans(n_q, tile["B_r"])):
            memory.load("q", "Q", rows)
            begin_rows(memory, rows, d_v)
            tiles = spans(split.stop, tile["B_c"], split.start)
            visited = [keys for keys in tiles if live is None or live[i, keys].any()]
            for k, v in stream(memory, visited, tile["stages"]):
                memory["s"] = memory["q"] @ memory[k].T / math.sqrt(d)
                online_softmax(memory, "s", v)
                memory.free("s")
            memory.free("q")
            if visited:
                memory["o"] = memory["o"] / memory["l"][:, None]
                memory["m"] = memory["m"] + np.log(memory["l"])
            memory.store("o", "part_o", (j, rows))
            memory.store("m", "part_L", (j, rows))
            memory.free("o", "m", "l")
    for rows in spans(n_q, tile["B_r"]):
        _merge_splits(memory, rows, len(splits), d_v)


def _merge_splits(memory: TwoLevelMemory, rows: slice, splits: int, d_v: int) -> None:
    memory.full("o", (length(rows), d_v))
    memory.full("L", (length(rows),), -np.inf)
    for j in range(splits):
        memory.load("po", "part_o", (j, rows))
        memory.load("pL", "part_L", (j, rows))
        total = np.logaddexp(memory["L"], memory["pL"])
        base = np.where(np.isneginf(total), 0, total)
        old, new = np.exp(memory["L"] - base), np.exp(memory["pL"] - base)
        memory["o"] = old[:, None] * memory["o"] + new[:, None] * memory["po"]
        memory["L"] = total
        memory.free("po", "pL")
    memory.store("o", "O", rows)
    memory.store("L", "L", rows)
    memory.free("o", "L")


def small_cache(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """Scores by a blocked product over pieces of the head dimension, spilled; then exp(S - L) V the same way."""
    n_q, d, n_k, d_v = sizes
    memory.reserve("S", (n_q, n_k))
    for rows in spans(n_q, tile["B_r"]):
        memory.full("L", (length(rows),), -np.inf)
        for keys in spans(n_k, tile["B_c"]):
            memory.full("s", (length(rows), length(keys)))
            for depth in spans(d, tile["B_d"]):
                memory.load("q", "Q", (rows, depth))
                memory.load("k", "K", (keys, depth))
                memory["s"] = memory["s"] + memory["q"] @ memory["k"].T / math.sqrt(d)
                memory.free("q", "k")
            memory["L"] = np.logaddexp(memory["L"], np.logaddexp.reduce(memory["s"], axis=1))
            memory.store("s", "S", (rows, keys))
            memory.free("s")
        memory.store("L", "L", rows)
        memory.free("L")
    exponentiate_and_multiply(memory, sizes, tile)


def exponentiate_and_multiply(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """O = exp(S - L) V from the spilled scores, with B_o x B_e tiles of O at rest and B_p keys at a time."""
    n_q, _, n_k, d_v = sizes
    for rows in spans(n_q, tile["B_o"]):
        memory.load("L", "L", rows)
        for columns in spans(d_v, tile["B_e"]):
            memory.full("o", (length(rows), length(columns)))
            for keys in spans(n_k, tile["B_p"]):
                memory.load("p", "S", (rows, keys))
                memory.load("v", "V", (keys, columns))
                memory["p"] = np.exp(memory["p"] - memory["L"][:, None])
                memory["o"] = memory["o"] + memory["p"] @ memory["v"]
                memory.free("p", "v")
            memory.store("o", "O", (rows, columns))
            memory.free("o")
        memory.free("L")


def materialized(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """Three kernels: S = Q K^T, P = softmax(S) row by row, O = P V."""
    n_q, d, n_k, d_v = sizes
    memory.reserve("S", (n_q, n_k))
    memory.reserve("P", (n_q, n_k))
    for rows in spans(n_q, tile["B_r"]):
        memory.load("q", "Q", rows)
        for keys in spans(n_k, tile["B_c"]):
            memory.load("k", "K", keys)
            memory["s"] = memory["q"] @ memory["k"].T / math.sqrt(d)
            memory.store("s", "S", (rows, keys))
            memory.free("k", "s")
        memory.free("q")
    whole = n_k + 2 <= memory.capacity
    for row in range(n_q):
        _softmax_row(memory, row, list(spans(n_k, n_k if whole else tile["B_c"])))
    for rows in spans(n_q, tile["B_r"]):
        memory.full("o", (length(rows), d_v))
        for keys in spans(n_k, tile["B_c"]):
            memory.load("p", "P", (rows, keys))
            memory.load("v", "V", keys)
            memory["o"] = memory["o"] + memory["p"] @ memory["v"]
            memory.free("p", "v")
        memory.store("o", "O", rows)
        memory.free("o")


def _softmax_row(memory: TwoLevelMemory, row: int, chunks: list[slice]) -> None:
    """One row of S to P. A row in one chunk is read once, a longer one once for its statistics and once more."""
    memory.full("m", (1,), -np.inf)
    memory.full("l", (1,))
    for keys in chunks:
        memory.load("s", "S", (row, keys))
        maximum = np.maximum(memory["m"], memory["s"].max())
        memory["l"] = memory["l"] * np.exp(memory["m"] - maximum) + np.exp(memory["s"] - maximum).sum()
        memory["m"] = maximum
        if len(chunks) > 1:
            memory.free("s")
    for keys in chunks:
        if len(chunks) > 1:
            memory.load("s", "S", (row, keys))
        memory["s"] = np.exp(memory["s"] - memory["m"]) / memory["l"]
        memory.store("s", "P", (row, keys))
        memory.free("s")
    memory.free("m", "l")


PROGRAMS = {
    "flash": flash,
    "block_sparse": flash,
    "whole_rows": whole_rows,
    "key_stationary": key_stationary,
    "rabe_staats": rabe_staats,
    "split_k": split_k,
    "small_cache": small_cache,
    "materialized": materialized,
    "polynomial": polynomial,
}
