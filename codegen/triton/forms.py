"""Which forms of a loop a spec's GPU kernels can have."""

from __future__ import annotations

from fusion.codegen.triton.descriptors import boxes
from fusion.ir.expr import coordinates, loads
from fusion.ir.spec import AttentionSpec
from fusion.lowering.dead_rows import dead_rows_matter
from fusion.planning.head_dims import panelled


def may_specialize(spec: AttentionSpec, d: int, d_v: int) -> bool:
    """Whether there is a warp-specialised form that Triton compiles: one loop, all of whose tiles come by descriptors,
    on matrix units. Loads of masks and biases inside it fail or not from one version and spec to the next."""
    inside = [*loads(spec.score), *loads(spec.weight)]
    listed = spec.mask is not None and spec.mask.tile_live is not None
    return (
        {"q", "k", "v"} <= boxes(spec, d, d_v).keys()
        and max(panelled(d), panelled(d_v)) <= 256
        and spec.dtype != "float32"
        and not (listed or dead_rows_matter(spec) or any("j" in coordinates(load) for load in inside))
    )
