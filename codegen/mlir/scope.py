"""Values of expressions inside a kernel: scalars where they are the same for all lanes, vectors along the lane
coordinate otherwise.

Scopes follow the loops: the function (sizes), one work item (batch coordinates), one group of rows (the lane
coordinate), one key. A value is written in the scope that asks for it first; `prepare` lets an outer scope write what
inner ones will need, so that nothing is computed in a loop which does not depend on it.

FLOAT is f32. BOOL is i1. INT is i64 as a scalar; as a vector i32 where its magnitude is provably small, else i64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from fusion.ir import integers
from fusion.ir.expr import Expr, J, Kind, coordinates
from fusion.ir.mask_facts import has_fill
from fusion.ir.ranges import dtype_range, interval, within_half
from fusion.ir.spec import Operand
from fusion.ir.transfer import Range
from fusion.lowering.numbers import is_ordinary, width

from .builder import Builder, Value, shape_of, vector_of
from .thread_function import Params
from .vectormath import FORMATS, VectorMath, hash_bits, widen_float8

#: MLIR's type of an element in memory; of the bits of a float8
MEMORY_TYPE = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "i8", "uint8": "i8", "int8": "i8",
    "int16": "i16", "int32": "i32", "int64": "i64", "float8_e4m3fn": "i8", "float8_e5m2": "i8",
}  # fmt: skip

CONVERSIONS = {"to_int": "arith.fptosi", "bool_to_int": "arith.extui"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The vector axis: lane l has coordinate `coord` = first + l; where first is None, the scope knows the coordinates.
    `valid` masks lanes beyond the end (vector of i1)."""

    coord: Expr
    first: Value | int | None
    valid: Value


@dataclass(slots=True, kw_only=True)
class Context:
    """State that every scope of a kernel shares. ranges: what is known of leaves; uncontracted: floats whose
    sums do not become multiply-adds, see `feeding_comparisons`."""

    b: Builder
    params: Params
    math: VectorMath
    operands: tuple[Operand, ...]
    lanes: int
    ranges: Mapping[Expr, Range] = field(default_factory=dict)
    uncontracted: Set[Expr] = frozenset()

    def strides(self, operand: int, rank: int) -> list[Value]:
        return [self.params[("stride", operand, dim)] for dim in range(rank)]


def staged_leaf(staged: Sequence[tuple[Expr, Callable[[Value], Value]]], row: Value) -> Callable[[Expr], Value | None]:
    """A `Scope.leaf` that finds loads in what has been staged of them for a tile: (load, function of the row)."""
    results: dict[Expr, Value] = {}

    def leaf(expr: Expr) -> Value | None:
        for load, read in staged:
            if load is expr:
                if expr not in results:
                    results[expr] = read(row)
                return results[expr]
        return None

    return leaf


