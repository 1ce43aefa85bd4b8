"""Matrix products in the rest of a graph, by the library that is fastest for them on this processor.

On some processors MKL, which torch calls for float32, has less than half the speed of oneDNN, which torch contains. A
pass of Inductor's, below autograd, lets the products of forward and backward graphs go to oneDNN where a measurement
says that it is faster (docs/linear.md). Operands are read in place at every call. Weights are packed where Inductor has
frozen them, and parameters where that is asked for.

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
from fusion.linear.redirect import DTYPES, INSIDE, ProductsPass, counter, is_large, register_inductor_codegen
from fusion.options import Linear
from fusion.passes import nodes
from fusion.torch_private import devices
from fusion.torch_private.dynamo import counters
from fusion.torch_private.inductor import config

log = logging.getLogger(__name__)


def settings(module: GraphModule, when: Linear) -> dict[str, Any]:
    """Inductor's settings under which products of this graph, and of its backward, go to the faster library, and
    GELU takes less time; empty where none could. `"always"`: all products that can go to oneDNN do. `"packed"`: the
    weights of an inference graph are packed."""
    dtypes = DTYPES if when == "always" else _dtypes_of_products(module)
    packed = when == "packed" and not torch.is_grad_enabled()
    if packed and dtypes:
        dtypes = DTYPES  # autocast makes others
    if when == "never" or not dtypes:
        return {}
    if reason := products.lacks():
        _say_once(reason)
        return {}
    if not devices.onednn_may_run():
        return {}
    others = config.post_grad_custom_pre_pass
    others = [] if others is None else others if isinstance(others, list) else [others]
    register_inductor_codegen()
    ours = ProductsPass(when == "always", dtypes, packed)
    return {"post_grad_custom_pre_pass": [*others, ours] if others else ours}


def _dtypes_of_products(module: GraphModule) -> tuple[torch.dtype, ...]:
    """The dtypes of matrices that a graph reads and that are not small. Of others nothing is measured."""
    reads = [nodes.fake(node) for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    present = {value.dtype for value in reads if is_large(value)}
    return tuple(dtype for dtype in DTYPES if dtype in present)


@functools.lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("products stay with torch's library: %s", reason)


_COUNTERS = (counter(True, False), counter(True, True), counter(False, True), INSIDE)


def counted() -> tuple[int, ...]:
    """Products so far by oneDNN, by oneDNN and MKL with packed weights, and those with a GELU inside, by Inductor's
    counters, which it restores where it finds a graph in its cache."""
    return tuple(counters["inductor"][name] for name in _COUNTERS)


def notes(before: tuple[int, ...]) -> list[str]:
    """Notes for a report: how many products of a graph are computed by oneDNN, and how many weights are packed. before:
    `counted` before it was compiled."""
    plain, packed, by_mkl, inside = (now - then for now, then in zip(counted(), before, strict=True))
    result = [f"linear: {_products(by_mkl)} by MKL with packed weights"] if by_mkl else []
    if not (count := plain + packed):
        return result
    counters["fusion"]["products"] += count
    measured = speeds.known.get((torch.get_num_threads(), torch.float32))
    weights = f", {packed} with packed weights" if packed else ""
    gelu = f", {inside} with GELU inside" if inside else ""
    at = f" ({measured})" if measured else ""
    return [f"linear: {_products(count)} by oneDNN{weights}{gelu}{at}", *result]


def _products(count: int) -> str:
    return f"{count} product{'s' * (count != 1)}"
