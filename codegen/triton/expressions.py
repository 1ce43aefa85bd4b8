"""Expressions of the score language as Triton text, placed where they are computed least often.

A value depends on some coordinates and is written at the level that binds the last of them:

    BLOCK  batch coordinates, first and last row of the block: scalars
    ROW    the query row i, of shape [ROWS, 1]
    TILE   the key j, of shape [1, KEYS]; with i [ROWS, KEYS]

In the kernel of dK and dV rows and keys change places: the key is the outer coordinate, and tiles are [KEYS, ROWS].

FLOAT is float32. INT is 32 bits wide where its magnitude is provably small, else 64; offsets into memory are always
64 bits wide.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, coord, coordinates, walk
from fusion.ir.ops import apply
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import feeding_comparisons, magnitude

from .dtypes import FLOAT8, cast


class Level(enum.IntEnum):
    """Loop level at which a value is computed: once per block, per row, per tile of keys."""

    BLOCK = 0
    ROW = 1
    TILE = 2


_CALLS = {name: f"tl.{name}({{}})" for name in "abs floor ceil rsqrt exp log sin cos erf where".split()}
_CALLS |= {op: f"tl.{name}({{}})" for op, name in (
    ("sqrt", "sqrt_rn"), ("iabs", "abs"), ("imin", "minimum"), ("imax", "maximum"), ("iwhere", "where"),
)}  # fmt: skip
_CALLS |= {op: f"tl.{op}({{}}, propagate_nan=tl.PropagateNan.ALL)" for op in ("minimum", "maximum")}
_CALLS |= dict.fromkeys(("to_float", "bool_to_float"), "tl.cast({}, tl.float32)")
_CALLS |= {"to_int": "tl.cast({}, tl.int64)", "bool_to_int": "tl.cast({}, tl.int32)"}
_CALLS |= {f"round_{name}": f"({{}}).to(tl.{name}).to(tl.float32)" for name in ("bfloat16", "float16")}
"""Text of each operation, {} being its operands."""
_HELPERS = {name: name for name in "tanh sigmoid expm1 log1p atan trunc".split()}
_HELPERS |= {"round": "round_half_even", "pow": "power", "hash": "hashed"}
_SIGNS = {
    "+": ("fadd add", 5), "-": ("fsub", 5), "*": ("fmul mul", 6), "/": ("div", 6), "&": ("and", 3), "|": ("or", 1),
    "==": ("feq ieq", 0), "!=": ("fne ine", 0), "<": ("flt ilt", 0), "<=": ("fle ile", 0),
}  # fmt: skip
_INFIX = {op: (f" {sign} ", precedence) for sign, (ops, precedence) in _SIGNS.items() for op in ops.split()}
_ATOM = 9

OUTER_FIRST = coord("first of the block")
"""The outer coordinate of a block's first row (in the kernel of dK and dV its first key)."""
MOST_SLOPE = 1 << 15  # times the rows of a block that is an integer which float32 holds exactly

#: Names that the kernels' templates use for themselves.
RESERVED = frozenset(
    (
        "tl triton q k v s x w p m l i j c e acc alpha shift unit m_new key key_ok j_ok row rows_ok first start stop "
        "whole full_start full_stop rows blocks program heads group place members head block section i0 i1 row_max "
        "row_sum factor highest base shrink dead out dx dw dp do dq dk dv y delta member share log_share "
        "split splits part at beta begin key_before before_ok q_1 k_1 v_1 acc_1 c_1 e_1 k_1_at v_1_at "
        "out_1_at out_rows part_1 do_1 o_1 dq_1 dk_1 dv_1 q_at k_at v_at q_1_at dq_at dk_at dv_at dq_1_at dk_1_at "
        "dv_1_at number every meets visit_keys differentiate_keys differentiate_rows weigh_rows "
        "full_count partial_count tile_place list_at tiles_across apart dead_start dead_stop live_start missing met "
        "lost q_tiles k_tiles v_tiles do_tiles q_1_tiles k_1_tiles v_1_tiles "
        "do_1_tiles nothing daux lacked off peaked row_slope row_kept"
    ).split()
)


