"""Values of dynamic sizes and numbers that the analysis of one site assumes.

A kernel is compiled for fixed values, such as a head dimension, and torch has to guard on each: another value compiles
again. Whether a site gets a kernel is known only at the end of the analysis. Until then no guard is added, so that an
attention that is not fused costs no model its dynamic shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import sympy

T = TypeVar("T")


class Assumptions:
    """Assumptions of the analysis of one site. sizes: symbols that count as constants in it."""

    def __init__(self) -> None:
        self.sizes: dict[Any, Any] = {}
        self._questions: dict[Hashable, Callable[[], object]] = {}

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which questions are answered by the example's sizes, and fixed sizes are constants."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def guard(self) -> None:
        """Add torch's guards for every answer that was given."""
        for question in self._questions.values():
            question()

    def answer(self, key: Hashable, env: Any, question: Callable[[], T]) -> T:
        with env.suppress_guards():
            result = question()
        self._questions.setdefault(key, question)
        return result


_current: ContextVar[Assumptions | None] = ContextVar("_current", default=None)


def ask(key: Hashable, env: Any, question: Callable[[], T]) -> T:
    """Answer to a question that torch guards on. The guard is added at once or, inside `Assumptions`, by
    `Assumptions.guard`.
    env: the ShapeEnv of the symbols in question. key: equal for equal questions."""
    assumptions = _current.get()
    return question() if assumptions is None else assumptions.answer(key, env, question)


def fix(symbol: sympy.Symbol, env: Any) -> None:
    """Make a size a constant."""
    value = ask(symbol, env, lambda: env.evaluate_expr(symbol))
    if (assumptions := _current.get()) is not None:
        assumptions.sizes[symbol] = value


def known(expr: Any) -> Any:
    """Sympy expression in which sizes that are fixed now are replaced by their values."""
    assumptions = _current.get()
    return expr if assumptions is None or not assumptions.sizes else expr.xreplace(assumptions.sizes)


_plain = ContextVar("_plain", default=False)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Context in which keys and values are read from the graph's copy of a cache, and attentions whose weights are used
    elsewhere stay as they are: for kernels that support neither, and return one tensor."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def are_plain() -> bool:
    """Whether `plain_kernels` is in force."""
    return _plain.get()
