"""`AttentionSpec`: everything an emitter needs to know about one attention, and nothing about its schedule.

For every batch coordinate b and query row i it defines

    x[i, j] = score program(s, i, j, b, captured tensors)          s = sum over c of q[b, i, c] * k[b, j, c]
    out[b, i, e] = sum over j of w[i, j] * v[b, j, e]
    w[i, j] = weight(i, j) * exp(x[i, j] - m) * row_scale           m = max over j of x[i, j] and of the sinks
    row_sum = sum over j of exp(x[i, j] - m) + sum over sinks of exp(sink - m);  row_scale = 1 / row_sum by default

with the normaliser SOFTMAX or SAFE_SOFTMAX, and `w = weight * x` with NONE (sigmoid attention and similar ones). Where
heads are mixed ("talking heads"), `Mixing` stands between the products and the softmax.

Any schedule of a spec computes this function.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from fusion.ir import records
from fusion.ir.expr import (
    LOG_WEIGHT,
    ONE,
    ROW_SUM,
    SCORE,
    WEIGHT,
    C,
    E,
    Expr,
    I,
    J,
    Kind,
    const,
    coord,
    coordinates,
    load,
    loads,
    node,
    substitute,
    walk,
)
from fusion.ir.mask_facts import MaskFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Sums over heads before and after the softmax ("talking heads", 2003.02436, section 3): for head g

        s[g] = sum over h of scores[g, h] * scored(s[h])      the score that the score program reads
        w[g] = weighted(sum over h of weights[g, h] * w[h])   the factor of V

    head: the batch coordinate that is the head; its extent is a constant.
    scores, weights: FLOAT expressions in b.. and HEAD; None where there is no such sum.
    scored: a program in SCORE, b.., i and j of a single head.
    weighted: one in WEIGHT.
    own_score, own_weight: whether the value of head g itself is added to its sum.
    """

    head: Expr
    scores: Expr | None = None
    scored: Expr = SCORE
    weights: Expr | None = None
    weighted: Expr = WEIGHT
    own_score: bool = False
    own_weight: bool = False

    @property
    def axis(self) -> int:
        """The number of the batch coordinate."""
        return int(self.head.name[1:])


