"""What a schedule is: its I/O, footprint and operation counts as sympy expressions, exact to the element, and what the
planner must know of it.

A schedule is a sequence of phases that share nothing in fast memory. I/O counts element transfers between the slow
memory and a fast memory of M elements; the footprint of a phase is what it holds there at most.
`examples/simulate` runs the same schedules on a simulated memory, and the counts agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fusion.planning.symbols import r, smooth, stages


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
    kernels: the kinds of machine ("cpu", "gpu") for which an emitter has a kernel of it.
    skips: whether it leaves out tiles that a mask hides; its counts are then in their live share s.
    unmasked: the schedule that it is where nothing is masked; it is weighed for masks only.
    mixes_heads: whether it computes the heads of a batch together; it is weighed where it is named only.
    closed_form: whether its best tile can be derived (`fusion.planning.optimum`) rather than searched for.
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
    def query_stationary(self) -> bool:
        """Whether tiles of keys stream past a block of queries: what kernels are modelled as."""
        return "stages" in self.tile or self.mixes_heads

    @property
    def takes_features(self) -> bool:
        """Whether its work depends on a number of polynomial features."""
        return any(r in phase.flops.free_symbols for phase in self.phases)

    @property
    def kernels_text(self) -> str:
        """The kinds of machine that have a kernel of it, in words."""
        return f"kernel on {', '.join(self.kernels)}" if self.kernels else "no kernel"

    def runs_on(self, kind: str) -> bool:
        """Whether there is a kernel of it for a kind of machine; for the two-level model, for any."""
        return bool(self.kernels) if kind == "model" else kind in self.kernels

    def __str__(self) -> str:
        return f"{self.name}: {self.title}; I/O {self.order}; {self.kernels_text} ({self.source})"
