"""Graphs and their traces: `make_fx` with custom proxies, Dynamo's metadata in graphs, and modes of a thread that see
each call (`TorchFunctionMode`, the profiler).

`torch.fx.experimental` has no underscore, but no promise either, so it is in this module as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.proxy import _COPY_META_FIELDS, Proxy
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode

from fusion.torch_private.tensors import tree_map

__all__ = [
    "ORIGINS", "carry_source", "current_node", "current_tracer", "disable_proxy_modes_tracing", "has_source",
    "is_lifted", "is_plain", "is_watched", "lazy_module", "make_fx", "node_of", "rename", "reparametrized",
    "short_path", "stack_frames", "stand_for", "track", "untraced", "updated", "with_tracer", "without_function_modes",
    "without_functions", "written",
]  # fmt: skip

ORIGINS = ("stack_trace", *_COPY_META_FIELDS)
"""The annotations of a node that say where in the model it comes from."""
_PRE_DISPATCH = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)


def current_tracer() -> Any:
    """The tracer of the running `make_fx`; None outside of one."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def with_tracer(tracer: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which operators are traced below autograd and the levels of torch.func, and no longer above them."""
    return ProxyTorchDispatchMode(tracer, "fake")


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Context in which nothing is traced. (Taking the trace's mode off and putting it back, as
    `disable_proxy_modes_tracing` does, clears the caches of all operators.)"""
    with torch._C._ExcludeDispatchKeyGuard(_PRE_DISPATCH), torch._C.DisableTorchFunction():
        yield


def written(tracer: Any, kind: str, target: Any, args: Any, kwargs: Any) -> Proxy:
    """Write a call with traced arguments into the traced graph. kind: "call_function" or "call_method"."""
    return tracer.create_proxy(kind, target, *tree_map(tracer.unwrap_proxy, (args, kwargs)))


def track(value: Any, proxy: Proxy, tracer: Any) -> Any:
    """Value that the proxy stands for in the trace from now on."""
    return track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def stand_for(tensor: torch.Tensor, node: Node, tracer: Any) -> None:
    """`track` for one tensor, without looking for components."""
    set_proxy_slot(tensor, tracer, _ProxyTensor(Proxy(node, tracer), None))


def node_of(tensor: Any, tracer: Any) -> tuple[Node, torch.Tensor | None] | None:
    """Node that stands for a tensor, and its values where the trace knows them; None for an unknown tensor."""
    entry = tracer.tensor_tracker.get(tensor)
    return None if entry is None else (entry.proxy.node, entry.constant)


def lazy_module(root: torch.nn.Module | Mapping[str, Any], graph: Graph) -> GraphModule:
    """Module whose Python code is generated when it is called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def reparametrized(module: torch.nn.Module, state: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which a module has other parameters and buffers: `torch.func.functional_call` for several calls."""
    return _reparametrize_module(module, dict(state))


current_node = torch.fx.Interpreter._set_current_node
"""Context in which traced nodes get the annotations of a node that an interpreter runs."""


rename = Node._rename
"""Give a node a name, or a similar one where that is taken."""


updated = ExportedProgram._update
"""Exported program with another graph, and unchanged state, dynamic shapes and verifiers."""


def is_plain(graph: Graph) -> bool:
    """Whether a graph takes its inputs one by one: that of an exported program's module packs them."""
    return type(graph._codegen) is torch.fx.graph.CodeGen


def is_lifted(node: Node) -> bool:
    """Whether a node reads a constant: a tensor that was created while its graph was traced or exported, without other
    references. Parameters and buffers are read in the same way, so constants are recognised by the name that torch
    gives."""
    return node.op == "get_attr" and str(node.target).startswith(("_tensor_constant", "lifted_tensor", "_lifted"))


def has_source(node: Node) -> bool:
    """Whether Dynamo made this input of a graph."""
    return hasattr(node, "_dynamo_source")


def user_path(node: Node) -> str:
    """Names by which the user's code reads an input of Dynamo's graph, e.g. "self.attn.bias" where the source is
    "L['self']._modules['attn']._buffers['bias']"; "" where it has no source. A module of torch's own, as
    `nn.Sequential`, is "L['fn']" in a function of Dynamo's, which is left out."""
    name: Any = getattr(getattr(node, "_dynamo_source", None), "name", "")
    source = re.sub(r"^L\['fn'\](?=\._(modules|parameters|buffers)\b)", "", str(name() if callable(name) else name))
    parts = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", source)
    names = [first or second for first, second in parts]
    return ".".join(n for n in names if n not in ("_modules", "_parameters", "_buffers", "__dict__"))


def user_name(node: Node) -> str:
    """Last name of `user_path`, with an index behind it, as in "tables_0"."""
    *_, last = parts = user_path(node).split(".")
    return "_".join(parts[-2:]) if last.isdigit() else last


class Frame(NamedTuple):
    """One call in a stack trace. place: "file.py:12 in forward: code"; without the code where there is no file."""

    file: str
    function: str
    place: str


def short_path(file: str) -> str:
    """A file's path from the working directory, or as `import` finds it, where that leads to the same file."""
    try:
        return _short_path(file, (os.getcwd(), *sys.path))
    except OSError:  # the working directory is gone
        return file


@functools.lru_cache(maxsize=1024)
def _short_path(file: str, folders: tuple[str, ...]) -> str:
    for folder in sorted(folders, key=lambda path: not path.endswith("-packages")):
        short = file.removeprefix(os.path.join(folder, ""))
        first = next((other for other in folders if os.path.exists(os.path.join(other, short))), None)
        if short != file and first == folder:
            return short
    return file


def stack_frames(node: Node) -> list[Frame]:
    """Calls in the stack trace that Dynamo recorded with a node, the innermost last."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)(?:\n(?!\s*File ")\s*(.*))?', trace)
    of_modes = next((k for k, frame in enumerate(frames) if frame[2] == "__torch_function__"), 0)  # of a default device
    return [
        Frame(file, function, f"{short_path(file)}:{line} in {function}: {code.strip()}".removesuffix(": "))
        for file, line, function, code in frames[: of_modes or None]
    ]


def carry_source(origin: Node, target: Node) -> None:
    """Copy the source of one input to another. Without it, AOTAutograd does not know parameters from inputs."""
    if has_source(origin):
        target._dynamo_source = origin._dynamo_source  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Context in which no mode of the caller's (a default device, say) changes a call. `torch.overrides` can only add
    modes; without this, tensors of an analysis would be created on the caller's device."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


without_functions = torch._C.DisableTorchFunction
"""Context in which neither modes nor subclasses see uses of a tensor. Without it, reading the form of tensors in a
trace takes most of the time that copying a repeated call saves."""


def is_watched() -> bool:
    """Whether a profiler or a function mode has to see each operator that is called."""
    return profiler._is_profiler_enabled or torch._C._is_torch_function_mode_enabled()
