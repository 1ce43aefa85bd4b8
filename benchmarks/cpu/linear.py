"""Products of linear layers on a CPU in float32, by MKL and by oneDNN.

    python -m benchmarks.cpu.linear [products | deep] [--seconds 0.4] [--busy]

products: GFLOP/s of the forward and of both products of the backward, as graphs have them, by MKL and by the operator
that fusion puts there; errors are shares of what the project's rule allows beside MKL. deep: milliseconds of sums of
3072 terms, by MKL, by oneDNN in parts as fusion computes them, in parts that are dense already, and in one call. Whole
models: `benchmarks.models.runtimes`; training: `benchmarks.models.training`. --busy: one thread, and the processor time
that it takes, which barely depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import results
from benchmarks.common.measuring import Entry, interleave
from fusion.exactness import errors
from fusion.linear import products as products_of
from fusion.linear import speeds
from fusion.process import retain_freed_memory
from fusion.torch_private import devices

SIZES = ((512, 768, 768), (512, 768, 3072), (512, 3072, 768), (197, 768, 768), (1024, 768, 3072), (512, 1024, 2816),
         (128, 256, 256), (64, 256, 1024), (16, 768, 3072), (1, 768, 3072), (512, 4096, 4096))  # fmt: skip
"""m, k and n of layers."""


def products(seconds: float, clock: Callable[[], float]) -> None:
    """A table of products."""
    product = torch.ops.fusion.linear
    for m, k, n in SIZES:
        x, w, grad = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        cells = []
        for name, left, right in (("forward", x, w), ("dX", grad, w.t()), ("dW", grad.t(), x.t())):
            mkl = Entry(name="MKL", call=lambda left=left, right=right: left @ right.t())
            own = Entry(name="oneDNN", call=lambda left=left, right=right: product(left, right, None, "", True))
            interleave([mkl, own], seconds=seconds, clock=clock)
            rates = [f"{2e-9 * m * k * n / min(entry.times):4.0f}" for entry in (mkl, own)]
            share = errors(
                product(left, right, None, "", True), left @ right.t(), left.double() @ right.double().t()
            ).share
            picks = speeds.onednn_pays(*left.shape, len(right), 0, torch.get_num_threads())
            cells.append(f"{name} {' '.join(rates)} {share:.2f}{'*' if picks else ' '}")
        print(f"{m:5}{k:5}{n:5}   {'   '.join(cells)}", flush=True)


def deep(seconds: float, clock: Callable[[], float]) -> None:
    """A table of deep sums, with another weight in every call, as in a model."""
    for m in (64, 128, 197, 512, 2048):
        x, weights = torch.randn(m, 3072), [torch.randn(768, 3072) for _ in range(6)]
        width = products_of.width(3072)
        dense = [[part.contiguous() for part in matrix.split(width, 1)] for matrix in (x, *weights)]

        def by_parts(w: list[Tensor], x: list[Tensor] = dense[0]) -> Tensor:
            out = devices.onednn_product(x[0], w[0], None)
            for left, right in zip(x[1:], w[1:], strict=True):
                out = devices.onednn_product_and(left, right, out)
            return out

        calls: dict[str, tuple[Callable[[Any], Tensor], Sequence[Any]]] = {
            "MKL": (lambda w, x=x: x @ w.t(), weights),
            "in parts": (lambda w, x=x: products_of.product(x, w, None), weights),
            "dense parts": (by_parts, dense[1:]),
            "in one": (lambda w, x=x: devices.onednn_product(x, w, None), weights),
        }
        entries = [
            Entry(
                name=name, call=functools.partial(lambda function, w: function(next(w)), function, itertools.cycle(w))
            )
            for name, (function, w) in calls.items()
        ]
        interleave(entries, seconds=4 * seconds, clock=clock)
        print(f"{m:5} rows   " + "   ".join(f"{e.name} {1e3 * min(e.times):.2f}" for e in entries), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="products", choices=["products", "deep"])
    parser.add_argument("--seconds", type=float, default=0.4, help="per product")
    parser.add_argument("--busy", action="store_true", help="processor time of one thread")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
    print(results.heading("Linear layers, products"), end="")
    print(f"{torch.get_num_threads()} threads; measured: {speeds.of_threads(torch.get_num_threads())}\n", flush=True)
    clock = time.process_time if options.busy else time.perf_counter
    if options.study == "deep":
        retain_freed_memory()
        deep(options.seconds, clock)
        return
    print("    m    k    n   GFLOP/s by MKL, by oneDNN, share of the allowed error; * where oneDNN is chosen")
    products(options.seconds, clock)


if __name__ == "__main__":
    main()
