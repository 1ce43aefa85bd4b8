"""Values of size expressions, for given values of the sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusion.ir.expr import Expr
from fusion.ir.ops import evaluate

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec

_OPERATORS = {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}


def size_function(exprs: Sequence[Expr], names: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Function from values of `names` (sizes or coordinates) to those of the expressions; compiled, since a call has
    microseconds."""
    texts = "".join(f"{_python(expr, list(names))}, " for expr in exprs)
    return eval(f"lambda s: ({texts})")  # the text holds integers and indices only


def extents_function(spec: AttentionSpec) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Function from values of `spec.sizes` to (batch sizes.., n_q, n_k, d, d_v)."""
    return size_function((*spec.batch, spec.n_q, spec.n_k, spec.d, spec.d_v), spec.sizes)


def _python(expr: Expr, names: list[str]) -> str:
    if expr.op == "const":
        return str(expr.integer)
    if expr.op in ("size", "coord"):
        return f"s[{names.index(expr.name)}]"
    args = [_python(arg, names) for arg in expr.args]
    if expr.op in ("imin", "imax"):
        return f"{expr.op[1:]}({', '.join(args)})"
    return f"({_OPERATORS[expr.op].join(args)})"


def size_value(expr: Expr, sizes: Mapping[str, Any]) -> Any:
    """Value of a size expression; that of a constant or of one of the sizes may be symbolic."""
    if expr.op in ("const", "size"):
        return expr.integer if expr.op == "const" else sizes[expr.name]
    return int(evaluate(expr, lambda leaf: torch.tensor(sizes[leaf.name])))


def leaves(
    sizes: Mapping[str, int],
    known: Mapping[Expr, Any],
    load: Callable[[Expr], Any] | None = None,
    device: torch.device | None = None,
) -> Callable[[Expr], Any]:
    """Leaves of `evaluate`: sizes by name, loads by a function of their own, and other known values."""

    def leaf(part: Expr) -> Any:
        if part.op == "size":
            return torch.tensor(sizes[part.name], device=device)
        return load(part) if load is not None and part.op == "load" else known[part]

    return leaf
