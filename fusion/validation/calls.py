"""`options={"verify": "run"}`: the first call of a compiled graph, compared with eager on the user's own data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fusion.exactness import copied, errors, floats, in_float64
from fusion.torch_private.dynamo import counters

log = logging.getLogger(__name__)


def compared(compiled: Callable[..., Any], module: GraphModule, fused: GraphModule) -> Callable[..., Any]:
    """Compiled graph; where its first call differs from `module` in eager mode, `module` runs from then on. fused: the
    graph that was compiled. One that draws random numbers cannot be compared, and is returned unchanged."""
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in fused.graph.nodes):
        log.warning("the first call is not compared with eager: the graph draws random numbers")
        return compiled
    trusted: list[Callable[..., Any]] = []

    def run(*arguments: Any) -> Any:
        if trusted:
            return trusted[0](*arguments)
        before = [copied(argument) for argument in arguments]
        with torch.no_grad():
            eager = floats(module(*map(copied, before)))
            exact = _exact(module, before)
        result, kind = compiled(*arguments), "invalid"
        try:
            problem = _difference(floats(result), eager, exact)
        except Exception as error:
            problem, kind = f"they cannot be compared ({type(error).__name__}: {error})", "skipped"
        if problem is None:
            if not trusted:  # else another thread's first call decided
                trusted.append(compiled)
            return result
        trusted[:] = [module]
        counters["fusion"][kind] += 1
        log.error("a defect of fusion: its first call differs from eager, which runs from now on: %s", problem)
        for argument, value in zip(arguments, before, strict=True):
            if isinstance(argument, Tensor) and not torch.equal(argument, value):
                argument.detach().copy_(value)
        return module(*arguments)

    return run


def _exact(module: GraphModule, arguments: Sequence[Any]) -> list[Tensor] | None:
    """Result in float64; None where the graph asks for another dtype."""
    try:
        return in_float64(module, arguments, {})
    except Exception:
        return None


def _difference(ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor] | None) -> str | None:
    """Text of an output's violation of the rule of `fusion.exactness`, or None. Without float64, eager's error counts
    as 16 eps."""
    for number, (a, b) in enumerate(zip(ours, eager, strict=True)):
        comparison = errors(a, b, b, condition=16) if exact is None else errors(a, b, exact[number])
        if comparison.share > 1:
            return f"output {number}: {comparison}"
    return None
