"""Products of linear layers on a CPU in float32, by MKL and by oneDNN.

    python -m benchmarks.cpu.linear [--seconds 0.4] [--busy]

GFLOP/s of the forward and of both products of the backward, as graphs have them, by MKL and by the operator that
fusion puts there; errors are shares of what the project's rule allows beside MKL. Whole models:
`benchmarks.models.runtimes`; training: `benchmarks.models.training`. --busy: one thread, and the processor time that it
takes, which barely depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.common import results
from benchmarks.common.measuring import Entry, interleave
from fusion.exactness import errors
from fusion.linear import speeds

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


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.4, help="per product")
    parser.add_argument("--busy", action="store_true", help="processor time of one thread")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
    print(results.heading("Linear layers, products"), end="")
    print(f"{torch.get_num_threads()} threads; measured: {speeds.of_threads(torch.get_num_threads())}\n", flush=True)
    print("    m    k    n   GFLOP/s by MKL, by oneDNN, share of the allowed error; * where oneDNN is chosen")
    products(options.seconds, time.process_time if options.busy else time.perf_counter)


if __name__ == "__main__":
    main()
