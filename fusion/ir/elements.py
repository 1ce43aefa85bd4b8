"""Index maps of Q, K and V: the coordinates that distinguish their elements, the steps between elements, and the number
of values of a coordinate that share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion.ir import integers
from fusion.ir.expr import Expr, const, coordinates, substitute, walk
from fusion.ir.results import size_value
from fusion.ir.spec import AttentionSpec

_NONE, _ONE = integers.integer(0), integers.integer(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """An index map under which different coordinates, except for those that share an element, have different elements.

    repeats: for each of b.., row, column: the number of successive values that share an element; 1 where they share
    none,
        the extent where the coordinate does not matter.
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
        counts.append(_groups(extent, repeat))
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


def _groups(extent: Expr, repeat: Expr) -> Expr:
    if extent.op == repeat.op == "const":
        return integers.integer(-(-extent.integer // repeat.integer))
    return integers.floordiv(extent, repeat)


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
