"""The specs of the measured variants, as the passes find them in their plain functions."""

from __future__ import annotations

import torch

from benchmarks.common.rows import Problem, Row
from fusion import rewrite
from fusion.ir import AttentionSpec


def traced(row: Row, dtype: torch.dtype, d: int | None = None, N: int = 64, **options: object) -> AttentionSpec:
    """The spec of a variant; sizes but d are parameters of it. options: of the backend."""
    d = d or (128 if row.latent else 64)
    operands = Problem(H=8, N=N, d=d, dtype=dtype).tensors(row)

    class Attention(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return row.plain(*tensors)

    graph = rewrite(torch.export.export(Attention(), operands), options=options).graph
    (found,) = (node for node in graph.nodes if "fusion.attention" in str(node.target))
    (text,) = (arg for arg in found.args if isinstance(arg, str) and arg.startswith("{"))
    return AttentionSpec.from_json(text)