class Normalizer(enum.Enum):
    """Function from scores to weights."""

    SOFTMAX = "softmax"
    """Weights of `torch.softmax`: a row of nothing but -inf is NaN."""
    SAFE_SOFTMAX = "safe_softmax"
    """Weights of `aten::_safe_softmax` and `scaled_dot_product_attention`: a row of nothing but -inf is zero."""
    ZERO_SOFTMAX = "zero_softmax"
    """Weights of `nan_to_num(softmax)`: a row of NaN, whatever it comes from, is zero. Has no gradient here."""
    NONE = "none"
    """The score program is the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor of the graph that the kernel reads; strides come at run time.

    dtype: torch's name ("float32").
    name: for people, e.g. "k" or "bias".
    order: its dimensions from the slowest to the fastest in memory, which its gradient shares; () where no gradient is
        needed or the tensor is row-major.
    """

    dtype: str
    rank: int
    name: str
    order: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        if self.dtype == "bool":
            return Kind.BOOL
        return Kind.FLOAT if self.torch_dtype.is_floating_point else Kind.INT

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The tensor that is returned: dims names its dimensions ("b0", "i", "b1", "e"; each batch coordinate, i and e
    once); order lists them from the slowest to the fastest in memory, densely packed."""

    dims: tuple[str, ...]
    order: tuple[str, ...]

    def __post_init__(self) -> None:
        if sorted(self.dims) != sorted(self.order):
            raise ValueError(f"output dims {self.dims} and memory order {self.order} name different coordinates")


class Reduction(enum.Enum):
    """Reduction of the values of a `AuxOutput` along a coordinate."""

    NONE = "none"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxOutput:
    """An auxiliary output: the weights themselves, or a statistic of rows or keys that is computed from them.

    value: an expression in WEIGHT, LOG_WEIGHT, b.., i, j and captured tensors, or in ROW_MAX, ROW_SUM, b.. and i. It
        must not depend on ROW_SUM in rows whose maximum is infinite.
    reduction, over: its reduction over the coordinate `over`, "i" or "j"; NONE and "".
    dims: the remaining coordinates, from the slowest to the fastest in memory: each batch coordinate, i and j once,
        without `over`; "j" last where it is there, else "i".
    dtype: of the tensor; of statistics float32, or float64 where operands have it.
    """

    value: Expr
    dims: tuple[str, ...]
    dtype: str
    reduction: Reduction = Reduction.NONE
    over: str = ""

    def __post_init__(self) -> None:
        if self.over in self.dims or self.dims[-1] != ("j" if "j" in self.dims else "i"):
            raise ValueError(f"an auxiliary output over {self.over!r} with dimensions {self.dims}")
        if not {"i", "j"} <= {*self.dims} and self.dtype not in ("float32", "float64"):
            raise ValueError(f"a statistic of weights in {self.dtype}; float32 is what kernels write")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention: see the module's docstring for its meaning.

    sizes: names of the run-time sizes, in the order in which the op receives their values.
    batch: sizes of the batch coordinates b0, b1, ... (INT expressions in sizes and constants).
    n_q, n_k, d, d_v: numbers of query rows and keys; columns of Q and K; columns of V.
    operands: tensors read; number 0 is Q, 1 is K, 2 is V (one tensor may be listed more than once).
    q, k, v: index of each operand dimension in (b.., i, c), (b.., j, c), (b.., j, e). An index may be read from another
        operand, as the block table of a paged cache is: one whose values are known to be within the dimension.
    k_value, v_value: the multiplied value where it is computed from a stored one (a quantised cache): FLOAT expressions
        in the same coordinates, whose loads are of K (V) and of scales, zero points, tables. None: the element itself.
    score, weight, sinks, row_scale: see above; `row_scale` is an expression in ROW_MAX, ROW_SUM, b.. and i.
    mixing: the sums over heads; None without them.
    n_k_total: the number of keys from which the n_k of a row are selected, where the last batch coordinate is the query
        and each query has a separate set, through which k and v are read; None elsewhere. No kernel needs it.
    dtype: dtype of the products in the model ("float32", "bfloat16", "float16").
    reproducible: whether the bits of a row of the output may follow from nothing but its query, the keys and values
        that it attends to, and the spec: not from the rows beside it, nor from how the work is divided.
    """

    sizes: tuple[str, ...]
    batch: tuple[Expr, ...]
    n_q: Expr
    n_k: Expr
    d: Expr
    d_v: Expr
    operands: tuple[Operand, ...]
    q: tuple[Expr, ...]
    k: tuple[Expr, ...]
    v: tuple[Expr, ...]
    score: Expr
    normalizer: Normalizer
    dtype: str
    out_dtype: str
    output: Output
    k_value: Expr | None = None
    v_value: Expr | None = None
    weight: Expr = const(1.0)
    sinks: tuple[Expr, ...] = ()
    row_scale: Expr | None = None
    mask: MaskFacts | None = None
    aux_outputs: tuple[AuxOutput, ...] = ()
    mixing: Mixing | None = None
    n_k_total: Expr | None = None
    reproducible: bool = False

    def __post_init__(self) -> None:
        converted = [(value,) if value is not None else () for value in self.values]
        for access, value, allowed in zip((self.q, self.k, self.v), converted, ("ic", "jc", "je"), strict=True):
            names = {n for index in (*access, *value) for n in coordinates(index) if not n.startswith("b")}
            if not names <= set(allowed):
                raise ValueError(f"an operand's index uses {sorted(names)}, only {list(allowed)} may occur")
        for sink in self.sinks:
            if "j" in coordinates(sink):
                raise ValueError(f"a sink must not depend on the key: {sink}")

    def __str__(self) -> str:
        batch = "x".join(map(str, self.batch)) or "1"
        return f"attention[{batch}, {self.n_q} x {self.n_k}, d={self.d}/{self.d_v}, {self.dtype}]: {self.formula()}"

    def formula(self, names: Mapping[int, str] | None = None) -> str:
        """The score program and normaliser as mathematics. names: of the operands, by default those of the spec."""
        from fusion.ir.printing import repeated, shortened, to_text

        names, score = names or self.names, shortened(self.score)
        if (part := repeated(score)) is not None:
            score = substitute(score, {part: node("coord", (), Kind.FLOAT, "x")})
        inner = to_text(score, names) + ("" if part is None else f", x = {to_text(part, names)}")
        if (mixing := self.mixing) is not None and mixing.scores is not None:
            own = f"{to_text(mixing.scored, names)} + " if mixing.own_score else ""
            mixed = f"{own}sum over h of {_factor(mixing.scores, names)} * {_factor(mixing.scored, names)}"
            inner = f"{inner}, s = {mixed}"
        text = inner if self.normalizer is Normalizer.NONE else f"{self.normalizer.value}({inner})"
        if self.sinks:
            text = text[:-1] + "; sinks " + ", ".join(to_text(sink, names) for sink in self.sinks) + ")"
        if self.weight is not const(1.0):
            text += f" * ({to_text(self.weight, names)})"
        if self.row_scale is not None and self.scales_rows:
            text += f", rows scaled by {to_text(self.row_scale, names)}"
        if mixing is not None and mixing.weights is not None:
            own = f"{text} + " if mixing.own_weight else ""
            mixed = f"{own}sum over h of {_factor(mixing.weights, names)} * {text}"
            text = mixed if mixing.weighted is WEIGHT else f"{to_text(mixing.weighted, names)}, w = {mixed}"
        return text

    @property
    def names(self) -> dict[int, str]:
        """Names of the operands, by number."""
        return {number: operand.name for number, operand in enumerate(self.operands)}

    def programs(self) -> tuple[Expr, ...]:
        """Expressions that are computed for each score and weight."""
        mixed = () if self.mixing is None else (self.mixing.scored, self.mixing.weighted)
        return (self.score, self.weight, *mixed)

    @property
    def scales_rows(self) -> bool:
        """Whether rows have another scale than one over their sum."""
        return self.row_scale not in (None, node("div", (ONE, ROW_SUM), Kind.FLOAT))

    @property
    def needs_all_keys(self) -> bool:
        """Whether no key may be skipped, whatever the mask says: other heads see its score, or log(0) is its value."""
        return self.mixing is not None or LOG_WEIGHT in walk(*(f.value for f in self.aux_outputs))

    @property
    def values(self) -> tuple[Expr | None, Expr | None, Expr | None]:
        """Multiplied values of Q, K and V; None where it is the element."""
        return None, self.k_value, self.v_value

    @property
    def stored(self) -> tuple[Operand, ...]:
        """Operands that are narrower than the dtypes of the computation: those in float8, and K and V in integers."""
        return tuple(
            o for n, o in enumerate(self.operands) if o.dtype.startswith("float8") or n < 3 and o.kind is Kind.INT
        )

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of the operands that Q, K and V are read through."""
        indices = [index for access in (self.q, self.k, self.v) for index in access]
        indices += [index for part in loads(*filter(None, self.values)) for index in part.args]
        return tuple(sorted({part.operand for part in loads(*indices)}))

    @property
    def axes(self) -> tuple[Expr, ...]:
        """The batch coordinates."""
        return tuple(coord(f"b{axis}") for axis in range(len(self.batch)))

    def access(self, number: int) -> tuple[tuple[Expr, ...], Expr, Expr]:
        """Index of operand 0, 1 or 2, and the coordinates of its rows and columns."""
        return ((self.q, I, C), (self.k, J, C), (self.v, J, E))[number]

    def element(self, number: int) -> Expr:
        """Multiplied value of operand 0, 1 or 2, a FLOAT expression."""
        index, value = self.access(number)[0], self.values[number]
        return load(number, index, Kind.FLOAT) if value is None else value

    def describe(self, expr: Expr, names: Mapping[int, str] | None = None) -> str:
        """Text of an expression of this spec with its operands' names."""
        from fusion.ir.printing import to_text

        return to_text(expr, names or self.names)

    def describe_aux(self, aux: AuxOutput, names: Mapping[int, str] | None = None) -> str:
        """Text of an auxiliary output, e.g. "sum over keys of w * w"."""
        value = self.describe(aux.value, names)
        if not aux.over:
            return f"{value} per row" if "j" not in aux.dims else value
        return f"{aux.reduction.value} over {'keys' if aux.over == 'j' else 'queries'} of {value}"

    def heads_per_key(self, heads: int, axis: int = -1) -> int:
        """The group size of grouped queries: the number of values of a batch coordinate (the last) that share keys."""
        last = coord(f"b{len(self.batch) - 1 if axis < 0 else axis}")
        divisors: set[int] = set()

        def visit(expr: Expr) -> None:
            if expr is last:
                divisors.add(1)
            elif expr.op == "floordiv" and expr.args[0] is last and expr.args[1].op == "const":
                divisors.add(expr.args[1].integer)
            else:
                for arg in expr.args:
                    visit(arg)

        for number in (1, 2):
            visit(self.element(number))
        group = math.gcd(*divisors) if divisors else heads
        return group if group and heads % group == 0 else 1

    def expressions(self) -> tuple[Expr, ...]:
        """Every expression of the spec."""
        return tuple(records.expressions(self))

    def mapped(
        self, change: Callable[[Expr], Expr], of_keys: Callable[[Expr], Expr] | None = None, **given: Any
    ) -> AttentionSpec:
        """Spec with every expression changed: by `of_keys` the index maps and values of K and V, by `change` all
        others. given: new values of other fields."""
        changes: dict[str, Callable[[Expr], Expr]] = dict.fromkeys(("k", "k_value", "v", "v_value"), of_keys or change)
        names = [field.name for field in fields(self) if field.name not in given]
        changed = {name: records.mapped(getattr(self, name), changes.get(name, change)) for name in names}
        return replace(self, **changed, **given)

    def to_json(self) -> str:
        """The complete spec as text, JSON but for its quotes, which are ' (`fusion.ir.records`): the form in which the
        op carries it through graphs, caches and processes."""
        return records.to_json(self)

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_json(text: str) -> AttentionSpec:
        """The spec that `to_json` wrote; equal text gives the same object."""
        return records.from_json(AttentionSpec, text)


def _factor(expr: Expr, names: Mapping[int, str]) -> str:
    from fusion.ir.printing import to_text

    text = to_text(expr, names)
    return text if expr.op in ("load", "score") else f"({text})"
