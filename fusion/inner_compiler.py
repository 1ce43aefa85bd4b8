"""The inner compiler: what makes the rest of the model run."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from fusion.options import Options
from fusion.passes import dtensor, marks, nodes

log = logging.getLogger(__name__)


def compile_rest(module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: Any) -> Callable[..., Any]:
    """Compile a graph, fused attentions included as calls of `fusion::attention`, with the inner compiler."""
    if options.inner == "eager":
        return module.forward
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, list(example_inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from fusion.runtime.bound import teach_inductor

    teach_inductor()
    patches = list_mode_options(mode) if mode else None
    with _without_fuse_attention(_process() if _has_dtensors(module) else ""):
        return cast("Callable[..., Any]", compile_fx(module, list(example_inputs), config_patches=patches))


def _has_dtensors(module: GraphModule) -> bool:
    return any(marks.dtensor(node) or dtensor.is_dtensor(nodes.value(node)) for node in module.graph.nodes)


def _process() -> str:
    """Which of several processes this is.

    What DTensors become depends on it (the part of a replicated tensor that is kept, for one), and torch's caches,
    which processes share, do not: in torch 2.13 a process is given what another compiled, and takes its part.
    """
    import torch.distributed as dist

    return f", for process {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else ""


_PATTERNS = "torch._inductor.fx_passes.fuse_attention"


@contextlib.contextmanager
def _without_fuse_attention(condition: str) -> Iterator[None]:
    """Keep Inductor's own attention patterns off what we left alone.

    They match by the class of an operation instead of its meaning and give wrong results for several things we refuse
    to fuse (a softmax over another dimension, for one). The pass that takes them out makes Inductor's caches tell the
    two apart, and graphs compiled under another `condition`.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes import joint_graph

    from fusion.runtime.op import VERSION

    class OwnPass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            _drop_patterns(joint_graph)
            _leave_autograd(graph)

        def uuid(self) -> str:
            return f"fusion, ops of version {VERSION}: without fuse_attention{condition}"

    full = joint_graph.pass_patterns[0]
    previous = config.joint_custom_pre_pass
    passes = [] if previous is None else list(previous) if isinstance(previous, (list, tuple)) else [previous]
    try:
        with config.patch(joint_custom_pre_pass=[*passes, OwnPass()] if passes else OwnPass()):
            yield
    finally:
        joint_graph.pass_patterns[0] = full


def _leave_autograd(graph: Any) -> None:
    """Gradients are traced when this graph reaches Inductor: its calls need not look for them."""
    import torch

    for node in graph.nodes:
        if node.target is torch.ops.fusion.attention.default:
            node.target = torch.ops.fusion.attention_below_autograd.default


def _drop_patterns(joint_graph: Any) -> None:
    """Replace the pattern pass by a copy without attention patterns; runs after Inductor has registered them."""
    import copy

    full = joint_graph.pass_patterns[0]
    filtered = copy.copy(full)
    filtered.patterns = type(full.patterns)(list)
    dropped = 0
    for key, entries in full.patterns.items():
        kept = [entry for entry in entries if not _is_attention_pattern(entry)]
        dropped += len(entries) - len(kept)
        filtered.patterns[key] = kept
    joint_graph.pass_patterns[0] = filtered
    if not dropped and any(
        _PATTERNS in str(inspect.getmodule(e.extra_check)) for v in full.patterns.values() for e in v
    ):
        log.warning("could not take Inductor's fuse_attention patterns out; unfused attentions may be matched by them")


def _is_attention_pattern(entry: Any) -> bool:
    check = entry.extra_check
    if not inspect.isfunction(check):
        return False
    inner = inspect.getclosurevars(check).nonlocals.get("extra_check")
    return _PATTERNS in (getattr(check, "__module__", ""), getattr(inner, "__module__", ""))
