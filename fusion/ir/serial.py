"""Expressions as JSON documents: the nodes of their common DAG in order, operands before what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fusion.ir.expr import Expr, Kind, node, walk


def dumped(roots: Iterable[Expr]) -> tuple[list[list[object]], Mapping[Expr, int]]:
    """(nodes, the position of each expression among them)."""
    order = list(walk(*roots))
    number = {expr: position for position, expr in enumerate(order)}
    return [[e.op, [number[a] for a in e.args], e.kind.value, _attribute(e.attr)] for e in order], number


def _attribute(value: object) -> object:
    """JSON has no infinities, and no NaN."""
    return {"float": repr(value)} if isinstance(value, float) else value


def loaded(nodes: Sequence[Sequence]) -> list[Expr]:
    """The expressions of dumped nodes, in their order."""
    made: list[Expr] = []
    for op, args, kind, attr in nodes:
        value = float(attr["float"]) if isinstance(attr, dict) else attr
        made.append(node(op, tuple(made[a] for a in args), Kind(kind), value))
    return made
