"""Records that hold expressions: dataclasses whose fields are expressions, tuples, numbers, names and further records.

As JSON they have the nodes of the common DAG of all their expressions in order, operands before users, and the
positions of nodes in the place of expressions. Fields that have their default values are left out. The text has ' in
the place of ", and so no character that Inductor's C++ code, which copies it verbatim, would have to escape.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Hashable, Iterator
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fusion.ir.expr import Expr, Kind, node, walk

Record = TypeVar("Record")


def expressions(value: Any) -> Iterator[Expr]:
    """Expressions of a record, in the order of its fields; an expression itself."""
    if isinstance(value, Expr):
        yield value
    elif isinstance(value, tuple) or dataclasses.is_dataclass(value):
        parts = value if isinstance(value, tuple) else (getattr(value, f.name) for f in dataclasses.fields(value))
        for part in parts:
            yield from expressions(part)


def mapped(value: Any, change: Callable[[Expr], Expr]) -> Any:
    """Record, or another value of a field, with every expression changed."""
    if isinstance(value, Expr):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(part, change) for part in value)
    if not dataclasses.is_dataclass(value):
        return value
    return dataclasses.replace(value, **{  # type: ignore[type-var]
        f.name: mapped(getattr(value, f.name), change) for f in dataclasses.fields(value)
    })  # fmt: skip


@functools.lru_cache(maxsize=1024)
def to_json(record: Hashable) -> str:
    """A record as text: JSON with ' in the place of ", in which names have neither."""
    order = list(walk(*expressions(record)))
    number = {expr: position for position, expr in enumerate(order)}

    def plain(value: Any) -> Any:
        if isinstance(value, Expr):
            return number[value]
        if isinstance(value, tuple):
            return list(map(plain, value))
        if dataclasses.is_dataclass(value):
            given = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
            return {f.name: plain(held) for f, held in given if held is not f.default and held != f.default}
        if isinstance(value, enum.Enum):
            return value.value
        return repr(value) if isinstance(value, float) else value  # JSON has no infinities, and no NaN

    attributes = ({"float": repr(e.attr)} if isinstance(e.attr, float) else e.attr for e in order)
    nodes = [[e.op, [number[a] for a in e.args], e.kind.value, a] for e, a in zip(order, attributes, strict=True)]
    return json.dumps({"nodes": nodes} | plain(record), separators=(",", ":")).replace('"', "'")


def parsed(text: str) -> dict[str, Any]:
    """JSON that `to_json` wrote, parsed."""
    return json.loads(text.replace("'", '"'))


def from_json(kind: type[Record], text: str) -> Record:
    """The record of this kind that `to_json` wrote."""
    document = parsed(text)
    nodes: list[Expr] = []
    for op, args, of_kind, attr in document.pop("nodes"):
        value = float(attr["float"]) if isinstance(attr, dict) else attr
        nodes.append(node(op, tuple(nodes[a] for a in args), Kind(of_kind), value))

    def decoded(hint: Any, value: Any) -> Any:
        if value is None:
            return None
        if hint is Expr:
            return nodes[value]
        choices = [choice for choice in get_args(hint) if choice not in (NoneType, ...)]
        if get_origin(hint) is tuple:
            return tuple(decoded(choices[0], part) for part in value)
        if choices:  # it, or None
            return decoded(choices[0], value)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            hints = _hints(hint)
            return hint(**{name: decoded(hints[name], part) for name, part in value.items()})
        return hint(value)  # an enumeration, a number or a name

    return decoded(kind, document)


_hints = functools.lru_cache(maxsize=256)(get_type_hints)
