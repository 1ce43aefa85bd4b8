"""The inner compiler: what makes the rest of the model run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fusion.options import Options


def compile_rest(module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: Any) -> Callable[..., Any]:
    """Compile a graph, fused attentions included as calls of `fusion::attention`, with the inner compiler."""
    if options.inner == "eager":
        return module.forward
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, example_inputs)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else None
    return compile_fx(module, list(example_inputs), config_patches=patches)
