"""Matrix products in the rest of a graph, by the library that is fastest for them on this processor.

On some processors MKL, which torch calls for float32, has less than half the speed of oneDNN, which torch contains. A
pass of Inductor's, below autograd, lets the products of forward and backward graphs go to oneDNN where a measurement
says that it is faster (docs/linear.md). Operands are read in place, at every call; weights alone that Inductor has
frozen are packed.

    settings(module, when)   Inductor's settings for a graph: the entry point
    counted(), notes(before) notes for the report
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.fx import GraphModule

from fusion.linear import products, speeds
from fusion.linear.redirect import COUNTED, DTYPES, INSIDE, ProductsPass, is_large
from fusion.options import When
from fusion.passes import nodes
from fusion.torch_private import devices
from fusion.torch_private.dynamo import counters
from fusion.torch_private.inductor import config

log = logging.getLogger(__name__)


def settings(module: GraphModule, when: When) -> dict[str, Any]:
    """Inductor's settings under which products of this graph, and of its backward, go to the faster library, and
    GELU takes less time; empty where none could. `"always"`: all products that can go to oneDNN do."""
    dtypes = _dtypes_of_products(module) if when == "auto" else DTYPES
    if when == "never" or not dtypes:
        return {}
    if reason := products.lacks():
        _say_once(reason)
        return {}
    if not devices.onednn_may_run():
        return {}
    others = config.post_grad_custom_pre_pass
    others = [] if others is None else others if isinstance(others, list) else [others]
    ours = ProductsPass(when == "always", dtypes)
    return {"post_grad_custom_pre_pass": [*others, ours] if others else ours}


def _dtypes_of_products(module: GraphModule) -> tuple[torch.dtype, ...]:
    """The dtypes of matrices that a graph reads and that are not small. Of others nothing is measured."""
    reads = [nodes.fake(node) for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    present = {value.dtype for value in reads if is_large(value)}
    return tuple(dtype for dtype in DTYPES if dtype in present)


@functools.lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("products stay with torch's library: %s", reason)


def counted() -> tuple[int, int]:
    """Products by oneDNN so far, and those with a GELU inside, by Inductor's counters, which it restores where it finds
    a graph in its cache."""
    return counters["inductor"][COUNTED], counters["inductor"][INSIDE]


def notes(before: tuple[int, int]) -> list[str]:
    """Note for a report: how many products of a graph are computed by oneDNN. before: `counted` before it was
    compiled."""
    count, inside = (now - then for now, then in zip(counted(), before, strict=True))
    if not count:
        return []
    counters["fusion"]["products"] += count
    measured = speeds.known.get((torch.get_num_threads(), torch.float32))
    gelu = f", {inside} with GELU inside" if inside else ""
    at = f" ({measured})" if measured else ""
    return [f"linear: {count} product{'s' * (count != 1)} by oneDNN{gelu}{at}"]
