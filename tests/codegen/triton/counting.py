"""Counting the tiles that interpreted kernels visit, and by brute force those that they have to."""

from __future__ import annotations

from collections import Counter

import torch

STAGES = {"visit_keys", "differentiate_keys", "differentiate_rows", "weigh_rows"}


class Products(Counter):
    """Matrix products of each kernel; `full`: of those, the ones in tiles where no mask is evaluated."""

    def __init__(self):
        super().__init__()
        self.full: Counter[str] = Counter()


def count_products(monkeypatch) -> Products:
    """A count of the products of every kernel that the interpreter runs from now on."""
    from triton.runtime.interpreter import InterpreterBuilder

    from fusion.codegen.triton.variant import Variant

    counts, running, unmasked = Products(), [], [False]
    dot, launch, init = InterpreterBuilder.create_dot, Variant.launch, Variant.__init__

    def create_dot(self, *arguments):
        counts[running[-1]] += 1
        counts.full[running[-1]] += unmasked[-1]
        return dot(self, *arguments)

    def launched(self, name, *arguments):
        running.append(name)
        try:
            launch(self, name, *arguments)
        except Exception as problem:
            counts[f"{name}: {problem}"] += 1
            raise

    def made(self, *arguments, **others):
        init(self, *arguments, **others)
        for name in STAGES & vars(self.module).keys():
            setattr(self.module, name, noted(getattr(self.module, name)))

    def noted(function):
        place = function.arg_names.index("MASKED") if "MASKED" in function.arg_names else None

        def call(*arguments):
            unmasked.append(place is not None and not arguments[place])
            try:
                return function(*arguments)
            finally:
                unmasked.pop()

        return call

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(Variant, "launch", launched)
    monkeypatch.setattr(Variant, "__init__", made)
    return counts


def live_tiles(live: torch.Tensor, rows: int, keys: int, dead: torch.Tensor | None = None) -> int:
    """Tiles with a live score, of a bool tensor [.., n_q, n_k]; dead: rows [.., n_q] whose blocks meet all tiles."""
    return sum(
        int((tile.flatten(1).any(1) | (met_none if dead is not None else False)).sum())
        for block, met_none in _blocks(live, rows, dead)
        for tile in block.split(keys, 2)
    )


def full_tiles(full: torch.Tensor, rows: int, keys: int, *, whole: str, dead: torch.Tensor | None = None) -> int:
    """Tiles in which every score is `full`, [.., n_q, n_k], and that are not cut off along `whole`, "rows" or "keys";
    but none of the blocks with a `dead` row."""
    extent = {"rows": (1, rows), "keys": (2, keys)}[whole]
    return sum(
        int((tile.flatten(1).all(1) & ~met_none).sum())
        for block, met_none in _blocks(full, rows, dead)
        for tile in block.split(keys, 2)
        if tile.shape[extent[0]] == extent[1]
    )


def _blocks(scores: torch.Tensor, rows: int, dead: torch.Tensor | None):
    """(block of rows [heads, rows, n_k], whether it has a dead row [heads])."""
    n_q, n_k = scores.shape[-2:]
    none = torch.zeros(scores.shape[:-1], dtype=torch.bool) if dead is None else dead
    parts = zip(scores.reshape(-1, n_q, n_k).split(rows, 1), none.reshape(-1, n_q).split(rows, 1), strict=True)
    return [(block, met_none.any(1)) for block, met_none in parts]


class Traffic:
    """Elements that each kernel reads and writes, and bytes that it reads: in one load or store every address counts
    once."""

    def __init__(self):
        self.reads: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()


def count_traffic(monkeypatch) -> Traffic:
    """A count of what every kernel that the interpreter runs from now on reads and writes."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    from fusion.codegen.triton.variant import Variant

    found, running = Traffic(), [""]
    load, store, launch = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, Variant.launch
    add = InterpreterBuilder.create_atomic_rmw

    def elements(pointers, mask) -> int:
        return np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]).size

    def create_masked_load(self, pointers, mask, *rest, **others):
        found.reads[running[0]] += (count := elements(pointers, mask))
        found.bytes[running[0]] += count * (pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *rest, **others)

    def create_masked_store(self, pointers, value, mask, *rest, **others):
        found.writes[running[0]] += elements(pointers, mask)
        return store(self, pointers, value, mask, *rest, **others)

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        found.reads[running[0]] += (count := elements(pointers, mask))
        found.writes[running[0]] += count
        return add(self, operation, pointers, value, mask, *rest)

    def launched(self, name, *arguments):
        running[0] = name
        launch(self, name, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
    monkeypatch.setattr(Variant, "launch", launched)
    return found