@dataclass(slots=True, eq=False)
class Scope:
    """Bindings of coordinates and other leaves, and the values made so far; unknown leaves are looked up in the
    parent."""

    context: Context
    parent: Scope | None = None
    axis: Lanes | None = None
    known: dict[Expr, Value] = field(default_factory=dict)
    leaf: Callable[[Expr], Value | None] = lambda expr: None

    @property
    def b(self) -> Builder:
        return self.context.b

    @property
    def lanes(self) -> Lanes:
        """The vector axis, in a scope that has one."""
        assert self.axis is not None
        return self.axis

    def inner(
        self,
        known: dict[Expr, Value] | None = None,
        lanes: Lanes | None = None,
        leaf: Callable[[Expr], Value | None] = lambda expr: None,
    ) -> Scope:
        """A scope in this one."""
        return Scope(self.context, self, lanes or self.axis, {} if known is None else known, leaf)

    def along(self, coord: Expr, first: Value, count: Value, known: dict[Expr, Value] | None = None) -> Scope:
        """A scope in this one whose lanes have the coordinates from `first` on, of which there are `count`."""
        valid = self.b.first_lanes(count, self.context.lanes)
        return self.inner(known, Lanes(coord=coord, first=first, valid=valid))

    def prepare(self, *exprs: Expr | None, bound: frozenset[str]) -> None:
        """Write here whatever below the expressions depends on nothing but the coordinates `bound`."""
        seen: set[Expr] = set()

        def visit(expr: Expr) -> None:
            if expr in seen or expr.op == "const":
                return
            seen.add(expr)
            if expr.op in ("row_max", "row_sum"):
                return
            if coordinates(expr) <= bound:
                self.value(expr)
                return
            for arg in expr.args:
                visit(arg)

        for expr in exprs:
            if expr is not None:
                visit(expr)

    def value(self, expr: Expr) -> Value:
        """The value: a scalar, or a vector where it depends on the lane coordinate."""
        scope: Scope | None = self
        while scope is not None:
            if expr in scope.known:
                return scope.known[expr]
            if (result := scope.leaf(expr)) is not None:
                return result
            scope = scope.parent
        made = self._make(expr)
        self.known[expr] = made
        return made

    def vector(self, expr: Expr) -> Value:
        """The value as a vector, broadcast where it is the same for all lanes."""
        return self.b.in_all_lanes(self.value(expr), self.context.lanes)

    def integer(self, value: int | Expr) -> Value | int:
        """A scalar integer expression; constants as Python integers."""
        if isinstance(value, int):
            return value
        return value.integer if value.op == "const" else self.value(value)

    def offset(self, index: Sequence[Expr], strides: Sequence[Value], start: Value | int = 0) -> Value | int:
        """Sum of an offset and that of the element at scalar indices, in elements of memory."""
        offset = start
        for part, stride in zip(index, strides, strict=True):
            offset = self.b.add(offset, self.b.mul(self.integer(part), stride))
        return offset

    def varies(self, expr: Expr) -> bool:
        """Whether the value is a vector."""
        return self.axis is not None and self.axis.coord.name in coordinates(expr)

    def _make(self, expr: Expr) -> Value:
        if expr.op == "const":
            type_ = {Kind.FLOAT: "f32", Kind.INT: "i64", Kind.BOOL: "i1"}[expr.kind]
            return self.b.constant(expr.attr, type_)  # type: ignore[arg-type]
        if expr.op == "size":
            return self.context.params[("size", expr.name)]
        if expr.op == "load":
            return self._load(expr)
        if expr.kind is Kind.INT:
            return self._integer(expr)
        if expr.op in ("ilt", "ile", "ieq", "ine"):
            return self._compare_integers(expr)
        return self._float_or_bool(expr)

    def _same_shape(self, args: list[Value]) -> list[Value]:
        """Broadcast scalars where any argument is a vector; widen integer vectors where any is wide."""
        lanes = max(shape_of(a.type)[0] for a in args)
        if lanes:
            args = [self.b.in_all_lanes(a, lanes) for a in args]
        if any(a.type == vector_of("i64", lanes) for a in args):
            args = [self.b.convert("arith.extsi", a, "i64") if a.type == vector_of("i32", lanes) else a for a in args]
        return args

    def _float_or_bool(self, expr: Expr) -> Value:
        b = self.b
        if (fused := self._fused(expr)) is not None:
            return fused
        args = [self.value(arg) for arg in expr.args]
        if expr.op == "to_float":
            return b.convert("arith.sitofp", args[0], "f32")
        if expr.op == "bool_to_float":
            lanes = shape_of(args[0].type)[0]
            one, zero = (b.constant(v, vector_of("f32", lanes)) for v in (1.0, 0.0))
            return b.select(args[0], one, zero)
        if expr.op == "where":
            condition, *branches = args
            if any(shape_of(a.type)[0] for a in args):
                branches = [b.in_all_lanes(a, self.context.lanes) for a in branches]
            return b.select(condition, *branches)
        args = self._same_shape(args)
        if expr.op == "log" and is_ordinary(expr.args[0], self.context.ranges):
            return self.context.math.log(args[0], ordinary=True)
        if len(args) == 1 and expr.kind is Kind.FLOAT:
            return self.context.math.unary(expr.op)(args[0])
        return self._simple(expr.op, args)

    def _fused(self, expr: Expr) -> Value | None:
        """a * b + c as one operation. Rounds once where eager rounds twice; the same for infinities and NaN. Not of
        fills: of a product that lies between two numbers, c would choose, and a unit of rounding there decides rows."""
        if expr.op != "fadd" or expr in self.context.uncontracted:
            return None
        for product, rest in (expr.args, expr.args[::-1]):
            plain = product.op == "fmul" and not has_fill(product)
            if plain and self.varies(product) and product not in self.known:
                return self.b.fma(*(self.value(e) for e in (*product.args, rest)))
        return None

    def _simple(self, op: str, args: list[Value]) -> Value:
        b = self.b
        arithmetic = {"fadd": "arith.addf", "fsub": "arith.subf", "fmul": "arith.mulf", "div": "arith.divf",
                      "minimum": "arith.minimumf", "maximum": "arith.maximumf", "pow": "math.powf",
                      "and": "arith.andi", "or": "arith.ori"}  # fmt: skip
        if op in arithmetic:
            return b.binary(arithmetic[op], *args, hint=op)
        if op in ("feq", "fne", "flt", "fle"):
            return b.compare({"feq": "oeq", "fne": "une", "flt": "olt", "fle": "ole"}[op], *args)
        if op == "not":
            return b.negated(args[0])
        raise NotImplementedError(op)

    def affine(self, expr: Expr) -> tuple[Value | int, int] | None:
        """(value in lane 0, constant step per lane) of an INT expression, or None where it is not of that form."""
        if not self.varies(expr):
            return self.integer(expr), 0
        parts, first = integers.linear(expr, self.lanes.coord), self.lanes.first
        if first is None or parts is None or parts[0].op != "const" or self.varies(parts[1]):
            return None
        step = parts[0].integer
        return self.b.add(self.integer(parts[1]), self.b.mul(first, step)), step

    def _integer(self, expr: Expr) -> Value:
        b = self.b
        if not self.varies(expr):
            return self._scalar_integer(expr)
        scalar = "i32" if width(expr) < 2**31 else "i64"
        type_ = vector_of(scalar, self.context.lanes)
        if (form := self.affine(expr)) is not None:
            base = b.as_value(form[0], "i64")
            if scalar == "i32":
                base = b.convert("arith.trunci", base, "i32", "base")
            steps = b.dense([form[1] * lane for lane in range(self.context.lanes)], type_, "lane_steps")
            return b.add(b.broadcast(base, self.context.lanes), steps)
        if expr.op in CONVERSIONS:
            return b.convert(CONVERSIONS[expr.op], self.value(expr.args[0]), "i64" if expr.op == "to_int" else "i32")
        values = [self._lane_integer(arg, scalar) for arg in expr.args if arg.kind is Kind.INT]
        if expr.op == "iwhere":
            return b.select(self.vector(expr.args[0]), *values)
        return self.integer_operation(expr.op, values)

    def _lane_integer(self, expr: Expr, scalar: str) -> Value:
        """Integer as a vector of this element type. Narrowing is only asked for where the result is small, and what a
        quotient or remainder is of; wrapping is then harmless."""
        return self.b.convert("arith.extsi" if scalar == "i64" else "arith.trunci", self.vector(expr), scalar)

    def integer_operation(self, op: str, values: list[Value]) -> Value:
        b = self.b
        if op in ("add", "mul"):
            total = values[0]
            for value in values[1:]:
                total = b.add(total, value) if op == "add" else b.mul(total, value)
            return total
        if op == "hash":
            return hash_bits(b, *values)
        if op == "iabs":
            return b.unary("math.absi", values[0], "abs")
        if op == "mod":
            quotient = b.binary("arith.floordivsi", *values)
            return b.sub(values[0], b.mul(quotient, values[1]), "mod")
        return b.binary(
            {"floordiv": "arith.floordivsi", "imin": "arith.minsi", "imax": "arith.maxsi"}[op], *values, hint=op
        )

    def _scalar_integer(self, expr: Expr) -> Value:
        b = self.b
        if expr.op == "coord":
            raise KeyError(f"coordinate {expr} is not bound here")
        if expr.op in CONVERSIONS:
            return b.convert(CONVERSIONS[expr.op], self.value(expr.args[0]), "i64")
        if expr.op == "iwhere":
            return b.select(*(self.value(arg) for arg in expr.args))
        values = [self.value(arg) for arg in expr.args]
        if expr.op == "hash":
            return b.convert("arith.extui", hash_bits(b, *(b.convert("arith.trunci", v, "i32") for v in values)), "i64")
        if expr.op in ("floordiv", "mod") and integers.is_nonnegative(expr.args[0]):
            return b.div(*values) if expr.op == "floordiv" else b.rem(*values)
        return self.integer_operation(expr.op, values)

    def _compare_integers(self, expr: Expr) -> Value:
        """Comparison. Of affine values that do not wrap around: step * lane against a scalar bound, in 32 bits."""
        b, lanes = self.b, self.context.lanes
        predicate = {"ilt": "slt", "ile": "sle", "ieq": "eq", "ine": "ne"}[expr.op]
        tame = [self._is_tame(arg) for arg in expr.args]
        usable = self.varies(expr) and all(ok or not self.varies(arg) for ok, arg in zip(tame, expr.args, strict=True))
        forms = [self.affine(arg) for arg in expr.args] if usable else [None]
        if all(forms):
            (a, step_a), (c, step_c) = forms  # type: ignore[misc]
            # A scalar that is clamped stays on its side of all values in lanes.
            a, c = (x if ok else self._clamped(x, 1 << 62) for x, ok in zip((a, c), tame, strict=True))
            steps = [(step_a - step_c) * lane for lane in range(lanes)]
            if not any(steps):
                return b.broadcast(b.compare(predicate, b.as_value(a, "i64"), b.as_value(c, "i64")), lanes)
            if max(map(abs, steps)) < 1 << 30:
                limit = b.as_value(self._clamped(b.sub(c, a), 1 << 30), "i64")
                limit = b.convert("arith.trunci", limit, "i32", "limit")
                return b.compare(
                    predicate, b.dense(steps, vector_of("i32", lanes), "lane_steps"), b.broadcast(limit, lanes)
                )
        return b.compare(predicate, *self._same_shape([self.value(arg) for arg in expr.args]))

    def _is_tame(self, expr: Expr) -> bool:
        """Whether an integer is so far from the ends of 64 bits that differences of two of them do not wrap around."""
        of_load = lambda load: dtype_range(self.context.operands[load.operand].dtype)
        return within_half(interval(expr, {}, of_load))

    def _clamped(self, value: Value | int, limit: int) -> Value | int:
        """A scalar integer, or the nearest one of at most this magnitude."""
        return self.b.least(self.b.most(value, -limit), limit)

    def _load(self, expr: Expr) -> Value:
        number = expr.operand
        memory = MEMORY_TYPE[self.context.operands[number].dtype]
        pointer = self.context.params[("ptr", number)]
        strides = self.context.strides(number, len(expr.args))
        if not self.varies(expr):
            element = self.b.load(self.b.at(pointer, self.offset(expr.args, strides), memory), memory, f"t{number}")
            return widen(self.b, element, expr.kind, self.context.operands[number].dtype)
        return self._gather(expr, pointer, strides, memory)

    def _gather(self, expr: Expr, pointer: Value, strides: list[Value], memory: str) -> Value:
        """One element per lane, at offsets that are vectors; lanes beyond the end read nothing."""
        b, lanes = self.b, self.context.lanes
        total: Value | None = None
        scalar: Value | int = 0
        for index, stride in zip(expr.args, strides, strict=True):
            if not self.varies(index):
                scalar = b.add(scalar, b.mul(self.integer(index), stride))
                continue
            part = b.mul(self._lane_integer(index, "i64"), b.broadcast(stride, lanes))
            total = part if total is None else b.add(total, part)
        assert total is not None
        base, type_, valid = b.at(pointer, scalar, memory), vector_of(memory, lanes), self.lanes.valid
        addresses = b.addresses(base, total, memory)
        if (first := self._first_of_run(expr.args)) is None:
            result = b.gather(addresses, valid, type_)
        else:
            line, adjacent = b.at(base, first[0], memory), b.compare("eq", strides[first[1]], 1)
            adjacent = b.and_(adjacent, b.reduce("and", valid, "whole"), "adjacent")
            result = b.either(adjacent, lambda: b.load(line, type_), lambda: b.gather(addresses, valid, type_), type_)
        return widen(b, result, expr.kind, self.context.operands[expr.operand].dtype)

    def _first_of_run(self, index: Sequence[Expr]) -> tuple[Value | int, int] | None:
        """(index in lane 0, dimension) where lanes are keys and read elements that follow each other along a dimension,
        in memory too if its stride is 1. A gather then takes 5 to 100 times as long, the longest for small elements."""
        varying = [dim for dim, part in enumerate(index) if self.varies(part)]
        form = self.affine(index[varying[0]]) if len(varying) == 1 and self.lanes.coord is J else None
        return None if form is None or form[1] != 1 else (form[0], varying[0])


def widen(b: Builder, value: Value, kind: Kind, dtype: str) -> Value:
    """From the type in memory of an operand of this dtype to the type in the kernel."""
    lanes, scalar = shape_of(value.type)
    if kind is Kind.BOOL:
        return b.compare("ne", value, b.constant(0, value.type))
    extend = "arith.extui" if dtype == "uint8" else "arith.extsi"
    if kind is Kind.INT:
        return value if scalar == "i64" else b.convert(extend, value, "i64")
    if dtype in ("int8", "uint8"):
        return b.convert("arith.sitofp", b.convert(extend, value, "i32"), "f32")
    if dtype in FORMATS:
        return widen_float8(b, value, dtype)
    if scalar == "f64":
        return b.convert("arith.truncf", value, "f32")
    return value if scalar == "f32" else b.convert("arith.extf", value, "f32")
