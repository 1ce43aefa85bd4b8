"""Random graphs of products, as modules, and the way of a graph below autograd without a C++ compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fusion.linear.redirect import ProductsPass
from fusion.linear.speeds import ROWS, SIZES, Speeds

WIDTHS = (1, 2, 7, 16, 33, 64, 100)
DEPTHS = (0, 500, 1030)
"""Of sums that are empty, or computed in parts."""


def given(mkl: float, own: float, overhead: float = 1e-5) -> Speeds:
    """Speeds of a processor on which the libraries do so many GFLOP/s, and a call of oneDNN takes a while."""
    flops = [2 * m * k * n for m in ROWS for k, n in SIZES]
    return Speeds(
        mkl=tuple(f / mkl / 1e9 for f in flops),
        onednn=tuple(overhead + f / own / 1e9 for f in flops),
        copy=1e-10,
        sweep=1e-10,
        apart=(4e-10, 1e-9),
        inside=(2e-10, 3e-10),
        turned=1e-10,
        threads=torch.get_num_threads(),
    )


def redirected(
    module: GraphModule, example_inputs: Any, always: bool = True, packed: bool = False
) -> Callable[..., Any]:
    """A backend: all products of the forward and the backward graph by oneDNN, everything else as eager runs it.
    always: also where it is slower; packed: parameters are packed."""

    def compiled(graph: GraphModule, _: Any) -> Callable[..., Any]:
        ProductsPass(always, packed=packed)(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiled, decompositions=select_decomp_table())(module, example_inputs)


class Products(torch.nn.Module):
    """A chain of products with random widths, kinds of operands, and what stands between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.width = self._width()
        self.steps: list[Callable[[Tensor], Tensor]] = []
        width = self.width
        for number in range(self.draw.randint(1, 4)):
            wide = self.draw.choice(DEPTHS) if self.draw.random() < 0.15 else self._width()
            step = self.draw.choice([self._linear, self._stored, self._added, self._batched, self._part, self._tied])
            self.steps.append(step(f"w{number}", width, wide, generator))
            width = width if step == self._tied else wide
            if self.draw.random() < 0.5:
                self.steps.append(self.draw.choice([F.gelu, F.relu, torch.sin, lambda x: x + x.mean(0)]))

    def _width(self) -> int:
        return self.draw.choice(WIDTHS)

    def _parameter(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
        """Weights as models begin with: chains of larger ones multiply the errors of what is before them."""
        scale = max(1, *shape[-2:]) ** -0.5 if len(shape) > 1 else 1.0
        self.register_parameter(name, torch.nn.Parameter(scale * torch.randn(shape, generator=generator)))

    def _linear(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        self._parameter(name, (n, k), generator)
        bias = self.draw.choice([None, "row", "number"])
        if bias:
            self._parameter(f"{name}_bias", (n,) if bias == "row" else (1,), generator)
        return lambda x: F.linear(x, getattr(self, name), getattr(self, f"{name}_bias").expand(n) if bias else None)

    def _stored(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        self._parameter(name, (k, n), generator)
        return lambda x: x @ getattr(self, name)

    def _added(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        self._parameter(name, (k, n), generator)
        self._parameter(f"{name}_added", self.draw.choice([(n,), (1, n), (1,)]), generator)
        beta, alpha = self.draw.choice([(1, 1), (1, 1), (0, 1), (0.5, 2)])
        return lambda x: torch.addmm(getattr(self, f"{name}_added"), x, getattr(self, name), beta=beta, alpha=alpha)

    def _batched(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        self._parameter(name, (self.draw.choice([1, 2]), k, n), generator)
        return lambda x: torch.bmm(x.expand(getattr(self, name).shape[0], *x.shape), getattr(self, name)).sum(0)

    def _part(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """A part of a larger parameter, which begins somewhere in it and has its strides."""
        self._parameter(name, (2 * n + 3, 2 * k + 5), generator)
        step, first = self.draw.choice([1, 2]), self.draw.randint(0, 3)

        def call(x: Tensor) -> Tensor:
            part = getattr(self, name)[first:, first:][:: step if n else 1, :: step if k else 1][:n, :k]
            return x @ part.mT

        return call

    def _tied(self, name: str, k: int, n: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """One parameter in two products, as it is and transposed."""
        self._parameter(name, (n, k), generator)
        return lambda x: F.linear(x, getattr(self, name)).tanh() @ getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def inputs(draw: random.Random, width: int) -> Callable[[], Tensor]:
    """Draws `[rows, width]` with strides of its own."""
    rows = draw.choice([0, 1, 2, 5, 31, 64, 520])
    return draw.choice(
        [
            lambda: torch.randn(rows, width),
            lambda: torch.randn(width, rows).mT,
            lambda: torch.randn(rows + 2, width + 9)[1 : rows + 1, 3 : width + 3],
            lambda: torch.randn(1, width).expand(rows, width),
        ]
    )
