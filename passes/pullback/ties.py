"""Derivatives where the arguments of an operation tie, asked of torch.

At a kink (a value on a bound of `clamp`, equal arguments of `maximum`, 0 for `abs`) a derivative is a convention, and
torch changes its conventions: a value on a bound of `clamp` had the whole gradient up to torch 2.13, and has none, or a
half, since. So the composition of an operation is compared with torch's own derivative on numbers that tie. Of several
compositions the first that agrees is taken. Where none does, a function of one number is corrected at the points at
which it differs, and any other is refused.

Once per process and form of a call, on some hundred numbers in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import Expr, Kind, const, node, walk
from fusion.ir.ops import apply, evaluate, where
from fusion.refusals import Reason

from ..nodes import Unsupported
from .casts import Builder, Call

_KINKED = ("where", "abs", "minimum", "maximum")
_USUAL = (-1.0, 0.0, 0.5, 1.0, 2.0)
_STAND_IN = 0.75
"""For a scalar that is known at run time only."""
_MOST_CORRECTIONS = 4
_APART = 1e-6


@dataclass(frozen=True, slots=True)
class _Form:
    """A call without its expressions: `args` and `kwargs` have a `_Leaf` for each tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the call with a value in the place of each leaf."""

        def fill(given: Any) -> Any:
            return values[given.number] if isinstance(given, _Leaf) else given

        return tuple(map(fill, self.args)), {name: fill(given) for name, given in self.kwargs}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor. value: of all its elements, if it is constant; constants have no gradient, nor have integers."""

    number: int
    value: float | None = None
    moves: bool = True


@dataclass(frozen=True, slots=True)
class _Rule:
    """The composition to take, and (point, value, slope) wherever a function of one number is corrected."""

    chosen: int
    corrections: tuple[tuple[float, float, float], ...] = ()


def as_torch_differentiates(packet: Any, call: Call, builders: Sequence[Builder]) -> Expr | None:
    """Value of a call by the first of `builders` that has torch's derivative at ties; None where no builder applies.
    Raises Unsupported where none agrees."""
    composed = builders[0](call)
    if (
        composed is None
        or composed.kind is not Kind.FLOAT
        or composed.is_const
        or (form := _form(packet, call)) is None
    ):
        return composed
    rule = _rule(form, tuple(builders))
    if isinstance(rule, str):
        raise Unsupported(Reason.DEFECT, rule)
    composed = composed if rule.chosen == 0 else builders[rule.chosen](call)
    for point, value, slope in rule.corrections:
        (x,) = (arg for arg in call.args if isinstance(arg, Expr))
        composed = where(apply("feq", x, const(point)), _line(x, point, value, slope), composed)
    return composed


def _line(x: Expr, point: float, value: float, slope: float) -> Expr:
    """A composition with this value and slope at a point."""
    if slope == 0.0:
        return const(value)
    return x if (slope, value) == (1.0, point) else const(value) + (x - point) * slope


def _form(packet: Any, call: Call) -> _Form | None:
    """Form of a call; None where an argument is neither a number nor a tensor of numbers."""
    count = itertools.count()
    schema = call.target._schema.arguments if call.target is not None else ()
    scalars = {a.name for a in schema if "Tensor" not in str(a.type)}
    names = [a.name for a in schema]

    def leaf(name: str | None, given: Any) -> Any:
        if not isinstance(given, Expr):
            return given
        if name in scalars:
            return given.attr if given.is_const else _STAND_IN
        if given.kind is Kind.BOOL:
            raise TypeError
        return _Leaf(next(count), float(given.attr) if given.is_const else None, given.kind is Kind.FLOAT)  # type: ignore[arg-type]

    try:
        args = tuple(leaf(name, given) for name, given in itertools.zip_longest(names[: len(call.args)], call.args))
        kwargs = tuple((name, leaf(name, given)) for name, given in sorted(call.kwargs.items()))
        form = _Form(packet if call.target is None else call.target, args, kwargs, call.dtype)
        hash(form)
    except TypeError:
        return None
    return form


