"""The forward schedules as programs on the simulated memory, one function each.

They compute attention with numpy and move every block explicitly, so that one run checks both the result and the count.
q: [N_q, d], k: [N_k, d], v: [N_k, d_v]; scale 1/sqrt(d). Slow memory gets O [N_q, d_v] and, where the schedule keeps
it, the log-sum-exp L [N_q].
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from fusion.planning.simulate.memory import TwoLevelMemory

Tile = Mapping[str, int]


def spans(size: int, block: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of at most `block` that cover `start..size`."""
    for begin in range(start, size, block):
        yield slice(begin, min(begin + block, size))


def length(span: slice) -> int:
    """How many elements a slice of `spans` covers."""
    return span.stop - span.start


def run(
    name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, capacity: int, tile: Tile, **options: object
) -> TwoLevelMemory:
    """Runs a forward schedule on a fast memory of `capacity` elements; the memory has the counts and results."""
    memory = TwoLevelMemory(capacity, Q=q, K=k, V=v)
    memory.reserve("O", (len(q), v.shape[1]))
    memory.reserve("L", (len(q),))
    PROGRAMS[name](memory, (*q.shape, *v.shape), tile, **options)  # type: ignore[operator]
    return memory


def _begin_rows(memory: TwoLevelMemory, rows: slice, d_v: int) -> None:
    memory.full("o", (length(rows), d_v))
    memory.full("m", (length(rows),), -np.inf)
    memory.full("l", (length(rows),))


def _stream(memory: TwoLevelMemory, spans_of_keys: Iterable[slice], stages: int) -> Iterator[tuple[str, str]]:
    """Names of the loaded K and V blocks, one pair after the other, with up to `stages` pairs in fast memory."""
    pending, waiting = deque[int](), enumerate(spans_of_keys)
    while True:
        for index, keys in itertools.islice(waiting, stages - len(pending)):
            memory.load(f"k{index}", "K", keys)
            memory.load(f"v{index}", "V", keys)
            pending.append(index)
        if not pending:
            return
        index = pending.popleft()
        yield f"k{index}", f"v{index}"
        memory.free(f"k{index}", f"v{index}")


def _online_softmax(memory: TwoLevelMemory, scores: str, values: str) -> None:
    """Takes a tile of scores and its values into the running output, maximum and denominator (2205.14135, Sec. 3.1)."""
    maximum = np.maximum(memory["m"], memory[scores].max(axis=1))
    old = np.exp(memory["m"] - maximum)
    memory["m"] = maximum
    memory[scores] = np.exp(memory[scores] - maximum[:, None])
    memory["l"] = old * memory["l"] + memory[scores].sum(axis=1)
    memory["o"] = old[:, None] * memory["o"] + memory[scores] @ memory[values]


def _finish_rows(memory: TwoLevelMemory, output: str, statistic: str, index: object) -> None:
    memory["o"] = memory["o"] / memory["l"][:, None]
    memory["m"] = memory["m"] + np.log(memory["l"])
    memory.store("o", output, index)
    memory.store("m", statistic, index)
    memory.free("o", "m", "l")


def flash(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile, live: np.ndarray | None = None) -> None:
    """Query-stationary. `live` [row blocks, key blocks] leaves out tiles, which makes it the block-sparse schedule."""
    n_q, d, n_k, d_v = sizes
    for i, rows in enumerate(spans(n_q, tile["B_r"])):
        memory.load("q", "Q", rows)
        _begin_rows(memory, rows, d_v)
        keys = [keys for j, keys in enumerate(spans(n_k, tile["B_c"])) if live is None or live[i, j]]
        for k, v in _stream(memory, keys, tile["stages"]):
            memory["s"] = memory["q"] @ memory[k].T / math.sqrt(d)
            _online_softmax(memory, "s", v)
            memory.free("s")
        memory.free("q")
        _finish_rows(memory, "O", "L", rows)


