"""Schedules of attention as formulas: I/O, footprint and operation counts as sympy expressions, exact to the element.

A schedule is a sequence of phases that share nothing in fast memory. I/O counts element transfers between the slow
memory and a fast memory of M elements; the footprint of a phase is what it holds there at most. The letters are those
of the papers; one attention problem (one batch entry, one head) is meant throughout. `examples/simulate` runs the same
schedules on a simulated memory, and the counts agree exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import sympy

from fusion.errors import FusionError, NoFittingTileError
from fusion.planning.problem import Problem


class UnknownScheduleError(FusionError, KeyError):
    """A schedule was asked for by a name that is not known, or for what it has not."""

    __str__ = Exception.__str__


class SmallMemoryError(NoFittingTileError):
    """The fast memory is too small for the smallest tile of a schedule. needed: elements that it takes."""

    def __init__(self, message: str, needed: float = 0.0) -> None:
        super().__init__(message)
        self.needed = needed


def _positive(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


N_q = _positive("N_q")  # queries
N_k = _positive("N_k")  # keys
N = _positive("N")  # N_q = N_k, in leading orders
d = _positive("d")  # head dimension of Q and K
d_v = _positive("d_v")  # head dimension of V
M = sympy.Symbol("M", positive=True)  # fast memory in elements
s = sympy.Symbol("live", nonnegative=True)  # share of tiles that are live
r = _positive("r")  # polynomial features

B_r = _positive("B_r")  # rows (queries) of a tile
B_c = _positive("B_c")  # columns (keys) of a tile
B_d = _positive("B_d")  # depth of a blocked product: how much of the summed dimension is held at a time
B_o = _positive("B_o")  # rows of the tile of a schedule's second product
B_p = _positive("B_p")  # columns of the tile of a schedule's second kernel
B_e = _positive("B_e")  # head-dimension columns of an output held at a time
B_s = _positive("B_s")  # keys of one split
B_f = _positive("B_f")  # features held at a time
stages = _positive("stages")  # key tiles in flight

SIZES = (N_q, N_k, d, d_v, M, s, r)
TILES = {str(symbol): symbol for symbol in (B_r, B_c, B_d, B_o, B_p, B_e, B_s, B_f, stages)}
CUTS = {"B_r": ("N_q",), "B_c": ("N_k",), "B_d": ("d",), "B_o": ("N_q", "N_k"), "B_p": ("N_q", "N_k"),
        "B_e": ("d", "d_v"), "B_s": ("N_k",), "B_f": ("r",)}  # fmt: skip
"""What each tile variable cuts. The second product of a schedule cuts keys or queries, so both offer candidates."""


def blocks(size: sympy.Expr, block: sympy.Expr) -> sympy.Expr:
    """How many blocks cover `size`: the ceiling of the quotient."""
    return sympy.ceiling(size / block)


def smooth(expression: sympy.Expr) -> sympy.Expr:
    """The expression with every ceiling taken off: what it is where all blocks divide."""
    return expression.replace(sympy.ceiling, lambda inner: inner)


R, C = blocks(N_q, B_r), blocks(N_k, B_c)
PAIRS = N_q * N_k
DIMS = d + d_v


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass over the data.

    reads, writes, footprint: elements.
    flops: of matrix products (a multiply-add is two).
    exps: exponentials.
    """

    name: str
    reads: sympy.Expr
    writes: sympy.Expr
    footprint: sympy.Expr
    flops: sympy.Expr = sympy.Integer(0)
    exps: sympy.Expr = sympy.Integer(0)

    @property
    def tile(self) -> tuple[str, ...]:
        """Names of the tile variables it depends on."""
        free = (self.reads + self.writes + self.footprint).free_symbols
        return tuple(sorted(str(symbol) for symbol in free if str(symbol).startswith("B_") or symbol == stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An algorithm with its tile left open.

    order: the I/O at the best tile, up to a constant.
    exact: whether it computes attention itself rather than an approximation.
    kernels: the kinds of machine ("cpu", "gpu") for which the compiler has a kernel of it.
    skips: whether it leaves out tiles that a mask hides; its counts are then in their live share s.
    unmasked: the schedule that it is where nothing is masked; it is weighed for masks only.
    mixes_heads: whether it computes the heads of a batch together; it is weighed where it is named only.
    closed_form: whether its best tile can be derived (`optimum`) rather than searched for.
    colour: in plots, told apart with any colour vision (Okabe and Ito's set).
    """

    name: str
    title: str
    source: str
    phases: tuple[Phase, ...]
    order: str
    direction: str = "forward"
    exact: bool = True
    kernels: tuple[str, ...] = ()
    skips: bool = False
    unmasked: str = ""
    mixes_heads: bool = False
    closed_form: bool = True
    colour: str = "#333333"

    @property
    def io(self) -> sympy.Expr:
        """Elements moved in either direction."""
        return sympy.Add(*(phase.reads for phase in self.phases), *(phase.writes for phase in self.phases))

    @property
    def tile(self) -> tuple[str, ...]:
        """Names of the tile variables."""
        return tuple(sorted({name for phase in self.phases for name in phase.tile}))

    @property
    def leading(self) -> sympy.Expr:
        """The I/O without ceilings, terms gathered."""
        return sympy.expand(smooth(self.io))

    @property
    def takes_features(self) -> bool:
        """Whether its work depends on a number of polynomial features."""
        return any(r in phase.flops.free_symbols for phase in self.phases)

    @property
    def kernels_text(self) -> str:
        """The kinds of machine that have a kernel of it, in words."""
        return f"kernel on {', '.join(self.kernels)}" if self.kernels else "no kernel"

    def __str__(self) -> str:
        return f"{self.name}: {self.title}; I/O {self.order}; {self.kernels_text} ({self.source})"


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


def counts_of(schedule: Schedule, sizes: Mapping[str, float], tile: Mapping[str, int | np.ndarray]) -> Counts:
    """The whole schedule's counts: sums over its phases, the footprint the largest of them."""
    parts = [phase_counts(phase, sizes, tile) for phase in schedule.phases]
    joined = {field: np.maximum if field == "footprint" else np.add for field in _FIELDS}
    return Counts(**{f: functools.reduce(join, (getattr(part, f) for part in parts)) for f, join in joined.items()})


@functools.lru_cache(maxsize=256)
def io_variables(phase: Phase) -> frozenset[str]:
    """Tile variables the phase's I/O depends on; the others only enlarge its footprint."""
    return frozenset(map(str, smooth(phase.reads + phase.writes).free_symbols)) & frozenset(TILES)


def sizes_of(problem: Problem, capacity: float, share: float = 1.0, features: int = 1) -> dict[str, float]:
    """Values of the formulas' symbols. Sizes of 0 count as 1."""
    values = {"N_q": problem.n_q, "N_k": problem.n_k, "d": problem.d, "d_v": problem.d_v, "r": features}
    return {name: max(1, value) for name, value in values.items()} | {"M": capacity, "live": share}
