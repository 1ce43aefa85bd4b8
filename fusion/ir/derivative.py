"""Derivatives of expressions, by reverse accumulation: from the gradient of a score program to those of the score and
of its tensors.

`adjoints(program, seed, targets)` takes the gradient that arrives at the program's value (an expression, usually a
leaf) and returns the gradient at each target. The derivative of each primitive stands in its entry of
`fusion.ir.primitives`.

Derivatives of an attention, described as functions.

An attention takes operands to results: its output, and its auxiliary outputs. A derivative is built from it by steps,
each of which turns one function into another:

    Tangents    (inputs, a tangent for each marked input)       to    the tangent of every result
    Gradients   (inputs, a gradient for each marked result)     to    the gradient of every marked input

so derivatives of any order, forward and reverse in any mixture, are described alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple, TypeVar

from fusion.ir.expr import ONE, ZERO, Expr, Kind, node, walk
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.spec import AttentionSpec

UPSTREAM = node("upstream", (), Kind.FLOAT)
"""The leaf that stands for the gradient arriving at a score program's value."""

WEIGHT_UPSTREAM = node("upstream", (), Kind.FLOAT, "weight")
"""The leaf that stands for the gradient arriving at a weight program's value."""

AUX_UPSTREAM = node("upstream", (), Kind.FLOAT, "auxiliary")
"""Factor of the gradients of auxiliary outputs: one, or zero where they are left out."""

SINK_UPSTREAM = node("upstream", (), Kind.FLOAT, "row")
"""The leaf that stands for the gradient arriving at a sink."""


def adjoints(program: Expr, seed: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """The gradient at each target for the gradient `seed` at `program`; ZERO where there is none. Targets count as
    leaves: nothing that they are made of is looked at."""
    order, targets = list(walk(program)), list(targets)
    arriving: dict[Expr, Expr] = {program: seed}
    for part in reversed(order):
        gradient = arriving.get(part)
        derivative = PRIMITIVES[part.op].derivative if part.op in PRIMITIVES else None
        if gradient is None or derivative is None or part in targets:
            continue
        terms = _of_gated(gradient, part) or derivative(gradient, part, *part.args)
        for arg, term in zip(part.args, terms if isinstance(terms, tuple) else (terms,), strict=True):
            if term is not None and arg.kind is Kind.FLOAT and not arg.is_const:
                arriving[arg] = arriving[arg] + term if arg in arriving else term
    return {target: arriving.get(target, ZERO) for target in targets}


def _of_gated(gradient: Expr, product: Expr) -> tuple[Expr | None, ...] | None:
    """Gradients of x * h(x), as silu and gelu are: gradient * (h(x) + x * h'(x)), as torch has it. A gradient times a
    fill x could overflow, where h'(x) is 0. None for other operations, and where h selects: of an infinite x eager mode
    then selects 0, and multiplies nothing with it."""
    if product.op != "fmul":
        return None
    for x, gate in (product.args, product.args[::-1]):
        if x is not gate and not x.is_const and not gate.is_const and _is_function_of(x, gate):
            return tuple(gradient * (gate + x * _slope(x, gate)) if arg is x else None for arg in product.args)
    return None


@lru_cache(maxsize=1024)
def _slope(x: Expr, value: Expr) -> Expr:
    return adjoints(value, ONE, [x])[x]


_SMOOTH = ("sigmoid", "tanh", "erf", "exp", "neg", "fadd", "fsub", "fmul", "div")


def _is_function_of(x: Expr, value: Expr) -> bool:
    known: dict[Expr, bool] = {}
    for part in walk(value):
        known[part] = part is x or part.is_const or (part.op in _SMOOTH and all(known[arg] for arg in part.args))
    return known[value]


def reached(*programs: Expr) -> set[Expr]:
    """Expressions that gradients of the programs may flow to: not arguments of `detach`, comparisons or indices."""
    seen, todo = set[Expr](), list(programs)
    while todo:
        expr = todo.pop()
        if expr in seen or expr.kind is not Kind.FLOAT:
            continue
        seen.add(expr)
        if expr.op != "detach":
            todo += expr.args
    return seen


Marks = tuple[bool, ...]
Item = TypeVar("Item")


class Place(NamedTuple):
    """Meaning of a tensor, or of that whose tangent or gradient it is: an operand, or a result (0: the output)."""

    is_operand: bool
    number: int


@dataclass(frozen=True, slots=True)
class Tangents:
    """Tangent of every result. inputs: which inputs have one."""

    inputs: Marks

    def __str__(self) -> str:
        return f"tangents {_text(self.inputs)}"


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradient of each input that `inputs` marks. results: for which results a gradient is given."""

    inputs: Marks
    results: Marks

    def __str__(self) -> str:
        return f"gradients {_text(self.inputs)} {_text(self.results)}"


Step = Tangents | Gradients


def marked(items: Sequence[Item], marks: Marks) -> list[Item]:
    return list(compress(items, marks))


def signature(spec: AttentionSpec, steps: Sequence[Step]) -> tuple[list[Place], list[Place]]:
    """(meanings of the inputs of a derivative, meanings of its results)."""
    inputs = [Place(True, number) for number in range(len(spec.operands))]
    results = [Place(False, number) for number in range(1 + len(spec.aux_outputs))]
    for step in steps:
        if isinstance(step, Tangents):
            inputs = inputs + marked(inputs, step.inputs)
        else:
            inputs, results = inputs + marked(results, step.results), marked(inputs, step.inputs)
    return inputs, results


def to_text(steps: Sequence[Step]) -> str:
    """Steps as text, for the operator."""
    return "; ".join(map(str, steps))


@lru_cache(maxsize=1024)
def from_text(text: str) -> tuple[Step, ...]:
    """The steps that `to_text` wrote."""
    result: list[Step] = []
    for part in filter(None, text.split("; ")):
        name, *marks = part.split(" ")
        read = [tuple(c == "1" for c in mark) for mark in marks]
        result.append(Tangents(*read) if name == "tangents" else Gradients(*read))
    return tuple(result)


def _text(marks: Marks) -> str:
    return "".join("01"[mark] for mark in marks)
