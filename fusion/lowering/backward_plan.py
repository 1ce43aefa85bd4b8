"""Division of a backward between the two kernels of a spec: the gradients of each kernel, and their form.

Both kernels recompute scores S and weights P tile by tile from Q, K and the statistics of the forward, and dP = dO V^T.

    role QUERIES  lanes are queries, loops run over keys      dQ += dS K;  sums over keys of gradients of loads that
                                                              are free of j
    role KEYS     lanes are keys, loops run over queries      dK += dS^T Q, dV += P^T dO;  everything else

Where each batch element belongs to one thread, one kernel, whose lanes are keys, computes all (`fused`).

With x the score program, w the weight program, D = sum_e dO O:  dx = P (w dP - D), and dS, as well as the gradient of
every load, follow from dx by `fusion.ir.derivative`. Without a normaliser dx = w dP. Where rows have another scale than
one over their sum, P is the scaled weight, and D has a factor (`fusion.lowering.rows`). Gradients of auxiliary
outputs add F to w dP, and its mean to D (`fusion.lowering.aux_gradients`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusion.ir import integers
from fusion.ir.derivative import UPSTREAM
from fusion.ir.expr import SCORE, ZERO, Expr, I, J, Kind, const, coordinates, loads
from fusion.ir.ops import apply
from fusion.ir.reads import Elements, elements, key_dimension
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering import rows
from fusion.lowering.aux_gradients import aux_gradients
from fusion.lowering.gradients import Axes, adds_up_to_zero, of_score, of_weight, rounds, summed_over
from fusion.lowering.score_programs import ScorePrograms, score_programs

STATISTICS = ("unit", "shift", "factor", "delta")
"""Per query row: the weight is exp2(x * unit + shift) * factor; delta is the sum of dO * O."""

ROW_VALUES = (*STATISTICS, "lost", "off")
"""With what delta lacks of the mean of w dP over the weights: it is (1 - lost) * sum of P w dP / sum of P - off.
lost: 0, or with a `row_scale` what `reference.gradients.of_rows` says; off: what arrives at the log-sum-exp."""


class LaneAxis(enum.Enum):
    """Axis of the scores that runs along a kernel's vector lanes."""

    QUERIES = "queries"
    KEYS = "keys"

    @property
    def lane(self) -> Expr:
        return I if self is LaneAxis.QUERIES else J

    @property
    def row(self) -> Expr:
        return J if self is LaneAxis.QUERIES else I


class Form(enum.Enum):
    """Form in which the gradient of a load is collected."""

    PER_QUERY = "per query"  # the load does not depend on the key: a sum over keys, [b.., i]
    PER_KEY = "per key"  # it depends on the key but not on the query: a sum over queries, [b.., j]
    DENSE = "dense"  # every (i, j) has an element of its own: one vector along j at a time
    SCATTERED = "scattered"  # anything else (tables of relative positions): every thread adds to copies of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGradient:
    """The gradient of one load."""

    load: Expr
    form: Form

    @property
    def operand(self) -> int:
        return self.load.operand


class RowSum(NamedTuple):
    """A sum that a kernel computes for each query, or for each key."""

    axis: LaneAxis
    of: Expr  # its gradient: a load, SCORE, or UPSTREAM for that of the program, dx
    share: bool = False  # what the gradient would be for dx = P


SUM_OF_DX = RowSum(LaneAxis.QUERIES, UPSTREAM)
"""Over the keys: what `ROW_VALUES` say, but for the rounding of D. With sinks the sum of P w dP instead, which is D."""
SUM_OF_SLOPES = RowSum(LaneAxis.QUERIES, SCORE)
SUM_OF_WEIGHTS = SUM_OF_DX._replace(share=True)