def number(value: float | int | bool | str | None) -> str:
    """A constant as text. Floats below float32's normal range are typed: Triton would make them float64."""
    if isinstance(value, int):
        return str(value if isinstance(value, bool) else integers.in_64_bits(value))
    assert isinstance(value, float)
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    if abs(value) > 3.4028234663852886e38:
        return f'float("{math.copysign(math.inf, value)}")'
    return repr(value) if value == 0 or abs(value) >= 1.1754943508222875e-38 else f"tl.cast({value!r}, tl.float32)"


@dataclass(slots=True)
class Writer:
    """Writes statements of values, level by level, and records the parameters, helpers and names that they use. lines:
    statements per level. limits: predicates that say which places of other coordinates exist, by their names. outer,
    inner: coordinates of the levels ROW and TILE."""

    spec: AttentionSpec
    known: dict[Expr, str] = field(default_factory=dict)  # the names (or texts) of values that exist
    lines: dict[Level, list[str]] = field(default_factory=lambda: {level: [] for level in Level})
    helpers: set[str] = field(default_factory=set)  # functions of `mathematics` in use
    names: set[str] = field(default_factory=lambda: set(RESERVED))
    uses: Counter[Expr] = field(default_factory=Counter)
    mask: str = "j_ok"  # name of the predicate that says which keys of the tile exist
    limits: dict[str, str] = field(default_factory=dict)
    outer: str = "i"
    inner: str = "j"

    def level_of(self, expr: Expr) -> Level:
        """The outermost level at which all coordinates of a value are bound."""
        names = coordinates(expr)
        arriving = {str(part.attr) for part in walk(expr) if part.op == "upstream"}
        if "row" in arriving:
            names = names | {self.outer}
        if arriving - {"row"}:
            return Level.TILE
        return Level.TILE if self.inner in names else Level.ROW if self.outer in names else Level.BLOCK

    def operand(self, index: int) -> str:
        """Name of an operand's parameters: that in the spec, numbered where two operands have the same."""
        name = self.spec.operands[index].name
        twins = [n for n, operand in enumerate(self.spec.operands) if operand.name == name]
        return name if len(twins) == 1 else f"{name}{twins.index(index)}"

    def count(self, *roots: Expr | None) -> None:
        """Count the users of every value below the roots: values with several get a name."""
        self.uses.update(arg for part in walk(*(root for root in roots if root is not None)) for arg in part.args)

    def fresh(self, hint: str) -> str:
        name, n = hint, 1
        while name in self.names or keyword.iskeyword(name):
            n += 1
            name = f"{hint}_{n}"
        self.names.add(name)
        return name

    def bind(self, expr: Expr, hint: str) -> str:
        """Value under a separate name, at its level."""
        text, level = self.value(expr), self.level_of(expr)
        return text if text.isidentifier() else self._assign(expr, text, hint, level)

    def value(self, expr: Expr) -> str:
        """The value as an expression of the level it belongs to."""
        return self._text(expr, self.level_of(expr))[0]

    def factor(self, expr: Expr) -> str:
        """The value as text that can be multiplied and divided: in brackets unless it is a single name or number."""
        text, precedence = self._text(expr, self.level_of(expr))
        return text if precedence == _ATOM else f"({text})"

    def forget(self, level: Level) -> None:
        """Begin a level again: its lines and the names bound in them are removed."""
        bound = {line.split(" = ")[0] for line in self.lines[level]}
        self.lines[level] = []
        self.known = {expr: name for expr, name in self.known.items() if name not in bound}

    def take(self, level: Level) -> list[str]:
        """Statements of a level so far, which are removed from the writer."""
        taken, self.lines[level] = self.lines[level], []
        return taken

    def apart(self, known: dict[Expr, str], **changed: Any) -> Writer:
        """Writer with separate lines, but shared names and helpers."""
        lines: dict[Level, list[str]] = {level: [] for level in Level}
        return dataclasses.replace(self, known=dict(known), lines=lines, uses=Counter(), **changed)

    def where(self, values: dict[Expr, str], mask: str | None = None, limits: dict[str, str] | None = None) -> Writer:
        """A writer into the same lines for which some coordinates have other names."""
        changed = {coordinate.name for coordinate in values}
        known = {expr: name for expr, name in self.known.items() if not coordinates(expr) & changed}
        limits = self.limits if limits is None else limits
        return dataclasses.replace(self, known=known | values, mask=mask or self.mask, limits=limits)

    def _assign(self, expr: Expr, text: str, hint: str, level: Level) -> str:
        name = self.fresh(hint)
        self.lines[level].append(f"{name} = {text}")
        self.known[expr] = name
        return name

    def _text(self, expr: Expr, level: Level) -> tuple[str, int]:
        """(text, precedence) for use at a level; values of outer levels and shared ones are given names on the way."""
        if expr in self.known:
            return self.known[expr], _ATOM
        if expr.op == "const":
            text = number(expr.attr)  # type: ignore[arg-type]
            return text, 7 if text.startswith("-") else _ATOM
        if expr.op == "size":
            return expr.name, _ATOM
        if expr.is_leaf and expr.op != "load":
            raise KeyError(f"{expr} is not bound here")
        own = self.level_of(expr)
        if expr.op == "load":
            return self._assign(expr, self._load(expr, own), self.operand(expr.operand), own), _ATOM
        text, precedence = self._operation(expr, own)
        if own < level or self.uses[expr] > 1:
            return self._assign(expr, text, _HINTS[expr.kind], own), _ATOM
        return text, precedence

    def _operation(self, expr: Expr, level: Level) -> tuple[str, int]:
        op = expr.op
        exact = op in ("div", "to_float") and expr in feeding_comparisons(*self.spec.expressions())
        args = [self._text(arg, level) for arg in expr.args]
        if op in ("add", "mul") and magnitude(expr) >= 2**31:
            args = [
                (f"tl.cast({text}, tl.int64)", _ATOM) if magnitude(arg) < 2**31 and not arg.is_const else (text, own)
                for (text, own), arg in zip(args, expr.args, strict=True)
            ]
        joined = ", ".join(text for text, _ in args)
        if op in ("detach", "detach_nan"):
            return args[0]
        if op == "div" and exact:
            return f"tl.div_rn({joined})", _ATOM
        if op in _INFIX:
            return self._infix(op, args)
        if op == "to_float" and not exact and (parts := self._converted_apart(expr.args[0])) is not None:
            return self._text(parts, level)
        if op in _CALLS:
            return _CALLS[op].format(joined), _ATOM
        if op == "pow" and (simple := _simple_power(expr.args[1], *args[0])) is not None:
            return simple
        if op == "tanh" and expr.attr == "bfloat16":
            self._helper("tanh")
            return f"{self._helper('tanh_bfloat16')}({joined}, UNIT_TANH)", _ATOM
        if op in _HELPERS:
            return f"{self._helper(_HELPERS[op])}({joined})", _ATOM
        if op in ("floordiv", "mod"):
            return self._division(expr, args)
        if op in ("neg", "not"):
            return f"{'-' if op == 'neg' else '~'}({joined})", 7
        raise NotImplementedError(op)

    def _converted_apart(self, value: Expr) -> Expr | None:
        """Float of an integer that is a sum of a part along the rows of a tile and one along its columns: each is
        converted once, not every element. The first is taken from the block's first row on, so that it is exact, as the
        other is up to 2**24; beyond, the sum is rounded twice, as far as float32 reaches there."""
        if OUTER_FIRST not in self.known or self.level_of(value) is not Level.TILE:
            return None
        outer, found = coord(self.outer), integers.terms(value)
        slope = found.get((outer,), 0)
        mixed = any(self.outer in coordinates(a) for monomial in found if monomial != (outer,) for a in monomial)
        if not slope or mixed or abs(slope) > MOST_SLOPE or magnitude(value) >= 2**31:
            return None
        from_first = integers.from_terms({(outer,): slope, (OUTER_FIRST,): -slope})
        rest = integers.sub(value, from_first)
        return apply("fadd", apply("to_float", rest), apply("to_float", from_first))

    def _infix(self, op: str, args: list[tuple[str, int]]) -> tuple[str, int]:
        sign, level = _INFIX[op]
        comparison = level == 0
        ordered = op in ("fsub", "div", "fadd", "fmul", "mul")
        shown = []
        for position, (text, own) in enumerate(args):
            bracketed = own < level or comparison and own < 4 or own == level and position and ordered
            shown.append(f"({text})" if bracketed else text)
        joined = sign.join(shown)
        return joined.replace(" + -1 * ", " - ").replace(" + -", " - ") if op == "add" else joined, level

    def _division(self, expr: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
        if integers.is_nonnegative(expr.args[0]):
            left, right = (f"({text})" if own < _ATOM else text for text, own in args)
            return f"{left} {'//' if expr.op == 'floordiv' else '%'} {right}", 6
        name = self._helper("floor_div" if expr.op == "floordiv" else "floor_mod")
        return f"{name}({args[0][0]}, {args[1][0]})", _ATOM

    def _helper(self, name: str) -> str:
        self.helpers.add(name)
        return name

    def _load(self, expr: Expr, level: Level) -> str:
        at = self.address(expr, level, self.operand(expr.operand))
        stored = self.spec.operands[expr.operand].dtype
        nothing = "0.0" if stored in FLOAT8 else "0"
        limits = [self.mask] if "j" in coordinates(expr) else []
        limits += [f"({limit})" for name, limit in self.limits.items() if name in coordinates(expr)]
        mask = f", mask={' & '.join(limits)}, other={nothing}" if limits else ""
        loaded = f"tl.load({at}{mask})"
        if expr.kind is Kind.FLOAT:
            return loaded + (cast(stored, "float32") or ".to(tl.float32)")
        held = "tl.int32" if self.spec.operands[expr.operand].torch_dtype.itemsize == 1 else "tl.int64"
        return f"{loaded} != 0" if expr.kind is Kind.BOOL else f"tl.cast({loaded}, {held})"

    def address(self, expr: Expr, level: Level, name: str) -> str:
        """Pointers to the elements that a load's index names, in the tensor of that name; outer parts are added up
        outside."""
        at = f"{name}_ptr"
        if block := self.offset(name, expr.args, Level.BLOCK):
            at = f"{at} + {block}"
        for outer, inner in ((Level.BLOCK, Level.ROW), (Level.ROW, Level.TILE)):
            if level <= outer:
                break
            if not at.isidentifier():
                at = self._named(at, f"{name}_{'block' if outer is Level.BLOCK else 'row'}", outer)
            if part := self.offset(name, expr.args, inner):
                at = f"{at} + {part}"
        return at

    def _named(self, text: str, hint: str, level: Level) -> str:
        """A text under a name at a level: the one that it has there, or a new one."""
        for line in self.lines[level]:
            if line.endswith(f" = {text}"):
                return line.removesuffix(f" = {text}")
        name = self.fresh(hint)
        self.lines[level].append(f"{name} = {text}")
        return name

    def offset(self, name: str, index: tuple[Expr, ...], level: Level) -> str:
        """Elements by which the part of an index that belongs to one level moves the pointer; empty for none."""
        parts = []
        for dim, expr in enumerate(index):
            terms = integers.terms(expr).items()
            own = integers.from_terms(
                {m: c for m, c in terms if max(map(self.level_of, m), default=Level.BLOCK) is level}
            )
            if own.op == "const" and not own.attr:
                continue
            parts.append(f"tl.cast({self._text(own, level)[0]}, tl.int64) * {name}_stride_{dim}")
        return " + ".join(parts)


_HINTS = {Kind.FLOAT: "t", Kind.INT: "n", Kind.BOOL: "live"}


def _simple_power(exponent: Expr, base: str, precedence: int) -> tuple[str, int] | None:
    """Squares and cubes of a name, roots: exact where the general power is not."""
    if exponent.op != "const":
        return None
    if exponent.attr == 0.5:
        return f"tl.sqrt_rn({base})", _ATOM
    if exponent.attr in (2.0, 3.0) and precedence == _ATOM and base.isidentifier():
        return " * ".join([base] * int(exponent.value)), 6
    return None
