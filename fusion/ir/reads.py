"""Loads of a score program: their dependence on row and key (on their distance alone, or as tensors with an element for
each pair), and the bytes that they read, less than one per element where elements are packed. Index maps of Q, K and V:
the coordinates that distinguish their elements, the steps between elements, and the number of values of a coordinate
that share one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.ir import integers
from fusion.ir.expr import C, E, Expr, I, J, Kind, const, coord, coordinates, load, loads, substitute, walk
from fusion.ir.ops import evaluate
from fusion.ir.primitives import cost
from fusion.ir.results import size_value
from fusion.ir.spec import AttentionSpec

_WORTH = 4
"""Operations that are worth a table where none of them costs more than an instruction."""
_SHIFT = coord("shift")
_COMPARISONS = ("ilt", "ile", "ieq", "ine")


def distance_parts(*programs: Expr | None) -> list[Expr]:
    """Largest subexpressions (FLOAT or BOOL) that depend on i - j and batch coordinates only, and are worth a table."""
    parts: dict[Expr, None] = {}
    seen: set[Expr] = set()

    def visit(expr: Expr) -> None:
        if expr in seen:
            return
        seen.add(expr)
        if {"i", "j"} <= coordinates(expr) and expr.kind is not Kind.INT and _is_worth(expr) and is_shift_free(expr):
            parts[expr] = None
            return
        for arg in expr.args:
            visit(arg)

    for program in programs:
        if program is not None:
            visit(program)
    return list(parts)


def _is_worth(expr: Expr) -> bool:
    operations = [part for part in walk(expr) if part.args and {"i", "j"} & coordinates(part)]
    if any(part.op == "load" or cost(part.op) for part in operations):
        return True
    return len(operations) >= _WORTH and expr.kind is not Kind.BOOL


@functools.lru_cache(maxsize=4096)
def is_shift_free(expr: Expr) -> bool:
    """Whether the value stays the same when row and key are moved by the same amount."""
    if not {"i", "j"} & coordinates(expr):
        return True
    if expr.op in ("score", "row_max", "row_sum"):
        return False
    if expr.op in _COMPARISONS:
        return is_shift_free(integers.sub(*expr.args))
    if expr.op in ("add", "mul", "coord"):
        return _is_polynomial_shift_free(expr)
    return all(map(is_shift_free, expr.args))


def _is_polynomial_shift_free(expr: Expr) -> bool:
    moved = integers.integer(0)
    for monomial, coefficient in integers.terms(expr).items():
        term = integers.integer(coefficient)
        for atom in monomial:
            if atom not in (I, J) and not is_shift_free(atom):
                return False
            term = integers.mul(term, integers.add(atom, _SHIFT) if atom in (I, J) else atom)
        moved = integers.add(moved, term)
    return moved is expr


def dense_loads(
    *programs: Expr | None, but: Sequence[Expr] = (), kinds: Sequence[Kind] = (Kind.FLOAT, Kind.BOOL)
) -> list[Expr]:
    """Loads at indices linear in row and key, without those that only `but` contains. kinds: of what is loaded;
    integers are gathered."""
    leaves = {part: load(-1 - number, (), part.kind) for number, part in enumerate(but)}  # which depend on nothing
    result = {e: None for p in programs if p is not None for e in loads(substitute(p, leaves))}
    return [e for e in result if {"i", "j"} <= coordinates(e) and e.kind in kinds and _is_dense(e)]


def key_dimension(expr: Expr) -> int | None:
    """Dimension of a load along which keys follow one another: its index alone contains the key, plus other terms."""
    columns = [dim for dim, index in enumerate(expr.args) if "j" in coordinates(index)]
    parts = integers.linear(expr.args[columns[0]], J) if len(columns) == 1 else None
    return columns[0] if parts is not None and parts[0] is const(1) else None


def _is_dense(expr: Expr) -> bool:
    for index in expr.args:
        row = integers.linear(index, I)
        column = integers.linear(row[1], J) if row else None
        if row is None or column is None or coordinates(row[0]) & {"i", "j"} or coordinates(column[0]) & {"i", "j"}:
            return False
        if any(part.op == "load" for part in (row[0], column[0])):
            return False
    return True


ROWS = 256
"""Keys that are looked at: scales are shared by no more of them, or cost next to nothing."""
_ANY_SIZE = 1 << 12


def bytes_of_rows(
    reads: Sequence[Expr],
    itemsize: Callable[[int], int],
    widths: Mapping[Expr, int],
    rows: int,
    sizes: Mapping[str, int],
) -> float:
    """Bytes that have to be read for `rows` keys of one head, every stored element once.

    itemsize: bytes of an element of an operand.
    widths: extents of the columns.
    sizes: of the call; unknown ones are arbitrary.
    """
    if not rows:
        return 0.0
    seen, known = min(rows, ROWS), tuple(sorted(sizes.items()))
    result = (itemsize(r.operand) * _distinct(r, tuple(widths.items()), seen, known) for r in dict.fromkeys(reads))
    return sum(result) * rows / seen


@functools.lru_cache(maxsize=1024)
def _distinct(part: Expr, widths: tuple[tuple[Expr, int], ...], rows: int, sizes: tuple[tuple[str, int], ...]) -> int:
    """Number of elements that a load reads for so many columns of so many keys of one head."""
    places = {column: torch.arange(width) for column, width in widths} | {J: torch.arange(rows)[:, None]}
    known, zero = dict(sizes), torch.zeros((), dtype=torch.int64)

    def leaf(expr: Expr):
        if expr.op == "size":
            return torch.tensor(known.get(expr.name, _ANY_SIZE))
        if expr.op == "load":
            return lambda *index: _mixed(index, expr.operand) if expr.kind is Kind.INT else zero.float()
        return places.get(expr, zero)

    index = [torch.as_tensor(evaluate(entry, leaf)) for entry in part.args]
    return int(_mixed(index, part.operand).unique().numel())


def _mixed(index: tuple[Tensor, ...] | list[Tensor], seed: int) -> Tensor:
    """A number for an element's index that differs between indices."""
    total = torch.tensor(seed + 1)
    for entry in index:
        total = (total * 1000003 + entry) % (1 << 40)
    return total


