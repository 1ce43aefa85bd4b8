"""Expression DAG of one element of the attention score.

An expression is a value at symbolic coordinates: batch coordinates `b0, b1, ...`, the query row `i`, the key column
`j`, and in index maps of operands also the contracted column `c` of Q and K and the column `e` of V. Nodes are
interned: equal expressions are the same object, so `==` is identity and shared subexpressions are computed once.

Three kinds of values exist, as in the kernels: FLOAT (computed in float32 whatever the model's dtype), INT and BOOL.
Integer arithmetic is kept in a normal form by `fusion.ir.integers`; build integers with its functions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary


class Kind(enum.Enum):
    """Type of a value in a kernel."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"


@dataclass(frozen=True, eq=False)  # no slots: nodes are referenced weakly, and slots leave room for that from 3.11 on
class Expr:
    """One interned node. Make nodes with `node` or the helpers below, never with the constructor.

    op: a leaf ("const", "coord", "size", "score", "weight", "row_max", "row_sum", "load") or one of
        `fusion.ir.primitives`.
    args: operand expressions; of a load, the index in each dimension of the operand tensor.
    attr: the constant's value, the coordinate's or size's name, the operand's number, or of a tanh the narrower dtype
        that the model rounds it to; else None.
    """

    op: str
    args: tuple[Expr, ...]
    kind: Kind
    attr: float | int | bool | str | None = None

    def __str__(self) -> str:
        from fusion.ir.printing import to_text

        return to_text(self)

    @property
    def value(self) -> float:
        """Value of a constant as a float; raises TypeError for other nodes."""
        return float(self._attribute("const"))

    @property
    def integer(self) -> int:
        """Value of an INT or BOOL constant; raises TypeError for other nodes."""
        if self.kind is Kind.FLOAT:
            raise TypeError(f"{self} is a float, not an integer constant")
        return int(self._attribute("const"))

    @property
    def name(self) -> str:
        """Name of a coordinate or size; raises TypeError for other nodes."""
        return str(self._attribute("coord", "size"))

    @property
    def operand(self) -> int:
        """Number of the tensor that a load reads, or of the product that a "dot" stands for; raises TypeError."""
        return int(self._attribute("load", "dot"))

    def _attribute(self, *ops: str) -> Any:
        if self.op not in ops:
            raise TypeError(f"{self.op} node {self} is no {' or '.join(ops)}")
        return self.attr

    def __neg__(self) -> Expr:
        return operation("neg", self)

    def __add__(self, other: Expr | float) -> Expr:
        return operation("fadd", self, other)

    def __sub__(self, other: Expr | float) -> Expr:
        return operation("fsub", self, other)

    def __rsub__(self, other: float) -> Expr:
        return operation("fsub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return operation("fmul", self, other)

    def __truediv__(self, other: Expr | float) -> Expr:
        return operation("div", self, other)

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    @property
    def is_leaf(self) -> bool:
        return not self.args


def operation(name: str, *args: Expr | float) -> Expr:
    """Primitive of FLOAT or BOOL values, for formulas that are written out, in normal form; integers are built by
    `fusion.ir.integers`."""
    from fusion.ir.ops import apply  # which simplifies by what primitives are, whose derivatives are formulas

    return apply(name, *(arg if isinstance(arg, Expr) else const(float(arg)) for arg in args))


_interned: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()


def node(op: str, args: tuple[Expr, ...], kind: Kind, attr: float | int | bool | str | None = None) -> Expr:
    """The unique node with these fields. `repr` distinguishes signs of zero, and finds NaN, which no `==` finds."""
    key = (op, tuple(map(id, args)), kind, repr(attr))
    result = _interned.get(key)
    if result is None:
        result = Expr(op, args, kind, attr)
        _interned[key] = result
    return result


def const(value: float | int | bool, kind: Kind | None = None) -> Expr:
    """A constant; its kind follows the Python type unless given."""
    if kind is None:
        kind = Kind.BOOL if isinstance(value, bool) else Kind.INT if isinstance(value, int) else Kind.FLOAT
    cast = {Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}[kind]
    number = cast(value)
    if isinstance(number, float):
        number = number + 0.0 if number == number else math.nan  # -0.0 becomes 0.0, and every NaN the same bits
    return node("const", (), kind, number)


def coord(name: str) -> Expr:
    """A coordinate: `b0, b1, ...`, `i`, `j`, `c`, `e` or `h`."""
    return node("coord", (), Kind.INT, name)


def size(name: str) -> Expr:
    """A size known at run time; at least 0."""
    return node("size", (), Kind.INT, name)


def load(operand: int, index: tuple[Expr, ...], kind: Kind) -> Expr:
    """The element of operand tensor number `operand` at `index` (one INT expression per dimension)."""
    return node("load", tuple(index), kind, operand)


SCORE = node("score", (), Kind.FLOAT)
"""The raw score: the product of query row `i` and key row `j`, accumulated in float32."""

ROW_MAX = node("row_max", (), Kind.FLOAT)
"""The maximum of the score program over all keys of a row (and the sinks)."""

ROW_SUM = node("row_sum", (), Kind.FLOAT)
"""The sum over all keys (and sinks) of exp(score program - ROW_MAX)."""

WEIGHT = node("weight", (), Kind.FLOAT)
"""The normalised score of query row `i` and key `j`, before the weight program: what `AuxOutput` is made of."""

LOG_WEIGHT = node("weight", (), Kind.FLOAT, "log")
"""(score program - ROW_MAX) - log(ROW_SUM): the logarithm of WEIGHT, a number also where that is too small for one."""

I, J, C, E = coord("i"), coord("j"), coord("c"), coord("e")
I0, I1, J0, J1 = coord("i0"), coord("i1"), coord("j0"), coord("j1")  # first and last row and key of a tile
HEAD = coord("h")
"""The head whose scores or weights are added to those of others (`fusion.ir.spec.Mixing`)."""
TRUE, FALSE = const(True), const(False)
ZERO, ONE = const(0.0), const(1.0)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below the roots, operands before users."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        here, done = stack.pop()
        if done:
            yield here
            continue
        if here in seen:
            continue
        seen.add(here)
        stack.append((here, True))
        stack.extend((arg, False) for arg in reversed(here.args) if arg not in seen)


_coordinates: WeakKeyDictionary[Expr, frozenset[str]] = WeakKeyDictionary()


def coordinates(expr: Expr) -> frozenset[str]:
    """Names of the coordinates that a value depends on; a score depends on `i` and `j`."""
    stack = [] if expr in _coordinates else [expr]
    while stack:
        part = stack[-1]
        if missing := [arg for arg in part.args if arg not in _coordinates]:
            stack.extend(missing)
        else:
            _coordinates[stack.pop()] = _own_coordinates(part).union(*(_coordinates[arg] for arg in part.args))
    return _coordinates[expr]


def _own_coordinates(part: Expr) -> frozenset[str]:
    if part.op == "coord":
        return frozenset((part.name,))
    if part.op in ("score", "weight", "upstream"):  # "upstream": a gradient, see fusion.ir.derivative
        return frozenset("ij")
    return frozenset("i" if part.op in ("row_max", "row_sum") else ())


def loads(*roots: Expr) -> list[Expr]:
    """Every distinct load below the roots."""
    return [part for part in walk(*roots) if part.op == "load"]


def contains(expr: Expr, target: Expr) -> bool:
    return any(part is target for part in walk(expr))


def rebuild(expr: Expr, leaf: Callable[[Expr], Expr | None]) -> Expr:
    """`expr` with nodes replaced where `leaf` returns one, and everything above rebuilt in normal form."""
    from fusion.ir import ops

    rebuilt: dict[Expr, Expr] = {}
    stack = [expr]
    while stack:
        part = stack[-1]
        if part in rebuilt:
            stack.pop()
        elif (replacement := leaf(part)) is not None:
            rebuilt[part] = replacement
        elif missing := [arg for arg in reversed(part.args) if arg not in rebuilt]:
            stack.extend(missing)
        else:
            args = tuple(rebuilt[arg] for arg in part.args)
            rebuilt[part] = part if args == part.args else ops.remake(part, args)
    return rebuilt[expr]


def substitute(expr: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """`expr` with every key of `values` replaced by its value."""
    return rebuild(expr, values.get) if values else expr


def renumbered(expr: Expr, number: Callable[[int], int]) -> Expr:
    """`expr` with the operand numbers of its loads mapped by `number`."""

    def leaf(part: Expr) -> Expr | None:
        if part.op != "load":
            return None
        return load(number(part.operand), tuple(rebuild(entry, leaf) for entry in part.args), part.kind)

    return rebuild(expr, leaf)


def is_number(expr: Expr, value: float) -> bool:
    """Whether `expr` is the constant `value` (of any kind)."""
    return expr.op == "const" and not isinstance(expr.attr, str) and expr.attr == value


def is_finite_const(expr: Expr) -> bool:
    return expr.op == "const" and math.isfinite(expr.value)