class TileProgram(NamedTuple):
    """A score program, and the contribution of an element (i, j) to gradients: of the program (UPSTREAM), of the raw
    score in units of `programs.scale` (SCORE), and of loads."""

    program: Expr
    gradients: dict[Expr, Expr]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPlan:
    """Facts that the kernels of a spec share. elements: the index maps of Q, K and V, None if gathered or computed."""

    spec: AttentionSpec  # its auxiliary outputs are those at which a gradient arrives
    programs: ScorePrograms
    variants: tuple[TileProgram, ...]  # with the mask, and, where that is simpler, for tiles that need none
    loads: tuple[LoadGradient, ...]  # gradients of what the programs read
    inner: tuple[int, ...]  # batch coordinates over which dense gradients are summed, by one thread in turn
    elements: tuple[Elements | None, ...]
    at_weight: Expr | None  # gradient of the weight through auxiliary outputs
    at_log_sum: Expr | None  # the same of the log-sum-exp of a row
    everywhere: bool  # whether scores without a weight have gradients, too, so that no tile is skipped
    adds_mean: bool  # whether what centred keys lack in the gradient of Q is not 0: see `centring`

    def writes(self, number: int) -> bool:
        """Whether kernels write the gradient of Q, K or V directly to its place: no element is read twice."""
        result = self.elements[number]
        return result is not None and result.apart

    def corrects(self, needs: Sequence[bool]) -> bool:
        """Whether the rounding of D is corrected in sums over the keys: they are long, it would not average out."""
        wanted = self.adds_mean and needs[0] or any(needs[entry.operand] for entry in self.loads)
        return normalized(self.spec) and wanted

    def exclusive(self, entry: LoadGradient) -> bool:
        """Whether only the inner batch elements, all of them, contribute to an element of this gradient: the last of
        these can write it to its place, in the operand's dtype. A mask may skip a tile of some of them alone."""
        once = sum(other.operand == entry.operand for other in self.loads) == 1
        named = set().union(*map(coordinates, entry.load.args))
        alike = self.spec.mask is None and not any(f"b{axis}" in named for axis in self.inner)
        return entry.form is Form.DENSE and once and entry.operand > 2 and (alike or not self.inner)

    def of(self, forms: Collection[Form], needs: Sequence[bool]) -> tuple[LoadGradient, ...]:
        """Loads whose gradients have one of these forms."""
        return tuple(entry for entry in self.loads if entry.form in forms and needs[entry.operand])

    def sums(self, forms: Collection[Form], needs: Sequence[bool]) -> tuple[RowSum, ...]:
        """Sums of a kernel that collects these forms, with those for the correction."""
        gradients = {form: self.of({form} & set(forms), needs) for form in (Form.PER_QUERY, Form.PER_KEY)}
        per_key = [RowSum(LaneAxis.KEYS, entry.load) for entry in gradients[Form.PER_KEY]]
        per_query = [RowSum(LaneAxis.QUERIES, entry.load) for entry in gradients[Form.PER_QUERY]]
        if self.adds_mean and needs[0] and Form.PER_QUERY in forms:
            per_query.append(SUM_OF_SLOPES)
        # A kernel that has no gradients of keys comes before one that has, and whose delta it puts right.
        if self.corrects(needs) and (per_query or Form.PER_KEY not in forms):
            scaled = [] if self.spec.row_scale is None else [SUM_OF_WEIGHTS]
            per_query += [SUM_OF_DX, *scaled, *(entry._replace(share=True) for entry in per_query)]
        return (*per_key, *per_query)


def unsupported(spec: AttentionSpec) -> str | None:
    """Reason why there are no backward kernels for this spec, whichever operands need gradients, or None."""
    if (reason := rows.unsupported(spec, (False,) * len(spec.operands))) is not None:
        return reason
    if rounds(spec):
        return "a gradient is rounded to a coarser dtype on its way through a cast"
    if spec.mixing is not None:
        return "heads are mixed"
    if spec.row_scale is not None and spec.sinks:
        return "rows with sinks are scaled by something else than the sum"
    if any(operand.dtype == "float64" for operand in spec.operands):
        return "an operand is float64"
    return None


