"""Linear layers on a CPU in float32: products by MKL and by oneDNN, and whole models with either.

    python benchmarks/linear.py products
    python benchmarks/linear.py models [--models bert vit gpt2 t5] [--dtype float32] [--seconds 20] [--busy]

products: GFLOP/s of the forward and of both products of the backward, as graphs have them, by MKL and by the operator
that fusion puts there; errors are shares of what the project's rule allows beside MKL. models: inference at N = 512 (of
images 197); eager, Inductor, fusion with all products left to MKL, and fusion, in turns within one process. Medians are
printed, the shortest in brackets, with the error against float64, what is allowed, and the time of the first call.
Training: benchmarks/train_models.py. --busy: one thread, and the processor time that it takes, which barely depends on
what else the machine does.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # whole models alternate between Inductor's OpenMP and torch's

import torch

import fusion
import results
from fusion.exactness import errors
from fusion.linear import speeds
from measuring import Entry, allowed_error, interleave, prepare
from models import MODELS, Model, reference

SIZES = ((512, 768, 768), (512, 768, 3072), (512, 3072, 768), (197, 768, 768), (1024, 768, 3072), (512, 1024, 2816),
         (128, 256, 256), (64, 256, 1024), (16, 768, 3072), (1, 768, 3072), (512, 4096, 4096))  # fmt: skip
"""m, k and n of layers."""
CONTESTANTS = {"eager": None, "Inductor": ("inductor", {}), "fusion, MKL": ("fusion", {"linear": "never"}),
               "fusion": ("fusion", {})}  # fmt: skip


def products(seconds: float, clock: Callable[[], float]) -> None:
    """A table of products."""
    product = torch.ops.fusion.linear
    for m, k, n in SIZES:
        x, w, grad = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        cells = []
        for name, left, right in (("forward", x, w), ("dX", grad, w.t()), ("dW", grad.t(), x.t())):
            mkl = Entry(name="MKL", call=lambda left=left, right=right: left @ right.t())
            own = Entry(name="oneDNN", call=lambda left=left, right=right: product(left, right, None, True))
            interleave([mkl, own], seconds=seconds, clock=clock)
            rates = [f"{2e-9 * m * k * n / min(entry.times):4.0f}" for entry in (mkl, own)]
            share = errors(product(left, right, None, True), left @ right.t(), left.double() @ right.double().t()).share
            picks = speeds.onednn_pays(*left.shape, len(right), 0, torch.get_num_threads())
            cells.append(f"{name} {' '.join(rates)} {share:.2f}{'*' if picks else ' '}")
        print(f"{m:5}{k:5}{n:5}   {'   '.join(cells)}", flush=True)


def model(name: str, described: Model, dtype: torch.dtype, seconds: float, clock: Callable[[], float]) -> None:
    """A line for each contestant."""
    torch._dynamo.reset()
    x = described.inputs(512 if 512 in described.lengths else described.lengths[0])
    exact = reference(described.make, x, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    plain = described.make("eager").to(dtype)
    allowed = allowed_error(plain(x), exact)

    def make(backend):
        run = plain if backend is None else torch.compile(plain, backend=backend[0], options=backend[1], dynamic=False)
        return functools.partial(run, x)

    entries = [Entry(name=contestant) for contestant in CONTESTANTS]
    for entry in entries:
        torch._dynamo.reset()
        prepare(entry, functools.partial(make, CONTESTANTS[entry.name]), exact, allowed)
    interleave(entries, seconds=seconds, rounds=5, clock=clock)
    for entry in entries:
        took = f"{1e3 * (entry.median or 0):7.1f} ms ({1e3 * min(entry.times, default=0):.1f})"
        error = f"error {entry.error:.1e} of {allowed:.1e}" if entry.error is not None else ""
        print(
            f"{name:6}{entry.name:12}{took:20} {error}, first call {entry.first_call or 0:.1f} s {entry.note}",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "models"])
    parser.add_argument("--models", nargs="+", default=["bert", "vit", "gpt2", "t5"], choices=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=20.0, help="per model; a fiftieth of it per product")
    parser.add_argument("--busy", action="store_true", help="processor time of one thread")
    options = parser.parse_args()
    clock = time.process_time if options.busy else time.perf_counter
    if options.busy:
        torch.set_num_threads(1)
    print(results.heading(f"Linear layers, {options.what}"), end="")
    print(f"{torch.get_num_threads()} threads; measured: {speeds.of_threads(torch.get_num_threads())}\n", flush=True)
    if options.what == "products":
        print("    m    k    n   GFLOP/s by MKL, by oneDNN, share of the allowed error; * where oneDNN is chosen")
        products(options.seconds / 50, clock)
        return
    for name in options.models:
        model(name, MODELS[name], getattr(torch, options.dtype), options.seconds, clock)


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
