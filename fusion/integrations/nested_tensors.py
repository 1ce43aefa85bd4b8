"""Extension of Dynamo: attention of jagged nested tensors on CPUs causes no graph break under this backend.

Torch 2.13 computes it there by `_scaled_dot_product_attention_math` of strided nested tensors, which it builds from the
sequences one by one (`jagged_scaled_dot_product_attention`, in torch/nested/_internal/sdpa.py): sizes that depend on
data, and an operator (`aten::_nested_tensor_from_tensor_list`) that does not run on fake tensors. So Dynamo breaks the
graph. For this backend it calls `passes.tensors.nested.attention` instead; eager mode and other backends are unchanged.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from fusion.torch_private import dynamo

log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Put the call in Dynamo's table of functions with special handlers. A version of torch with another table, or with
    such a handler for attention, stays unchanged."""
    try:
        dynamo.treat(dynamo.SDPA, _attention)
    except (ImportError, AttributeError):
        log.info("attention of nested tensors stays torch's: Dynamo's table of functions is not where it was")


def _attention(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo variable of the call's result; None where Dynamo is to treat the call as any other."""
    if str(getattr(dynamo.backend_of(tx), "__module__", "")).partition(".")[0] != "fusion":  # another backend
        return None
    from fusion.passes import nodes  # not where this package is only imported
    from fusion.passes.tensors import nested

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
