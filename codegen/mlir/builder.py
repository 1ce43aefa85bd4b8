"""A small writer of MLIR text: values that know their type, loops and branches as `with` blocks, constants collected
once.

Kernels are written in the `arith`, `math`, `vector` and `scf` dialects, with memory reached through `llvm.ptr`: one
notion of address serves tensors of any strides and scratch areas alike. A method of `Builder` appends one operation and
returns its result. Integers stay Python's as long as they can: arithmetic between them is done here, and they become
`arith.constant` where an operation needs them. So sums and products are of type `Any`: Python integers, or values.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .values import PTR, SIZE, Operand, Value, interleave, is_float, literal, shape_of, vector_of

T = TypeVar("T")


def _is(x: Operand, number: int) -> bool:
    """Whether an operand is this Python integer."""
    return isinstance(x, int) and x == number


class Loop:
    """Handle of an `scf.for` with carried values: call `yields` at the end of the body, read `results` after it."""

    def __init__(self) -> None:
        self.results: list[Value] = []
        self.yielded: Sequence[Value] | None = None

    def yields(self, *values: Value) -> None:
        self.yielded = values


class Builder:
    """Collects the body of one function. `text()` gives it with its constants in front."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._constants: dict[tuple[str, str], Value] = {}
        self._used: dict[str, int] = {}
        self._depth = 1
        self._entry: list[str] = []

    def name(self, hint: str) -> str:
        """A fresh SSA name made from the hint; a number follows only where the hint is taken."""
        count = self._used.get(hint, 0)
        self._used[hint] = count + 1
        return f"%{hint}" if count == 0 else f"%{hint}_{count}"

    def line(self, text: str) -> None:
        self._lines.append("  " * self._depth + text)

    def side_by_side(self, parts: Sequence[Callable[[], T]]) -> list[T]:
        """Results of the parts. Their lines are written in turns, as far as none uses what is not there yet: several
        chains of dependent instructions keep a processor busy. Parts with nested regions stay one after the other."""
        start, streams, results = len(self._lines), [], []
        for part in parts:
            results.append(part())
            streams.append(self._lines[start:])
            del self._lines[start:]
        self._lines += interleave(streams)
        return results

    def text(self) -> str:
        constants = [
            f"  {v} = arith.constant {text}" + ("" if v.type == "i1" else f" : {v.type}")
            for (text, _), v in self._constants.items()
        ]
        return "\n".join(constants + self._entry + self._lines)

    @contextlib.contextmanager
    def at_entry(self) -> Iterator[None]:
        """Move the lines of the with block to the start of the function, where it is visible everywhere."""
        lines, depth = self._lines, self._depth
        self._lines, self._depth = self._entry, 1
        yield
        self._lines, self._depth = lines, depth

    def constant(self, value: float, type_: str) -> Value:
        lanes, scalar = shape_of(type_)
        text = f"dense<{literal(value, scalar)}>" if lanes else literal(value, scalar)
        if (result := self._constants.get((text, type_))) is None:
            plain = "".join(c if c.isalnum() else "_" for c in f"{value:g}".replace("-", "m").replace("+", ""))
            result = Value(self.name(f"c{plain}_{'v' if lanes else ''}{scalar}"), type_)
            self._constants[(text, type_)] = result
        return result

    def dense(self, values: Sequence[float], type_: str, hint: str) -> Value:
        """A vector constant with these elements."""
        scalar = shape_of(type_)[1]
        text = f"dense<[{', '.join(literal(v, scalar) for v in values)}]>"
        if (result := self._constants.get((text, type_))) is None:
            result = self._constants[(text, type_)] = Value(self.name(hint), type_)
        return result

    def op(self, text: str, type_: str, hint: str = "t") -> Value:
        """Append `%hint = text` and return the result."""
        result = Value(self.name(hint), type_)
        self.line(f"{result} = {text}")
        return result

    def as_value(self, x: Operand, type_: str) -> Value:
        """x as a value of this type: constants are made, scalars are broadcast to vectors."""
        if not isinstance(x, Value):
            return self.constant(x, type_)
        if x.type != type_ and type_.startswith("vector") and not x.type.startswith("vector"):
            return self.broadcast(x, shape_of(type_)[0])
        return x

    def _alike(self, *operands: Operand) -> list[Value]:
        """The operands as values of one type: a vector's where one is a vector."""
        types = [x.type for x in operands if isinstance(x, Value)]
        type_ = next((t for t in types if t.startswith("vector")), types[0] if types else "i64")
        return [self.as_value(x, type_) for x in operands]

    def _arithmetic(
        self, known: Callable[[int, int], int], float_op: str, int_op: str, x: Operand, y: Operand, hint: str
    ) -> Any:
        """known: what is done at once with two Python integers."""
        if isinstance(x, int) and isinstance(y, int):
            return known(x, y)
        a, b = self._alike(x, y)
        return self.op(f"arith.{float_op if is_float(a.type) else int_op} {a}, {b} : {a.type}", a.type, hint)

    def add(self, x: Operand, y: Operand, hint: str = "add") -> Any:
        if _is(x, 0) or _is(y, 0):
            return y if _is(x, 0) else x
        return self._arithmetic(operator.add, "addf", "addi", x, y, hint)

    def sub(self, x: Operand, y: Operand, hint: str = "sub") -> Any:
        return x if _is(y, 0) else self._arithmetic(operator.sub, "subf", "subi", x, y, hint)

    def mul(self, x: Operand, y: Operand, hint: str = "mul") -> Any:
        if isinstance(x, int):
            x, y = y, x
        if _is(y, 0) or _is(y, 1):
            return x if _is(y, 1) else 0
        return self._arithmetic(operator.mul, "mulf", "muli", x, y, hint)

    def div(self, x: Operand, y: Operand, hint: str = "div") -> Any:
        """Quotient of floats; of integers that are not negative (sizes and indices)."""
        return x if _is(y, 1) else self._arithmetic(operator.floordiv, "divf", "divui", x, y, hint)

    def rem(self, x: Operand, y: Operand, hint: str = "rem") -> Any:
        return 0 if _is(y, 1) else self._arithmetic(operator.mod, "remf", "remui", x, y, hint)

    def ceil_div(self, x: Operand, y: int, hint: str = "div") -> Any:
        """Quotient x / y rounded up, for an x that is not negative."""
        return self.div(self.add(x, y - 1), y, hint)

    def floor_to(self, x: Operand, step: Operand, hint: str = "mul") -> Any:
        """The largest multiple of `step` up to x, which is not negative."""
        return self.mul(self.div(x, step), step, hint)

    def least(self, x: Operand, y: Operand, hint: str = "min") -> Any:
        return self._arithmetic(min, "minnumf", "minsi", x, y, hint)

    def most(self, x: Operand, y: Operand, hint: str = "max") -> Any:
        return self._arithmetic(max, "maxnumf", "maxsi", x, y, hint)

    def binary(self, op: str, x: Operand, y: Operand, hint: str = "t") -> Value:
        """Any two-operand operation of one type, by its full name: `binary("arith.andi", a, b)`."""
        a, b = self._alike(x, y)
        return self.op(f"{op} {a}, {b} : {a.type}", a.type, hint)

    def and_(self, x: Operand, y: Operand, hint: str = "t") -> Value:
        return self.binary("arith.andi", x, y, hint)

    def or_(self, x: Operand, y: Operand, hint: str = "t") -> Value:
        return self.binary("arith.ori", x, y, hint)

    def negated(self, condition: Value, hint: str = "t") -> Value:
        ones = -1 if shape_of(condition.type)[0] else 1
        return self.binary("arith.xori", condition, self.constant(ones, condition.type), hint)

    def unary(self, op: str, x: Value, hint: str = "t") -> Value:
        return self.op(f"{op} {x} : {x.type}", x.type, hint)

    def fma(self, x: Operand, y: Operand, z: Operand, hint: str = "fma") -> Value:
        a, b, c = self._alike(x, y, z)
        return self.op(f"math.fma {a}, {b}, {c} : {a.type}", a.type, hint)

    def compare(self, predicate: str, x: Operand, y: Operand, hint: str = "is") -> Value:
        """`predicate` as arith names it: slt, eq, ... for integers, olt, une, ... for floats."""
        a, b = self._alike(x, y)
        lanes, _ = shape_of(a.type)
        kind = "cmpf" if is_float(a.type) else "cmpi"
        return self.op(f"arith.{kind} {predicate}, {a}, {b} : {a.type}", vector_of("i1", lanes), hint)

    def select(self, condition: Value, x: Operand, y: Operand, hint: str = "sel") -> Value:
        a, b = self._alike(x, y)
        lanes = shape_of(condition.type)[0]
        if lanes:
            a, b = self.in_all_lanes(a, lanes), self.in_all_lanes(b, lanes)
        types = f"{condition.type}, {a.type}" if lanes else a.type
        return self.op(f"arith.select {condition}, {a}, {b} : {types}", a.type, hint)

    def convert(self, op: str, x: Value, scalar: str, hint: str = "cvt") -> Value:
        """A conversion of element type: `convert("arith.extf", x, "f32")`."""
        type_ = vector_of(scalar, shape_of(x.type)[0])
        return x if type_ == x.type else self.op(f"{op} {x} : {x.type} to {type_}", type_, hint)

    def reduce(self, kind: str, x: Value, hint: str) -> Value:
        """All lanes of a vector as one scalar: `reduce("add", x, "sum")`."""
        scalar = shape_of(x.type)[1]
        return self.op(f"vector.reduction <{kind}>, {x} : {x.type} into {scalar}", scalar, hint)

    def extract(self, x: Value, lane: int, hint: str = "t") -> Value:
        scalar = shape_of(x.type)[1]
        return self.op(f"vector.extract {x}[{lane}] : {scalar} from {x.type}", scalar, hint)

    def first_lanes(self, count: Operand, lanes: int) -> Value:
        """The mask of the first `count` of so many lanes."""
        limit = self.convert("arith.trunci", self.least(count, lanes), "i32", "limit")
        order = self.dense(range(lanes), vector_of("i32", lanes), "lane")
        return self.compare("slt", order, self.broadcast(limit, lanes), "valid")

    def bitcast(self, x: Value, type_: str, hint: str = "bits") -> Value:
        """Bits of a value as another type; the number of lanes may change."""
        if x.type == type_:
            return x
        op = "arith.bitcast" if shape_of(x.type)[0] == shape_of(type_)[0] else "vector.bitcast"
        return self.op(f"{op} {x} : {x.type} to {type_}", type_, hint)

    def broadcast(self, x: Value, lanes: int, hint: str | None = None) -> Value:
        type_ = vector_of(x.type, lanes)
        return self.op(f"vector.broadcast {x} : {x.type} to {type_}", type_, hint or f"{x.name[1:]}_all")

    def in_all_lanes(self, x: Value, lanes: int) -> Value:
        """A vector as it is, a scalar in every lane."""
        return x if shape_of(x.type)[0] else self.broadcast(x, lanes)

    def shuffle(self, x: Value, y: Value, pattern: Sequence[int], hint: str = "shuf") -> Value:
        type_ = vector_of(shape_of(x.type)[1], len(pattern))
        return self.op(f"vector.shuffle {x}, {y} [{', '.join(map(str, pattern))}] : {x.type}, {y.type}", type_, hint)

    def intrinsic(self, name: str, *operands: Value, type_: str | None = None, hint: str = "t") -> Any:
        types = ", ".join(o.type for o in operands)
        call = f'llvm.call_intrinsic "llvm.{name}"({", ".join(map(str, operands))}) : ({types}) -> {type_ or "()"}'
        return self.op(call, type_, hint) if type_ else self.line(call)

    def at(self, base: Value, offset: Operand, scalar: str, hint: str = "p") -> Value:
        """The address `offset` elements of type `scalar` after base."""
        if isinstance(offset, int) and offset == 0:
            return base
        types = f"{PTR}, {offset.type}" if isinstance(offset, Value) else PTR
        return self.op(f"llvm.getelementptr {base}[{offset}] : ({types}) -> {PTR}, {scalar}", PTR, hint)

    def row(self, base: Value, number: Operand, size: Operand, scalar: str = "f32", hint: str = "p") -> Value:
        """The address of part `number` of those of `size` elements that lie behind each other."""
        return self.at(base, self.mul(number, size), scalar, hint)

    def addresses(self, base: Value, offsets: Value, scalar: str) -> Value:
        """A vector of addresses, `offsets` elements of type `scalar` after base."""
        type_ = vector_of(PTR, shape_of(offsets.type)[0])
        types = f"({PTR}, {offsets.type}) -> {type_}, {scalar}"
        return self.op(f"llvm.getelementptr {base}[{offsets}] : {types}", type_, "at")

    def load(self, address: Value, type_: str, hint: str = "v", align: int | None = None) -> Value:
        align = align or SIZE[shape_of(type_)[1]]
        return self.op(f"llvm.load {address} {{alignment = {align} : i64}} : {PTR} -> {type_}", type_, hint)

    def store(self, value: Value, address: Value, align: int | None = None) -> None:
        align = align or SIZE[shape_of(value.type)[1]]
        self.line(f"llvm.store {value}, {address} {{alignment = {align} : i64}} : {value.type}, {PTR}")

    def masked_load(self, address: Value, mask: Value, type_: str, hint: str = "v") -> Value:
        """A vector from memory; lanes beside the mask are not read, and zero."""
        return self._masked("load", address, mask, type_, hint)

    def gather(self, addresses: Value, mask: Value, type_: str) -> Value:
        """One element per lane, from a vector of addresses; lanes beside the mask are not read, and zero."""
        return self._masked("gather", addresses, mask, type_, "gathered")

    def _masked(self, read: str, address: Value, mask: Value, type_: str, hint: str) -> Value:
        """bfloat16 moves as integers: without such instructions LLVM calls a function that this process lacks."""
        moved = type_.replace("bf16", "i16")
        text = f"{address}, {mask}, {self.constant(0, moved)} {{alignment = {SIZE[shape_of(moved)[1]]} : i32}}"
        types = f"({address.type}, {mask.type}, {moved}) -> {moved}"
        result = self.op(f"llvm.intr.masked.{read} {text} : {types}", moved, hint)
        return result if moved == type_ else self.bitcast(result, type_, hint)

    def masked_store(self, value: Value, address: Value, mask: Value) -> None:
        """The lanes of a vector that the mask holds."""
        align, types = SIZE[shape_of(value.type)[1]], f"{value.type}, {mask.type} into {PTR}"
        self.line(f"llvm.intr.masked.store {value}, {address}, {mask} {{alignment = {align} : i32}} : {types}")

    def prefetch(self, address: Value, write: bool = False) -> None:
        """Ask for a cache line, in the second level, that will be read or written soon."""
        fields = f"<{{cache = 1 : i32, hint = 2 : i32, rw = {int(write)} : i32}}>"
        self.line(f'"llvm.intr.prefetch"({address}) {fields} : ({PTR}) -> ()')

    @contextlib.contextmanager
    def _body(self, opening: str, closing: str = "}") -> Iterator[None]:
        self.line(opening)
        self._depth += 1
        yield
        self._depth -= 1
        self.line(closing)

    def _for(self, low: Operand, high: Operand, step: Operand, hint: str) -> tuple[Value, str]:
        """A loop's index, and its text as far as the bounds."""
        index = Value(self.name(hint), "i64")
        lo, hi, st = (self.as_value(x, "i64") for x in (low, high, step))
        return index, f"scf.for {index} = {lo} to {hi} step {st}"

    @contextlib.contextmanager
    def loop(self, low: Operand, high: Operand, step: Operand = 1, hint: str = "i") -> Iterator[Value]:
        """`for index in range(low, high, step)`; the body is the with block."""
        index, head = self._for(low, high, step, hint)
        with self._body(f"{head} : i64 {{"):
            yield index

    def fill(self, base: Value, count: Operand, value: Value, start: Operand = 0, hint: str = "at") -> None:
        """A vector to each of the places start..count-1 of its size from base on."""
        lanes, scalar = shape_of(value.type)
        with self.loop(start, count, hint=hint) as at:
            self.store(value, self.row(base, at, lanes, scalar))

    def update(
        self, base: Value, count: Operand, change: Callable[..., Value], type_: str, *others: Value, hint: str = "e"
    ) -> None:
        """`count` elements from base on, a vector at a time: what `change` makes of it, and of those of the others."""
        lanes, scalar = shape_of(type_)
        with self.loop(0, count, lanes, hint=hint) as at:
            places = [self.at(place, at, scalar) for place in (base, *others)]
            self.store(change(*(self.load(place, type_, "x") for place in places)), places[0])

    def move_sums(self, source: Value, target: Value, count: Operand, type_: str) -> None:
        """Add `count` vectors to others, and clear them."""
        lanes, scalar = shape_of(type_)
        with self.loop(0, count, hint="at") as at:
            places = [self.row(place, at, lanes, scalar) for place in (source, target)]
            self.store(self.add(*(self.load(place, type_, "o") for place in places)), places[1])
            self.store(self.constant(0.0, type_), places[0])

    def any(self, count: Operand, step: int, holds: Callable[[Value], Value], hint: str) -> Value:
        """Whether `holds(n)` (i1) for one of the numbers below `count`; all are tried."""
        with self.carry(0, count, step, [self.constant(0, "i1")], hint=hint) as (loop, number, (before,)):
            loop.yields(self.or_(before, holds(number)))
        return loop.results[0]

    @contextlib.contextmanager
    def carry(self, low: Operand, high: Operand, step: Operand, initial: Sequence[Value], hint: str = "i"):
        """A loop that carries values: yields (handle, index, values); the body ends with `handle.yields(...)`."""
        handle = Loop()
        index, head = self._for(low, high, step, hint)
        inner = [Value(self.name(f"{hint}_c"), v.type) for v in initial]
        result, types = self.name(f"{hint}_r"), ", ".join(v.type for v in initial)
        inits = ", ".join(f"{a} = {b}" for a, b in zip(inner, initial, strict=True))
        many = f":{len(inner)}" if len(inner) > 1 else ""
        carried = f"{result}{many} = {head} iter_args({inits}) -> ({types})" if inner else head
        with self._body(f"{carried} : i64 {{"):
            yield handle, index, inner
            assert handle.yielded is not None, "a carrying loop must yield"
            if inner:
                self.line(f"scf.yield {', '.join(map(str, handle.yielded))} : {types}")
        names = [f"{result}#{k}" for k in range(len(inner))] if many else [result] * len(inner)
        handle.results = [Value(n, v.type) for n, v in zip(names, initial, strict=True)]

    @contextlib.contextmanager
    def taking(self, take: Callable[[], Value], count: Value, hint: str = "i") -> Iterator[Value]:
        """A loop over what `take()` returns before each turn, which ends with the first that is not below `count`."""
        taken = Value(self.name(hint), "i64")
        with self._body("scf.while : () -> i64 {", "} do {"):
            number = take()
            self.line(f"scf.condition({self.compare('slt', number, count)}) {number} : i64")
        with self._body(f"^bb0({taken}: i64):"):
            yield taken
            self.line("scf.yield")

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The with block runs only where the condition (i1) holds."""
        with self._body(f"scf.if {condition} {{"):
            yield

    @contextlib.contextmanager
    def otherwise(self) -> Iterator[None]:
        """The else part; must follow a `when` directly."""
        assert self._lines[-1].strip() == "}", "otherwise must follow a when block"
        self._lines.pop()
        with self._body("} else {"):
            yield

    def either(self, condition: Value, then: Callable[[], Value], otherwise: Callable[[], Value], type_: str) -> Value:
        """Result of `then` where the condition (i1) holds, else of `otherwise`."""
        result = Value(self.name("either"), type_)
        with self._body(f"{result} = scf.if {condition} -> ({type_}) {{"):
            self.line(f"scf.yield {then()} : {type_}")
        with self.otherwise():
            self.line(f"scf.yield {otherwise()} : {type_}")
        return result
