"""The approximate schedules as programs on the simulated memory, in the manner of `simulate.schedules`."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .memory import TwoLevelMemory
from .rows import Tile, begin_rows, finish_rows, length, online_softmax, spans


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
    _store_boxes(memory, blocks)
    for number, rows in enumerate(rows_of):
        memory.load("q", "Q", rows)
        begin_rows(memory, rows, d_v)
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
            online_softmax(memory, "s", "v")
            memory.free("s", "k", "v")
        memory.free("q")
        memory.result("dropped")[rows] = memory["dropped"]
        memory.free("dropped")
        finish_rows(memory, "O", "L", rows)


def _store_boxes(memory: TwoLevelMemory, blocks: list[slice]) -> None:
    """The smallest and the largest value of each coordinate of a block's keys."""
    for index, keys in enumerate(blocks):
        memory.load("k", "K", keys)
        memory["bound"] = np.stack([memory["k"].min(axis=0), memory["k"].max(axis=0)])
        memory.store("bound", "box", index)
        memory.free("k", "bound")
