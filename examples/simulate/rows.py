"""What programs on the simulated memory share: blocks, streams of keys, and a row's softmax step by step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from .memory import TwoLevelMemory

Tile = Mapping[str, int]


def spans(size: int, block: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of at most `block` that cover `start..size`."""
    for begin in range(start, size, block):
        yield slice(begin, min(begin + block, size))


def length(span: slice) -> int:
    """How many elements a slice of `spans` covers."""
    return span.stop - span.start


def begin_rows(memory: TwoLevelMemory, rows: slice, d_v: int) -> None:
    memory.full("o", (length(rows), d_v))
    memory.full("m", (length(rows),), -np.inf)
    memory.full("l", (length(rows),))


def stream(memory: TwoLevelMemory, spans_of_keys: Iterable[slice], stages: int) -> Iterator[tuple[str, str]]:
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


def online_softmax(memory: TwoLevelMemory, scores: str, values: str) -> None:
    """Takes a tile of scores and its values into the running output, maximum and denominator (2205.14135, Sec. 3.1)."""
    maximum = np.maximum(memory["m"], memory[scores].max(axis=1))
    old = np.exp(memory["m"] - maximum)
    memory["m"] = maximum
    memory[scores] = np.exp(memory[scores] - maximum[:, None])
    memory["l"] = old * memory["l"] + memory[scores].sum(axis=1)
    memory["o"] = old[:, None] * memory["o"] + memory[scores] @ memory[values]


def finish_rows(memory: TwoLevelMemory, output: str, statistic: str, index: object) -> None:
    memory["o"] = memory["o"] / memory["l"][:, None]
    memory["m"] = memory["m"] + np.log(memory["l"])
    memory.store("o", output, index)
    memory.store("m", statistic, index)
    memory.free("o", "m", "l")
