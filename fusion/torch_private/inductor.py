"""Inductor: its settings and passes, its entry points, and the Python code that it writes."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch._inductor import config
from torch._inductor import list_mode_options as settings_of_mode  # what `torch.compile(mode=...)` stands for
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule

__all__ = [
    "CustomGraphPass", "compiled", "config", "cpp_compiler", "hash_of_files", "is_packaging",
    "keep_attention_patterns_off", "pre_grad_depth",
    "settings_of_mode", "write_with",
]  # fmt: skip

log = logging.getLogger(__name__)


def compiled(module: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Graph compiled by Inductor. The settings hold for backward graphs too, which are compiled later."""
    from torch._inductor.compile_fx import compile_fx

    run = cast("Callable[..., Any]", compile_fx(module, list(inputs), config_patches=settings))
    # It takes its arguments one by one, but carries the mark of the function within, which takes a list. Dynamo knows;
    # its minifier (TORCHDYNAMO_REPRO_AFTER) goes by the mark.
    if getattr(run, "_boxed_call", False):
        run._boxed_call = False  # type: ignore[attr-defined]
    return run


def is_packaging() -> bool:
    """Whether Inductor writes a package of AOTInductor, which runs without this one."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


def pre_grad_depth() -> int:
    """Number of nested graphs that Inductor is in, the present one included, during passes before autograd; 0 outside
    of these. A pass gets only its graph, so this counts the frames of the recursive function."""
    depth, frame = 0, sys._getframe()
    while frame := frame.f_back:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
    return depth


def hash_of_files(paths: Sequence[str]) -> str:
    """Hash of the contents of files, and of torch's version."""
    return get_hash_for_files(tuple(paths)).hex()


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses for CPUs. Raises an exception of torch's where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


Write = Callable[[Any, Any], str]
"""(node, wrapper) -> the call as Python code."""


def write_with(operator: str, write: Write) -> None:
    """Let Inductor's Python code have other text for the calls of an operator ("torch.ops.fusion.x.default"); does
    nothing with versions of torch that cannot be extended so."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    def written(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        if V.graph.fx_wrapper:  # it makes a graph, not code
            writeline(ExternKernelAllocLine(wrapper, node))  # type: ignore[arg-type]
        else:
            writeline(f"{wrapper.declare}{node.get_name()} = {write(node, wrapper)}{wrapper.ending}")

    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(operator, CustomCodegen(python=written))


_PATTERNS = "torch._inductor.fx_passes.fuse_attention"
_unmatched: weakref.WeakSet[Graph] = weakref.WeakSet()
"""The graphs that Inductor's attention patterns are kept off."""


def keep_attention_patterns_off(graph: Graph) -> None:
    """Keep attention patterns off a graph. Inductor's pass is patched once to check its graph, so that nothing has to
    be restored: neither after an error on the way to that pass nor for another thread's graph. Without it, attentions
    that are left to Inductor would be matched by the class of an operation instead of its meaning."""
    from torch._inductor.fx_passes import joint_graph

    _unmatched.add(graph)
    patterns = joint_graph.pass_patterns[0]
    if getattr(patterns.apply, "func", None) is not _apply:
        patterns.apply = functools.partial(_apply, patterns)  # type: ignore[method-assign]


def _apply(patterns: Any, graph: Graph | GraphModule) -> int:
    """`patterns.apply(graph)`, without attention patterns for graphs that are marked so."""
    unmatched = getattr(graph, "graph", graph) in _unmatched
    return type(patterns).apply(_without_attention(patterns) if unmatched else patterns, graph)


def _without_attention(full: Any) -> Any:
    """Pass with all other patterns; runs after Inductor has registered them."""
    filtered = copy.copy(full)
    filtered.patterns = type(full.patterns)(list)
    dropped = 0
    for key, entries in full.patterns.items():
        remaining = [entry for entry in entries if not _is_attention_pattern(entry)]
        dropped += len(entries) - len(remaining)
        filtered.patterns[key] = remaining
    every = itertools.chain.from_iterable(full.patterns.values())
    if not dropped and any(_PATTERNS in str(inspect.getmodule(entry.extra_check)) for entry in every):
        log.warning("could not take Inductor's fuse_attention patterns out; unfused attentions may be matched by them")
    return filtered


def _is_attention_pattern(entry: Any) -> bool:
    check = entry.extra_check
    if not inspect.isfunction(check):
        return False
    inner = inspect.getclosurevars(check).nonlocals.get("extra_check")
    return _PATTERNS in (getattr(check, "__module__", ""), getattr(inner, "__module__", ""))
