"""Passes inside Inductor: the rewrite before autograd, for models that are compiled without our backend, and the
changes of every graph with fused attentions once gradients are traced."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fusion.options import Options
from fusion.passes import nodes
from fusion.torch_private import inductor, tracing

log = logging.getLogger(__name__)

Rewrite = Callable[[GraphModule, Sequence[Any], Options], GraphModule | None]
"""(graph, its inputs, options) -> the graph with its attentions fused; None where there are none."""


class RewritePass(inductor.CustomGraphPass):
    """Replacement of a graph's attentions by calls of `fusion::attention`, before autograd sees them.

    Their gradients are then those of the operator, as with our backend. Subgraphs of another graph (a checkpointed
    part, a branch) are not rewritten separately: a recomputation has to draw the same random numbers. Packages of
    AOTInductor stay unchanged: they would need our operator where they run.
    """

    def __init__(self, options: Options, rewrite: Rewrite, early: bool = False) -> None:
        self.options, self.rewrite = options, rewrite
        self.early = early  # whether it came with pre_grad_pass_timing="early"

    def __call__(self, graph: Graph) -> None:
        values = [nodes.fake(node) for node in graph.find_nodes(op="placeholder")]
        module = graph.owning_module
        if inductor.is_packaging() or module is None or any(value is None for value in values) or not _is_whole(graph):
            return
        copied = GraphModule(module, copy.deepcopy(graph))  # for the report, which keeps it
        if (fused := self.rewrite(copied, values, self.options)) is not None:
            _put_in_place(fused, module)

    def uuid(self) -> str:
        """Key of everything but the graph that results depend on."""
        from fusion.machine import machine

        return f"fusion, source {_source()}, {self.options}, {machine()}, torch {torch.__version__}"


def _is_whole(graph: Graph) -> bool:
    """Whether no other graph calls this one, in Inductor's recursion; outside of it, whether it is Dynamo's."""
    depth = inductor.pre_grad_depth()
    return depth == 1 or (not depth and any(map(tracing.has_source, graph.nodes)))


@functools.cache
def _source() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    folders = [Path(__file__).parent / name for name in ("passes", "codegen")]  # links, in a checkout
    files += sorted(path for folder in folders for path in folder.rglob("*.py"))
    return inductor.hash_of_files(list(dict.fromkeys(str(path.resolve()) for path in files)))


def _put_in_place(fused: GraphModule, module: GraphModule) -> None:
    """Replace the graph of `module`, a graph in Inductor's hands, by that of `fused`; inputs and output stay."""
    inputs, placeholders = (graph.find_nodes(op="placeholder") for graph in (module.graph, fused.graph))
    output = module.graph.output_node()
    output.args = ((),)
    for node in reversed(module.graph.nodes):
        if node.op not in ("placeholder", "output"):
            module.graph.erase_node(node)
    _carry_attributes(fused, module)
    for node, new in zip(inputs, placeholders, strict=True):
        node.meta = new.meta | node.meta
    with module.graph.inserting_before(output):
        output.args = (module.graph.graph_copy(fused.graph, dict(zip(placeholders, inputs, strict=True))),)


def _carry_attributes(fused: GraphModule, module: GraphModule) -> None:
    """Copy the attributes that the graph of `fused` reads to `module`, under new names."""
    names: dict[str, str] = {}
    for node in fused.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        if (attribute := str(node.target)) not in names:
            names[attribute] = next(name for k in itertools.count() if not hasattr(module, name := f"fusion_{k}"))
            setattr(module, names[attribute], functools.reduce(getattr, attribute.split("."), fused))
        node.target = names[attribute]


class BelowAutogradPass(inductor.CustomGraphPass):
    """Changes of every graph with fused attentions once gradients are traced: these become their operator below
    autograd, and in the other parts Inductor's own attention patterns are switched off.

    They match by the class of an operation instead of its meaning and give wrong results for several sites that we
    refuse to fuse (a softmax over another dimension, for one). Being a pass with a key, it keeps entries of Inductor's
    caches apart, also for graphs that depend on the process.
    """

    def __init__(self, process_matters: bool) -> None:
        self.process_matters = process_matters

    def __call__(self, graph: Graph) -> None:
        inductor.keep_attention_patterns_off(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.fusion.attention.default):
            node.target = torch.ops.fusion.attention_below_autograd.default

    def uuid(self) -> str:
        from fusion.runtime.op import VERSION

        process = _process() if self.process_matters else ""
        return f"fusion, ops of version {VERSION}: without fuse_attention{process}"


def _process() -> str:
    """Number of this process among several. Graphs of DTensors depend on it (the part of a replicated tensor that is
    local, for one), and torch's caches, which processes share, do not: in torch 2.13 a process may get the graph that
    another one compiled, and computes that one's part."""
    import torch.distributed as dist

    known = dist.is_available() and dist.is_initialized()
    return f", for process {dist.get_rank()} of {dist.get_world_size()}" if known else ""


def with_rewrite(options: Options, rewrite: Rewrite) -> dict[str, Any]:
    """Settings of Inductor with both our passes, after all others in `config`. Passes before autograd run before
    AOTAutograd looks into its cache, unless the user decided that: its key is then the rewritten graph, and the report
    is complete however much of the graph is cached."""
    settings = below_rewrite(process_matters=True)
    early = getattr(inductor.config, "pre_grad_pass_timing", None) == "default"
    before = _others(inductor.config.pre_grad_custom_pass)
    settings["pre_grad_custom_pass"] = _setting([*before, RewritePass(options, rewrite, early)])
    return settings | ({"pre_grad_pass_timing": "early"} if early else {})


def below_rewrite(process_matters: bool) -> dict[str, Any]:
    """Settings of Inductor for a graph that is rewritten already."""
    below = [*_others(inductor.config.joint_custom_pre_pass), BelowAutogradPass(process_matters)]
    return without_ours() | {"joint_custom_pre_pass": _setting(below)}


def without_ours() -> dict[str, Any]:
    """Settings of Inductor without our passes; empty where there are none."""
    settings: dict[str, Any] = {}
    for name in ("pre_grad_custom_pass", "joint_custom_pre_pass"):
        if len(others := _others(setting := getattr(inductor.config, name))) < len(_listed(setting)):
            settings[name] = _setting(others)
    early = any(entry.early for entry in _rewrites())
    return settings | ({"pre_grad_pass_timing": "default"} if early else {})


def installed() -> Options | None:
    """Options of the rewrite in Inductor's settings."""
    return next((entry.options for entry in reversed(_rewrites())), None)


def _rewrites() -> list[RewritePass]:
    return [entry for entry in _listed(inductor.config.pre_grad_custom_pass) if isinstance(entry, RewritePass)]


def _listed(setting: Any) -> list[Any]:
    return list(setting) if isinstance(setting, (list, tuple)) else [] if setting is None else [setting]


def _others(setting: Any) -> list[Any]:
    return [entry for entry in _listed(setting) if not isinstance(entry, RewritePass | BelowAutogradPass)]


def _setting(passes: Sequence[Any]) -> Any:
    """Passes in the form of Inductor's setting; a single pass without a list, for torch versions without lists."""
    return None if not passes else passes[0] if len(passes) == 1 else list(passes)
