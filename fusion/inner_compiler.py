"""Inner compiler: compiles the graph with its calls of fused attentions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fusion.options import Options
from fusion.passes import marks, nodes
from fusion.passes.tensors import dtensor


def compile_rest(module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: Any) -> Callable[..., Any]:
    """Compile a graph, fused attentions included as calls of `fusion::attention`, with the inner compiler."""
    if options.inner == "eager":
        return module.forward
    if options.inner == "aot_eager":
        from fusion.torch_private.dynamo import aot_eager

        return aot_eager(module, example_inputs)
    from fusion import inductor_passes, linear
    from fusion.runtime.specialized import register_inductor_codegen
    from fusion.torch_private import inductor

    register_inductor_codegen()
    for node in module.graph.find_nodes(op="placeholder"):
        if "example_value" in node.meta:  # Dynamo's; the other was traced without gradients
            node.meta.pop("val", None)
    has_dtensors = any(marks.dtensor(node) or dtensor.is_dtensor(nodes.fake(node)) for node in module.graph.nodes)
    settings = (inductor.settings_of_mode(mode) if mode else {}) | inductor_passes.below_rewrite(has_dtensors)
    return inductor.compiled(module, example_inputs, settings | linear.settings(module, options.linear))
