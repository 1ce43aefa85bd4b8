"""The rewrite outside torch.compile: as an FX pass, in an exported program, saved and loaded, and as MLIR.

    python examples/export.py

Prints what became of each program, and how far its results are from the original's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.export import Dim

import fusion


class Block(torch.nn.Module):
    """Causal attention with four heads, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, N, 64]."""
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        position = torch.arange(x.shape[1])
        scores = (q @ k.mT / 4).masked_fill(position[None] > position[:, None], float("-inf"))
        return self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class Layer(torch.nn.Module):
    """One that torch.fx can trace by itself: it looks at no shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, N, 64]."""
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 8, -1) @ self.v(x)


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """The largest difference, as text."""
    return f"{(a - b).abs().max().item():.1e}"


@torch.no_grad()
def graph_module() -> None:
    """A GraphModule in, a GraphModule out, for the shapes of the inputs given."""
    x = torch.randn(2, 100, 64)
    module = torch.fx.symbolic_trace(Layer())
    fused = fusion.rewrite(module, x)
    print(f"GraphModule       {len(module.graph.nodes)} nodes -> {len(fused.graph.nodes)};", end=" ")
    print(f"same state dict: {set(fused.state_dict()) == set(module.state_dict())};", end=" ")
    print(f"difference {difference(fused(x), module(x))}")


@torch.no_grad()
def exported_program() -> None:
    """An ExportedProgram in, an ExportedProgram out: dynamic shapes stay dynamic."""
    shapes = ({0: Dim("batch", min=2), 1: Dim("length", min=2)},)
    program = torch.export.export(Block().eval(), (torch.randn(2, 100, 64),), dynamic_shapes=shapes)
    fused = fusion.rewrite(program)
    for length in (100, 333):
        x = torch.randn(3, length, 64)
        print(f"ExportedProgram   length {length}: difference {difference(fused.module()(x), program.module()(x))}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "block.pt2"
        torch.export.save(fused, path)  # whoever loads it imports fusion.runtime.op first, which defines the operator
        loaded = torch.export.load(path)
        size = path.stat().st_size / 1e3
    x = torch.randn(2, 50, 64)
    print(f"saved and loaded  {size:.0f} kB: difference {difference(loaded.module()(x), program.module()(x))}")


@torch.no_grad()
def export_of_a_fused_module() -> None:
    """torch.export of what was rewritten before: the operator goes through like any other."""
    x = torch.randn(2, 100, 64)
    fused = fusion.rewrite(torch.fx.symbolic_trace(Layer()), x)
    program = torch.export.export(fused, (x,))
    calls = [str(node.target) for node in program.graph.nodes if "fusion.attention" in str(node.target)]
    print(f"exported later    holds {', '.join(calls)}: difference {difference(program.module()(x), fused(x))}")


@torch.no_grad()
def mlir_module() -> None:
    """The whole block as one MLIR module: linalg for the rest of it, attention as a function of its own."""
    block, x = Block().eval(), torch.randn(2, 100, 64)
    program = fusion.export_mlir(block, x)
    print(f"MLIR module       {len(str(program).splitlines())} lines, {', '.join(program.attentions)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    graph_module()
    exported_program()
    export_of_a_fused_module()
    mlir_module()