def bytes_per_element(element: Expr, itemsize: Callable[[int], int], column: Expr, width: int) -> float:
    """Bytes read per element of K or V, over many keys."""
    return bytes_of_rows(loads(element), itemsize, {column: width}, ROWS, {}) / (ROWS * width)


def stored_bytes(spec: AttentionSpec, d: int, d_v: int, n_k: int, sizes: Mapping[str, int]) -> float:
    """Mean of the bytes read per element of K and V, with those read once per key included."""
    if not (d + d_v) * n_k:
        return 0.0
    of_keys = [r for r in loads(spec.score, spec.weight) if "j" in coordinates(r) and "i" not in coordinates(r)]
    of_elements = [*loads(spec.element(1)), *loads(spec.element(2))]

    def total(reads: Sequence[Expr]) -> float:
        return bytes_of_rows(reads, lambda n: spec.operands[n].torch_dtype.itemsize, {C: d, E: d_v}, n_k, sizes)

    return (total(of_elements) + total(of_keys)) / (n_k * (d + d_v))


_NONE, _ONE = integers.integer(0), integers.integer(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """An index map under which different coordinates, except for those that share an element, have different elements.

    repeats: for each of b.., row, column: the number of successive values that share an element; 1 where they share
        none, the extent where the coordinate does not matter.
    steps: for each of these and each dimension of the operand: the distance of the next element.
    first: in each dimension, the position of the first element.
    """

    repeats: tuple[Expr, ...]
    steps: tuple[tuple[Expr, ...], ...]
    first: tuple[Expr, ...]

    @property
    def groups(self) -> tuple[Expr, ...]:
        """Number of values of each batch coordinate that share an element."""
        return self.repeats[:-2]

    @property
    def apart(self) -> bool:
        """Whether no two coordinates share an element."""
        return all(repeat is _ONE for repeat in self.repeats)

    def strides(self, of_dimensions: Sequence[int], sizes: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
        """(distances of neighbouring elements for each of b.., row, column; the position of the first one) in a tensor
        with these strides."""

        def distance(parts: Sequence[Expr]) -> int:
            return sum(size_value(part, sizes) * n for part, n in zip(parts, of_dimensions, strict=True))

        return tuple(map(distance, self.steps)), distance(self.first)


def elements(spec: AttentionSpec, number: int) -> Elements | None:
    """Elements of operand 0, 1 or 2; None where they are gathered, or shared in another way than by successive values
    of batch coordinates."""
    index, *own = spec.access(number)
    repeats = _repeats(spec, index)
    if repeats is None:
        return None
    repeats = (*repeats, _ONE, _ONE)
    extents = (*spec.batch, spec.n_k if number else spec.n_q, spec.d_v if number == 2 else spec.d)
    atoms, counts = {}, []
    for place, (variable, repeat, extent) in enumerate(zip((*spec.axes, *own), repeats, extents, strict=True)):
        atoms[variable if repeat is _ONE else integers.floordiv(variable, repeat)] = place
        groups = integers.floordiv(extent, repeat)
        if extent.op == repeat.op == "const":
            groups = integers.integer(-(-extent.integer // repeat.integer))
        counts.append(groups)
    steps, first = [[_NONE] * len(index) for _ in repeats], [_NONE] * len(index)
    for dim, part in enumerate(index):
        for monomial, coefficient in integers.terms(part).items():
            moving = [atom for atom in monomial if coordinates(atom)]
            factor = integers.from_terms({tuple(a for a in monomial if a not in moving): coefficient})
            if not moving:
                first[dim] = integers.add(first[dim], factor)
            elif len(moving) > 1 or moving[0] not in atoms or any(n is not _NONE for n in steps[atoms[moving[0]]]):
                return None
            else:
                steps[atoms[moving[0]]][dim] = factor
        own_steps = [(step[dim], n) for step, n in zip(steps, counts, strict=True) if step[dim] is not _NONE]
        if not _in_mixed_radix(own_steps):
            return None
    for step, repeat, extent in zip(steps, repeats, extents, strict=True):
        if repeat is not extent and all(n is _NONE for n in step):
            return None
    return Elements(repeats=repeats, steps=tuple(map(tuple, steps)), first=tuple(first))


def _repeats(spec: AttentionSpec, index: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """Number of values of each batch coordinate that share an element; None where there is no such number."""
    repeats = []
    for b, extent in zip(spec.axes, spec.batch, strict=True):
        quotients = {part for e in index for part in walk(e) if part.op == "floordiv" and part.args[0] is b}
        alone = any(b in walk(substitute(e, dict.fromkeys(quotients, const(0)))) for e in index)
        if len(quotients) + alone > 1:
            return None
        repeats.append(_ONE if alone else quotients.pop().args[1] if quotients else extent)
    return tuple(repeats)


def _in_mixed_radix(steps: Sequence[tuple[Expr, Expr]]) -> bool:
    """Whether sums of multiples of these steps, each by less than its count, are all different: each step is a multiple
    of the one before times its count, or larger than the sum of all before."""
    reach: int | None = 0  # the largest sum so far, where it is known
    span: Expr | None = None
    for step, count in sorted(
        steps, key=lambda pair: (pair[0].op != "const", len(pair[0].args), abs(_factor(pair[0])))
    ):
        far = step.op == "const" and reach is not None and abs(step.integer) > reach
        if not (far or _is_multiple(step, span)):
            return False
        constant = step.op == count.op == "const" and reach is not None
        reach = reach + abs(step.integer) * (count.integer - 1) if constant and reach is not None else None
        span = integers.mul(step, count)
    return True


def _factor(product: Expr) -> int:
    return next(iter(integers.terms(product).values()), 0)


def _is_multiple(product: Expr, of: Expr | None) -> bool:
    """Whether a product of sizes and an integer is another times an integer other than 0. of: None for 1."""
    mine, theirs = integers.terms(product), integers.terms(product if of is None else of)
    if len(mine) != 1 or len(theirs) != 1 or mine.keys() != theirs.keys():
        return False
    return 0 not in (_factor(product), *theirs.values()) and not _factor(product) % next(iter(theirs.values()))


def is_strided(index: Sequence[Expr], variables: Sequence[Expr]) -> bool:
    """Whether each part of an index is a sum of multiples of some of the variables and a constant."""
    result = [monomial for part in index for monomial in integers.terms(part)]
    return all(not monomial or len(monomial) == 1 and monomial[0] in variables for monomial in result)


def strided(tensor: Tensor, index: Sequence[Expr], variables: Sequence[Expr], extents: Sequence[int]) -> Tensor:
    """View [extents of the variables] of a tensor's elements at an index for which `is_strided` holds."""
    parts = [integers.terms(part) for part in index]

    def step(*monomial: Expr) -> int:
        return sum(part.get(monomial, 0) * stride for part, stride in zip(parts, tensor.stride(), strict=True))

    return tensor.as_strided(extents, [step(each) for each in variables], tensor.storage_offset() + step())