def key_stationary(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> None:
    """FlashAttention-1, Alg. 1: the output in slow memory is normalised at every step."""
    n_q, d, n_k, d_v = sizes
    memory.reserve("m", (n_q,))
    memory.reserve("l", (n_q,))
    state = {"o": "O", "m": "m", "l": "l"}
    for rows in spans(n_q, tile["B_r"]):
        _begin_rows(memory, rows, d_v)
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
            _online_softmax(memory, "s", "v")
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
            _begin_rows(memory, rows, d_v)
            _online_softmax(memory, "s", "v")
            for block in state:
                memory.store(block, f"part_{block}", (j, rows))
            memory.free("k", "v", "s", *state)
        memory.free("q")
        _begin_rows(memory, rows, d_v)
        for j in range(len(chunks)):
            for block in state:
                memory.load(f"p{block}", f"part_{block}", (j, rows))
            maximum = np.maximum(memory["m"], memory["pm"])
            old, new = np.exp(memory["m"] - maximum), np.exp(memory["pm"] - maximum)
            memory["m"] = maximum
            memory["l"] = old * memory["l"] + new * memory["pl"]
            memory["o"] = old[:, None] * memory["o"] + new[:, None] * memory["po"]
            memory.free("po", "pm", "pl")
        _finish_rows(memory, "O", "L", rows)


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
            _begin_rows(memory, rows, d_v)
            tiles = spans(split.stop, tile["B_c"], split.start)
            visited = [keys for keys in tiles if live is None or live[i, keys].any()]
            for k, v in _stream(memory, visited, tile["stages"]):
                memory["s"] = memory["q"] @ memory[k].T / math.sqrt(d)
                _online_softmax(memory, "s", v)
                memory.free("s")
            memory.free("q")
            if visited:
                memory["o"] = memory["o"] / memory["l"][:, None]
                memory["m"] = memory["m"] + np.log(memory["l"])
            memory.store("o", "part_o", (j, rows))
            memory.store("m", "part_L", (j, rows))
            memory.free("o", "m", "l")
    for rows in spans(n_q, tile["B_r"]):
        memory.full("o", (length(rows), d_v))
        memory.full("L", (length(rows),), -np.inf)
        for j in range(len(splits)):
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


def exponents(d: int, degree: int) -> np.ndarray:
    """Exponents of the monomials in d variables up to that degree: [r, d] with r = binomial(d + degree, degree)."""
    rows = []
    for total in range(degree + 1):
        for variables in itertools.combinations_with_replacement(range(d), total):
            rows.append(np.bincount(variables, minlength=d) if variables else np.zeros(d, dtype=int))
    return np.array(rows)


def _features(x: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """x: [n, d] to [n, len(powers)]: x^a / sqrt(a!), whose inner products are the truncated exponential series."""
    weight = np.sqrt([math.prod(math.factorial(power) for power in row) for row in powers.tolist()])
    return np.prod(x[:, None, :] ** powers[None], axis=2) / weight


def polynomial(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile, degree: int = 2) -> None:
    """Approximate: exp(q.k) by its Taylor polynomial, features made in fast memory B_f at a time."""
    n_q, d, n_k, d_v = sizes
    powers = exponents(d, degree)
    memory.reserve("acc", (n_q, d_v + 1))
    blocks = list(spans(len(powers), tile["B_f"]))
    root = d**0.25  # so that the inner product of the features is that of the scaled score
    for index, block in enumerate(blocks):
        memory.full("state", (length(block), d_v + 1))
        for keys in spans(n_k, tile["B_c"]):
            memory.load("k", "K", keys)
            memory.load("v", "V", keys)
            memory["phi"] = _features(memory["k"] / root, powers[block])
            ones = np.ones((length(keys), 1))
            memory["state"] = memory["state"] + memory["phi"].T @ np.concatenate([memory["v"], ones], axis=1)
            memory.free("k", "v", "phi")
        for rows in spans(n_q, tile["B_r"]):
            memory.load("q", "Q", rows)
            if index:
                memory.load("o", "acc", rows)
            else:
                memory.full("o", (length(rows), d_v + 1))
            memory["phi"] = _features(memory["q"] / root, powers[block])
            memory["o"] = memory["o"] + memory["phi"] @ memory["state"]
            memory.free("q", "phi")
            if index < len(blocks) - 1:
                memory.store("o", "acc", rows)
                memory.free("o")
            else:
                _store_normalised(memory, rows)
        memory.free("state")


def _store_normalised(memory: TwoLevelMemory, rows: slice) -> None:
    """Writes numerator over denominator, d_v elements a row; the denominator column is dropped first."""
    value = memory["o"][:, :-1] / memory["o"][:, -1:]
    memory.free("o")
    memory["o"] = value
    memory.store("o", "O", rows)
    memory.free("o")


def certified_sparse(
    memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile, epsilon: float = 1e-3
) -> None:
    """Query-stationary; a key block is loaded only if its box allows a key of it more than epsilon / N_k of the sum so
    far of some row. Slow memory gets the share left out at most in `dropped` [N_q] and the marks of the tiles in
    `live`, neither counted: they are not part of the result.
    """
    n_q, d, n_k, d_v = sizes
    blocks = list(spans(n_k, tile["B_c"]))
    rows_of = list(spans(n_q, tile["B_r"]))
    memory.reserve("box", (len(blocks), 2, d))
    memory.reserve("dropped", (n_q,))
    memory.reserve("live", (len(rows_of), len(blocks)))
    for index, keys in enumerate(blocks):
        memory.load("k", "K", keys)
        memory["bound"] = np.stack([memory["k"].min(axis=0), memory["k"].max(axis=0)])
        memory.store("bound", "box", index)
        memory.free("k", "bound")
    for number, rows in enumerate(rows_of):
        memory.load("q", "Q", rows)
        _begin_rows(memory, rows, d_v)
        memory.full("dropped", (length(rows),))
        for index, keys in enumerate(blocks):
            memory.load("bound", "box", index)
            low, high = memory["bound"]
            upper = (np.maximum(memory["q"] * low, memory["q"] * high)).sum(axis=1) / math.sqrt(d)
            memory.free("bound")
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                share = np.exp(upper - memory["m"]) / memory["l"]
            live = not (share <= epsilon / n_k).all()
            memory.result("live")[number, index] = live
            if not live:
                memory["dropped"] = memory["dropped"] + share * length(keys)
                continue
            memory.load("k", "K", keys)
            memory.load("v", "V", keys)
            memory["s"] = memory["q"] @ memory["k"].T / math.sqrt(d)
            _online_softmax(memory, "s", "v")
            memory.free("s", "k", "v")
        memory.free("q")
        memory.result("dropped")[rows] = memory["dropped"]
        memory.free("dropped")
        _finish_rows(memory, "O", "L", rows)


PROGRAMS = {
    "certified_sparse": certified_sparse,
    "flash": flash,
    "block_sparse": flash,
    "key_stationary": key_stationary,
    "rabe_staats": rabe_staats,
    "split_k": split_k,
    "small_cache": small_cache,
    "materialized": materialized,
    "polynomial": polynomial,
}
