"""Inner compiler of the graph with its calls of fused attentions; tangents and certificates around what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import GraphModule

from fusion.approximate import certificates
from fusion.errors import OptionError
from fusion.options import Options
from fusion.passes import marks, nodes
from fusion.torch_private.autograd import is_within_dual_level
from fusion.torch_private.dynamo import lookup_backend
from fusion.torch_private.tensors import is_dtensor


def compile_rest(module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: Any) -> Callable[..., Any]:
    """Compile a graph, fused attentions included as calls of `fusion::attention`, with the inner compiler.

    Raises OptionError where a backend of the user's returns nothing that can be called."""
    if options.inner == "eager":
        assert module.code  # written now; `forward` would else stay the one that writes it, and passes calls on
        return module.forward
    from fusion import inductor_passes, linear
    from fusion.runtime.specialized import register_inductor_codegen
    from fusion.torch_private import inductor

    for node in module.graph.find_nodes(op="placeholder"):
        if "example_value" in node.meta:  # Dynamo's; the other was traced without gradients
            node.meta.pop("val", None)
    has_dtensors = any(marks.dtensor(node) or is_dtensor(nodes.fake(node)) for node in module.graph.nodes)
    settings = inductor_passes.below_rewrite(has_dtensors)
    if options.inner == "inductor":
        register_inductor_codegen()
        settings = (inductor.settings_of_mode(mode) if mode else {}) | settings
        settings |= linear.settings(module, options.linear)
        return inductor.compiled(module, example_inputs, settings)
    compiler = lookup_backend(options.inner)
    with inductor.config.patch(settings):  # many backends call Inductor in the end
        compiled = compiler(module, list(example_inputs))
    if not callable(compiled):
        raise OptionError(
            f"option 'inner' is {options.inner!r}, which returned {compiled!r}; it must return a callable."
        )
    return compiled


def with_tangents(compiled: Callable[..., Any], graph: GraphModule) -> Callable[..., Any]:
    """Compiled graph that runs the original graph, operation by operation, where an argument has a tangent.

    The code of an inner compiler computes no tangents, without any error. The graph itself does: torch's operations
    have theirs, and so have the fused attentions (`fusion.runtime.derivatives`).
    """

    def run(*arguments: Any) -> Any:
        tensors = (argument for argument in arguments if isinstance(argument, Tensor))
        if is_within_dual_level() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            return graph(*arguments)
        return compiled(*arguments)

    for name in ("named_parameters", "named_buffers", "zero_grad"):  # torch's minifier asks for them
        setattr(run, name, getattr(graph, name))
    return run


def with_certificates(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled graph whose calls begin a new record of certificates."""

    def run(*arguments: Any) -> Any:
        certificates.begin()
        return compiled(*arguments)

    return run
