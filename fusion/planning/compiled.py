"""Symbolic schedules as plain numpy functions, compiled once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import sympy

from fusion.planning.schedule import Phase
from fusion.planning.schedules import schedule
from fusion.planning.symbols import SIZES, TILES, smooth


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one attention problem moves, holds and computes; numbers or arrays over tiles. Elements, flop,
    exponentials."""

    reads: np.ndarray
    writes: np.ndarray
    footprint: np.ndarray
    flops: np.ndarray
    exps: np.ndarray

    @property
    def io(self) -> np.ndarray:
        """Elements moved in either direction."""
        return self.reads + self.writes


_FIELDS = ("reads", "writes", "footprint", "flops", "exps")


@functools.lru_cache(maxsize=256)
def _compile(phase: Phase) -> Callable[..., list]:
    arguments = (*SIZES, *(TILES[name] for name in phase.tile))
    return sympy.lambdify(arguments, [getattr(phase, field) for field in _FIELDS], modules="numpy", cse=True)


def phase_counts(phase: Phase, sizes: Mapping[str, float], tile: Mapping[str, int | np.ndarray]) -> Counts:
    """The phase's counts at `sizes` (N_q, N_k, d, d_v, M, s, r) for a tile or arrays of tiles."""
    arguments = [float(sizes[str(symbol)]) for symbol in SIZES]
    values = _compile(phase)(*arguments, *(np.asarray(tile[name], dtype=float) for name in phase.tile))
    return Counts(**{field: np.asarray(value, dtype=float) for field, value in zip(_FIELDS, values, strict=True)})


def counts(name: str, sizes: Mapping[str, float], tile: Mapping[str, int | np.ndarray]) -> Counts:
    """The whole schedule's counts: sums over its phases, the footprint the largest of them."""
    parts = [phase_counts(phase, sizes, tile) for phase in schedule(name).phases]
    joined = {field: np.maximum if field == "footprint" else np.add for field in _FIELDS}
    return Counts(**{f: functools.reduce(join, (getattr(part, f) for part in parts)) for f, join in joined.items()})


@functools.lru_cache(maxsize=256)
def io_variables(phase: Phase) -> frozenset[str]:
    """Tile variables the phase's I/O depends on; the others only enlarge its footprint."""
    return frozenset(map(str, smooth(phase.reads + phase.writes).free_symbols)) & frozenset(TILES)
