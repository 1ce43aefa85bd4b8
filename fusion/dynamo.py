"""Dynamo: attention of jagged nested tensors on CPUs does not break a graph that this package compiles.

Torch 2.13 computes it there by `_scaled_dot_product_attention_math` of strided nested tensors, which it makes of the
sequences one by one (`jagged_scaled_dot_product_attention`, in torch/nested/_internal/sdpa.py): sizes that depend on
data, and an operator (`aten::_nested_tensor_from_tensor_list`) that does not run on tensors without data. So Dynamo
cuts the graph. For our backend it calls `passes.tensors.nested.attention` instead; eager mode and other backends are as
they were.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from fusion.torch_private import dynamo

log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Put the call in Dynamo's table of functions that it treats in a way of their own. A version of torch with another
    table, or with such a way for attention, stays as it is."""
    try:
        dynamo.treat(dynamo.SDPA, _attention)
    except (ImportError, AttributeError):
        log.info("attention of nested tensors stays torch's: Dynamo's table of functions is not where it was")


def _attention(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo has of the call's result; None where it is to treat the call as any other."""
    if not _is_ours(dynamo.backend_of(tx)):
        return None
    from fusion.passes import nodes  # not where this package is only imported
    from fusion.passes.tensors import nested  # not where this package is only imported

    given, named = [dynamo.known(x) for x in args], {name: dynamo.known(x) for name, x in kwargs.items()}
    if not any(map(nodes.is_nested, (*given, *named.values()))):
        return None
    try:
        reason = nested.reason_against(*given, **named)
    except (AttributeError, TypeError):  # another version of torch; arguments that attention does not have
        return None
    if reason is not None:
        log.info("attention of nested tensors stays torch's: %s", reason)
        return None
    return dynamo.call_in_graph(tx, nested.attention, args, kwargs)


def _is_ours(backend: Any) -> bool:
    """Whether a backend is one of this package."""
    return str(getattr(backend, "__module__", "")).partition(".")[0] == "fusion"
