"""The approximate schedules as programs on the simulated memory, in the manner of `simulate.schedules`."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .memory import TwoLevelMemory
from .rows import Tile, length, spans


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