@functools.lru_cache(maxsize=1024)
def _rule(form: _Form, builders: tuple[Builder, ...]) -> _Rule | str:
    """Composition to take, or the reason why there is none. Computed in a separate thread, which has none of the modes
    of the compilation."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_found, form, builders).result()


def _found(form: _Form, builders: Sequence[Builder]) -> _Rule | str:
    leaves = [given for given in (*form.args, *dict(form.kwargs).values()) if isinstance(given, _Leaf)]
    stand_ins = [node("upstream", (), Kind.FLOAT, f"leaf {leaf.number}") for leaf in leaves]
    given = [x if leaf.value is None else const(leaf.value) for x, leaf in zip(stand_ins, leaves, strict=True)]
    args, kwargs = form.filled(given)
    call = Call(args=args, kwargs=kwargs, dtype=form.dtype)
    composed = [composition for builder in builders if (composition := builder(call)) is not None]
    if not composed or not any(part.op in _KINKED for part in walk(composed[0])):
        return _Rule(0)
    columns = _columns(form, leaves, composed)
    theirs = _by_torch(form, leaves, columns)
    if theirs is None:
        return _Rule(0)  # torch itself does not run it
    moving = [x for x, leaf in zip(stand_ins, leaves, strict=True) if leaf.moves and leaf.value is None]
    known = dict(zip(stand_ins, columns, strict=True))
    differs = []
    for composition in composed:
        differs.append(_differs(theirs, _by_expression(composition, moving, known)))
        if not differs[-1].any():
            return _Rule(len(differs) - 1)
    message = f"torch {torch.__version__} differentiates {form.function} in a way that fusion does not know"
    if len(leaves) != 1 or not moving or _STAND_IN in form.args or int(differs[0].sum()) > _MOST_CORRECTIONS:
        return message
    points = zip(columns[0].tolist(), theirs[0].tolist(), theirs[1].tolist(), differs[0].tolist(), strict=True)
    return _Rule(0, tuple((x, value, slope) for x, value, slope, wrong in points if wrong))


def _columns(form: _Form, leaves: Sequence[_Leaf], composed: Sequence[Expr]) -> list[Tensor]:
    """Numbers for each leaf, in every combination: the constants of the call and of the compositions, and a few
    more."""
    scalars = [x for x in (*form.args, *dict(form.kwargs).values()) if isinstance(x, (int, float))]
    scalars += [part.attr for part in walk(*composed) if part.is_const and part.kind is Kind.FLOAT]
    usual = {*_USUAL, *(leaf.value for leaf in leaves if leaf.value is not None)}
    if sum(leaf.value is None for leaf in leaves) < 3:
        usual |= {sign * float(x) for x in scalars for sign in (1, -1) if abs(x) < 100}
    numbers = sorted({x + 0.0 for x in usual if math.isfinite(x)})
    choices = [numbers if leaf.value is None else [leaf.value] for leaf in leaves]
    every = torch.tensor(list(itertools.product(*choices)), dtype=torch.float64)
    return list(every.unbind(1))


def _by_torch(form: _Form, leaves: Sequence[_Leaf], columns: Sequence[Tensor]) -> list[Tensor] | None:
    """[the result, its derivative by each leaf that has one]."""
    leaf_tensors = [
        x.clone().requires_grad_(leaf.moves and leaf.value is None) for x, leaf in zip(columns, leaves, strict=True)
    ]
    args, kwargs = form.filled(leaf_tensors)
    try:
        result = form.function(*args, **kwargs)
        moving = [x for x in leaf_tensors if x.requires_grad]
        gradients = torch.autograd.grad(result.sum(), moving, allow_unused=True, materialize_grads=True)
    except (RuntimeError, TypeError):
        return None
    return [result.detach(), *(g + torch.zeros_like(g) for g in gradients)]


def _by_expression(composed: Expr, moving: Sequence[Expr], known: dict[Expr, Tensor]) -> list[Tensor]:
    """[the result of a composition, its derivative by each leaf that has one]."""
    derived = adjoints(composed, UPSTREAM, moving)
    one = torch.ones((), dtype=torch.float64)
    return [
        evaluate(part, lambda x: known.get(x, one), torch.float64) for part in (composed, *map(derived.get, moving))
    ]


def _differs(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> Tensor:
    """Mask of the places where torch's derivative is finite and ours differs from it."""
    wrong = torch.zeros(theirs[0].shape, dtype=torch.bool)
    for their, our in zip(theirs[1:], ours[1:], strict=True):
        near = (their - our).abs() <= _APART * (1 + their.abs())
        wrong |= their.isfinite() & ~near
    return wrong
