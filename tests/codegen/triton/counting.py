"""Counting the tiles that interpreted kernels visit, and by brute force those that they have to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

STAGES = {"visit_keys", "differentiate_keys", "differentiate_rows", "weigh_rows"}
QUERIES, KEYS, JOINT = (f"attention_backward_{name}" for name in ("queries", "keys", "joint"))
PRODUCTS = {QUERIES: 3, KEYS: 4, JOINT: 5}
"""Products of a tile, in each kernel. On GPUs that add fast one kernel may do the work of two."""


class Products(Counter):
    """Matrix products of each kernel; `full`: of those, the ones in tiles where no mask is evaluated."""

    def __init__(self):
        super().__init__()
        self.full: Counter[str] = Counter()


def on_each_launch(monkeypatch, launched: Callable[[str, Callable[[], None]], None], load=lambda module: None) -> None:
    """Replacement of launches: `launched` gets a kernel's name and the function that runs it in Triton's interpreter.
    Kernels that are compiled for a GPU (`--ptx`) run after it, on the same tensors. load: called with each module."""
    from fusion.codegen.triton import interpret
    from fusion.codegen.triton.variant import Variant

    launch, init, twins = Variant.launch, Variant.__init__, dict[Variant, Variant]()

    def made(self, *arguments, **others):
        init(self, *arguments, **others)
        twin = twins[self] = self
        if not all(isinstance(kernel, interpret.InterpretedFunction) for kernel, _ in self.kernels.values()):
            twin = twins[self] = Variant.__new__(Variant)
            with interpret.decorating():
                init(twin, *arguments, **others)
        load(twin.module)

    def run(self, name, programs, tile, fixed, arguments):
        if (twin := twins[self]) is self:
            launched(name, lambda: launch(self, name, programs, tile, fixed, arguments))
            return
        operands, sizes, results, others = arguments
        results = {key: value if value is None else value.clone() for key, value in results.items()}
        with interpret.running():
            launched(name, lambda: launch(twin, name, programs, tile, fixed, (operands, sizes, results, others)))
        launch(self, name, programs, tile, fixed, arguments)

    monkeypatch.setattr(Variant, "launch", run)
    monkeypatch.setattr(Variant, "__init__", made)


def count_products(monkeypatch) -> Products:
    """A count of the products of every kernel that the interpreter runs from now on."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts, running, unmasked, dot = Products(), [], [False], InterpreterBuilder.create_dot

    def create_dot(self, *arguments):
        counts[running[-1]] += 1
        counts.full[running[-1]] += unmasked[-1]
        return dot(self, *arguments)

    def launched(name, run):
        running.append(name)
        try:
            run()
        except Exception as problem:
            counts[f"{name}: {problem}"] += 1
            raise

    def note_stages(module):
        for name in STAGES & vars(module).keys():
            setattr(module, name, noted(getattr(module, name)))

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
    on_each_launch(monkeypatch, launched, note_stages)
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


def kernels_of_backward(products: Products) -> dict[str, int]:
    """Products of a tile in the kernels of the backward that ran."""
    ran = {name: count for name, count in PRODUCTS.items() if products[name]}
    assert ran.keys() in ({QUERIES, KEYS}, {JOINT})
    return ran


def fully_differentiated(
    full: torch.Tensor, rows: int, keys: int, dead: torch.Tensor, listed: bool = False
) -> dict[str, int]:
    """Tiles in which each kernel of the backward evaluates no mask. dead: see `full_tiles`. listed: whether they are
    listed, which says only of rows whether they are cut off."""
    cut = full if listed else full[..., : full.shape[-1] // keys * keys]
    return {
        QUERIES: full_tiles(full, rows, keys, whole="keys", dead=dead),
        KEYS: full_tiles(full, rows, keys, whole="rows"),
        JOINT: full_tiles(cut, rows, keys, whole="rows"),
    }


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

    found, running = Traffic(), [""]
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
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

    def launched(name, run):
        running[0] = name
        run()

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
    on_each_launch(monkeypatch, launched)
    return found
