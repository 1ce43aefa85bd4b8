"""The inner compiler: what makes the rest of the model run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from fusion.options import Options
from fusion.passes import dtensor, marks, nodes


def compile_rest(module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: Any) -> Callable[..., Any]:
    """Compile a graph, fused attentions included as calls of `fusion::attention`, with the inner compiler."""
    if options.inner == "eager":
        return module.forward
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, list(example_inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from fusion import inductor_passes
    from fusion.runtime.bound import teach_inductor

    teach_inductor()
    for node in module.graph.find_nodes(op="placeholder"):
        if "example_value" in node.meta:  # Dynamo's; the other was traced without gradients
            node.meta.pop("val", None)
    has_dtensors = any(marks.dtensor(node) or dtensor.is_dtensor(nodes.value(node)) for node in module.graph.nodes)
    # Patches that are passed hold for backward graphs, too, which are compiled later.
    patches = (list_mode_options(mode) if mode else {}) | inductor_passes.below_rewrite(has_dtensors)
    compiled = cast("Callable[..., Any]", compile_fx(module, list(example_inputs), config_patches=patches))
    # It takes its arguments one by one, but carries the mark of the function within, which takes a list. Dynamo knows;
    # its minifier (TORCHDYNAMO_REPRO_AFTER) goes by the mark.
    if getattr(compiled, "_boxed_call", False):
        compiled._boxed_call = False
    return compiled
