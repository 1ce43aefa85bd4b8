"""`fusion.rewrite`: the rewrite as a plain pass, for graphs that something else runs, exports or stores.
`fusion.install`: the same as a pass of Inductor's, for `torch.compile(model)` without our backend."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.fx.traceback
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusion import inductor_passes
from fusion.backend import fuse
from fusion.errors import OptionError, RewriteError
from fusion.options import Options
from fusion.passes import nodes
from fusion.report.report import publish
from fusion.runtime.specialized import register_inductor_codegen
from fusion.torch_private import tensors, tracing
from fusion.torch_private.inductor import config
from fusion.torch_private.tensors import tree_leaves

Program = TypeVar("Program", GraphModule, ExportedProgram)


def rewrite(program: Program, *inputs: Any, options: Mapping[str, Any] | None = None) -> Program:
    """Program with its attentions as calls of `fusion::attention`; the argument is not changed.

    program: a `torch.fx.GraphModule`, with example inputs, or a `torch.export.ExportedProgram`, which has its own.
    options: of the backend; "inner" has no meaning here.

    A GraphModule is rewritten for the shapes and dtypes of the inputs, and checks them when it runs; its parameters and
    buffers keep their names. An ExportedProgram keeps its dynamic shapes, signature and state. Where nothing is fused,
    the program itself is returned. `fusion.collect_reports()` gets the report. A process that loads a saved program
    has to `import fusion` first: torch does not know `fusion::attention` otherwise.

    Both are taken to be run without gradients, which decides where fusing pays, unless the module, or dropout in the
    program, is in training mode; what is fused can be trained all the same.

    Raises RewriteError for anything else, and OptionError.
    """
    chosen = Options.parse(options)
    if isinstance(program, ExportedProgram):
        return _rewrite_exported(program, chosen)
    if isinstance(program, GraphModule):
        return _rewrite_module(program, inputs, chosen)
    raise RewriteError(
        f"rewrite was given a {type(program).__name__}; give a torch.fx.GraphModule or a torch.export.ExportedProgram, "
        'or use torch.compile(model, backend="fusion") for a model'
    )


def _for(options: Options, trained: bool) -> Options:
    """The options, in which nothing says that gradients are taken unless it was asked for or something is trained."""
    return options if trained or options.training != "auto" else replace(options, training="never")


def _rewrite_module(module: GraphModule, inputs: tuple[Any, ...], options: Options) -> GraphModule:
    if not tracing.is_plain(module.graph):
        raise RewriteError(
            "rewrite was given the module of an exported program, whose inputs are packed; give the ExportedProgram"
        )
    origins = module.graph.find_nodes(op="placeholder")
    if len(inputs) != len(origins):
        names = ", ".join(node.name for node in origins) or "none"
        raise RewriteError(
            f"rewrite was given {len(inputs)} example inputs for a graph that takes {len(origins)} ({names}); "
            "give one each"
        )
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    arguments = [*state.values(), *inputs]
    fused, report = fuse(_lifted(module, list(state), arguments), arguments, _for(options, module.training))
    publish(report)
    if not report.fused:
        return module
    placeholders = fused.graph.find_nodes(op="placeholder")
    _lower_state(module, fused, list(state), placeholders)
    _restore_placeholders(origins, fused, placeholders[len(state) :], inputs)
    fused.graph.lint()
    fused.recompile()
    fused.train(module.training)
    return fused


def _lifted(module: GraphModule, names: list[str], arguments: list[Any]) -> GraphModule:
    """The module with parameters and buffers as first arguments: values that they have today are no constants."""

    def run(*flat: Any) -> Any:
        state = dict(zip(names, flat, strict=False))
        with tracing.reparametrized(module, state), torch.fx.traceback.preserve_node_meta():
            return torch.fx.Interpreter(module).run(*flat[len(names) :])

    mode = tensors.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in arguments]
    lifted = tracing.make_fx(run, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    for node, value in zip(lifted.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = value
    return lifted


def _lower_state(origin: GraphModule, fused: GraphModule, names: list[str], placeholders: list[Node]) -> None:
    """Parameters and buffers as attributes again, under the names that they had and those only."""
    parameters, persistent = dict(origin.named_parameters(remove_duplicate=False)), origin.state_dict()
    first = next(node for node in fused.graph.nodes if node.op != "placeholder")
    for name, node in zip(names, placeholders, strict=False):
        owner, last = _owner(fused, name)
        if name in parameters:
            owner.register_parameter(last, parameters[name])
        else:
            owner.register_buffer(last, origin.get_buffer(name), persistent=name in persistent)
        if node.users:
            with fused.graph.inserting_before(first):
                read = fused.graph.get_attr(name)
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
        fused.graph.erase_node(node)


def _owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The submodule of the tensor `name`, created where it is missing, and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    return module, last


def _restore_placeholders(origins: list[Node], fused: GraphModule, nodes: list[Node], inputs: tuple[Any, ...]) -> None:
    """Arguments by their old names, each with a check that it is what the graph was rewritten for."""
    first = next(node for node in fused.graph.nodes if node.op != "placeholder")
    with fused.graph.inserting_before(first):
        for origin, node, value in zip(origins, nodes, inputs, strict=True):
            node.target, node.args = origin.target, origin.args
            tracing.rename(node, origin.name)
            fused.graph.call_function(require, (node, origin.name, *_form(value)))


def require(value: Any, name: str, expected: Any, dtype: torch.dtype | None) -> None:
    """Raise RewriteError unless a value is what its graph was rewritten for: (shape, dtype) of a tensor, or a value."""
    if (form := _form(value)) == (expected, dtype):
        return
    wanted, actual = (f"{dt} of shape {list(x)}" if dt is not None else repr(x) for x, dt in ((expected, dtype), form))
    raise RewriteError(f"this graph was rewritten for {name} = {wanted} and got {actual}; rewrite it again for that")


def _form(value: Any) -> tuple[Any, torch.dtype | None]:
    return (list(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (value, None)


torch.fx.node.has_side_effect(require)


def _rewrite_exported(program: ExportedProgram, options: Options) -> ExportedProgram:
    module = program.graph_module
    origins = module.graph.find_nodes(op="placeholder")
    inputs = [node.meta.get("val") for node in origins]
    guards = _guards(inputs)
    dropouts = filter(nodes.is_active_dropout, module.graph.nodes)
    trained = any(nodes.arguments(node).get("train", True) for node in dropouts)
    fused, report = fuse(module, inputs, _for(options, trained))
    if report.fused and _guards(inputs) != guards:
        report.notes.append(
            "left as it was: fusing would fix a size that the program leaves open; export it with that dimension static"
        )
        report.sites = []
    publish(report)
    if not report.fused:
        return program
    for origin, node in zip(origins, fused.graph.find_nodes(op="placeholder"), strict=True):
        node.target = origin.target
        tracing.rename(node, origin.name)
    _carry_attributes(module, fused)
    _complete_values(fused)
    fused.graph.lint()
    fused.recompile()
    return tracing.updated(program, fused, _signature(program, fused))


def _guards(inputs: list[Any]) -> int:
    """Number of conditions on symbolic sizes: one more, and the program would hold for fewer shapes."""
    for leaf in tree_leaves(inputs):
        if (environment := tensors.shape_environment(leaf)) is not None:
            return len(environment.guards) + len(environment.replacements)
    return 0


def _complete_values(fused: GraphModule) -> None:
    """meta["val"] on every call, which exported programs must have: of attentions that return their statistics too."""
    for node in fused.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            values = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            args, kwargs = values
            with tensors.detect_fake_mode(args[0]) or contextlib.nullcontext(), torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)


def _carry_attributes(origin: GraphModule, fused: GraphModule) -> None:
    """Submodules that control flow refers to."""
    for node in fused.graph.nodes:
        if node.op == "get_attr" and not hasattr(fused, str(node.target).split(".")[0]):
            name = str(node.target).split(".")[0]
            setattr(fused, name, getattr(origin, name))


def _signature(program: ExportedProgram, fused: GraphModule) -> Any:
    """The program's signature with the names of the new graph's results."""
    signature = copy.deepcopy(program.graph_signature)
    results: Any = fused.graph.output_node().args[0]
    for spec, result in zip(signature.output_specs, results, strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=result.name)
        elif isinstance(result, Node):
            spec.arg.name = result.name
    return signature


def install(options: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[Any]:
    """From now on `torch.compile(model)` fuses attentions: the rewrite becomes a pass of Inductor's, after those that
    others have put there.

    options: of our backend; they take the place of those of an earlier `install`. It holds for this thread, as all
    settings of Inductor's do, and for what is compiled later: a function that is compiled already stays as it is until
    `torch.compiler.reset()`. Models compiled with `backend="fusion"` go their own way.

    Returns a context manager, which brings back what was installed before; `uninstall` takes the pass out, too. Raises
    OptionError for options that do not exist, or that need the backend: `inner`, `approximate`.
    """
    chosen, previous = _parsed(options), inductor_passes.installed()
    uninstall()
    _put(_settings(chosen))
    installed = contextlib.ExitStack()
    if previous is not None:
        installed.callback(lambda: _put(_settings(previous)))
    installed.callback(uninstall)
    return installed


def uninstall() -> None:
    """Take out what `install` put in. What others put there stays, and so does what is compiled."""
    _put(inductor_passes.without_ours())


def inductor_options(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of Inductor that `install` makes, for one model: `torch.compile(model, options=...)`.

    options: of our backend. Passes that stand in `torch._inductor.config` at this moment are part of the settings, and
    run before ours. Raises OptionError as `install` does.
    """
    return _settings(_parsed(options))


def _parsed(options: Mapping[str, Any] | None) -> Options:
    chosen = Options.parse(options)
    if chosen.inner == "inductor" and chosen.approximate is None:
        return chosen
    raise OptionError(
        "a pass of Inductor's was asked for with inner or approximate, which act around a compiled graph; "
        f"use torch.compile(model, backend='fusion', options={dict(options or {})!r})."
    )


def _settings(options: Options) -> dict[str, Any]:
    register_inductor_codegen()
    return inductor_passes.with_rewrite(options, _rewritten)


def _rewritten(graph: GraphModule, inputs: Sequence[Any], options: Options) -> GraphModule | None:
    """The graph with its attentions fused, None where there are none; its report goes to those who collect them."""
    fused, report = fuse(graph, inputs, options)
    publish(report)
    return fused if report.fused else None


def _put(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)