def backward_plan(spec: AttentionSpec, everywhere: bool = False) -> BackwardPlan:
    """Plan of a spec, whose auxiliary outputs are those at which a gradient arrives; the gradients of all float loads
    are in it, whether needed or not. everywhere: keys that the mask hides are visited, too."""
    programs = score_programs(spec, folded=True)
    aux = aux_gradients(spec, len(spec.operands) + 1)  # they are read after operands and dO
    read = loads(spec.score, spec.weight, *(f.value for f in spec.aux_outputs))
    wanted = {load: None for load in read if load.kind is Kind.FLOAT}
    scores = (program for program in (programs.masked, programs.full) if program is not None)
    variants = tuple(TileProgram(score, _gradients(score, programs.scale, spec, list(wanted))) for score in scores)
    for (_, gradients), (load, term) in itertools.product(variants, aux.loads.items()):
        gradients[load] = _sum(gradients[load], term)
    needed = [load for load in wanted if any(variant.gradients[load] is not ZERO for variant in variants)]
    collected = _one_form_per_operand([LoadGradient(load=load, form=_form(load)) for load in needed])
    return BackwardPlan(
        spec=spec,
        programs=programs,
        variants=variants,
        loads=tuple(collected),
        inner=_inner(spec, collected),
        elements=tuple(elements(spec, n) if value is None else None for n, value in enumerate(spec.values)),
        at_weight=None if aux.weight is ZERO else aux.weight,
        at_log_sum=None if aux.log_sum is ZERO else aux.log_sum,
        everywhere=everywhere or aux.everywhere,
        adds_mean=normalized(spec) and not adds_up_to_zero(spec),
    )


def _sum(total: Expr, term: Expr) -> Expr:
    return term if total is ZERO else total if term is ZERO else apply("fadd", total, term)


def _gradients(program: Expr, scale: float, spec: AttentionSpec, wanted: list[Expr]) -> dict[Expr, Expr]:
    """Gradients through the score program and, for loads, through the weight program. x is scale * program. The factor
    of the score's gradient is applied at the end of the sums that it enters."""
    result = of_score(program, wanted)
    if scale != 1.0:
        result |= {load: apply("fmul", result[load], const(scale)) for load in wanted if result[load] is not ZERO}
    through_weight = {load: _sum(result[load], term) for load, term in of_weight(spec.weight, wanted).items()}
    return result | through_weight | {UPSTREAM: UPSTREAM}


def _form(load: Expr) -> Form:
    axes = summed_over(load)
    if axes in (Axes.KEYS, Axes.BOTH):
        return Form.PER_QUERY
    if axes is Axes.QUERIES:
        return Form.PER_KEY
    return Form.DENSE if column_dimension(load) is not None else Form.SCATTERED


def _one_form_per_operand(gradients: list[LoadGradient]) -> list[LoadGradient]:
    """Equal forms for all loads of an operand, which has one buffer: per thread, unless all reads are dense along one
    dimension."""
    kinds: dict[int, set[tuple[Form, int | None]]] = {}
    for entry in gradients:
        if entry.form in (Form.DENSE, Form.SCATTERED):
            kinds.setdefault(entry.operand, set()).add((entry.form, column_dimension(entry.load)))
    mixed = {operand for operand, forms in kinds.items() if len(forms) > 1}
    return [replace(e, form=Form.SCATTERED) if e.operand in mixed and e.form is Form.DENSE else e for e in gradients]


def column_dimension(load: Expr) -> int | None:
    """Dimension whose index is the key plus a term free of i and j, where another is linear in i alone, so that no two
    (i, j) share an element; else None."""
    column = key_dimension(load)
    rows = [dim for dim, index in enumerate(load.args) if "i" in coordinates(index)]
    if column is None or len(rows) != 1 or column in rows:
        return None
    parts = integers.linear(load.args[rows[0]], I)
    return column if parts is not None and parts[0].is_const else None


def _inner(spec: AttentionSpec, gradients: Sequence[LoadGradient]) -> tuple[int, ...]:
    """Batch coordinates that do not occur in the index of every dense gradient."""
    bare = [
        {index.name for index in entry.load.args if index.op == "coord"}
        for entry in gradients
        if entry.form is Form.DENSE
    ]
    return tuple(axis for axis in range(len(spec.batch)) if not all(f"b{axis}" in names for names in bare))


def normalized(spec: AttentionSpec) -> bool:
    return spec.normalizer is not Normalizer.NONE
