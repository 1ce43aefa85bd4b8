"""Attention whose einsums are no plain products of matrices, on a CPU: the tied rows of an MSA Transformer, whose sums
are over two dimensions, and single queries with keys of their own, against Inductor and eager mode.

    python -m benchmarks.cpu.einsums [--seconds 4]

All of a row run in turns within one process; inference, float32.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.cpu.cascades import measured
from fusion.machine import machine as find_machine


def tied_rows(q, k, v):
    """[rows, columns, batch, heads, d]."""
    w = (torch.einsum("rinhd,rjnhd->hnij", q, k) * 0.1).softmax(-1)
    return torch.einsum("hnij,rjnhd->rinhd", w, v)


def edges(q, e):
    """[batch, nodes, d] and [batch, nodes, nodes, d], as in graph transformers."""
    w = (torch.einsum("bid,bijd->bij", q, e) * 0.3).softmax(-1)
    return torch.einsum("bij,bijd->bid", w, e)


def pooling(q, x):
    """A learned query, [d], over [batch, n, d]."""
    return torch.einsum("bn,bnd->bd", (torch.einsum("d,bnd->bn", q, x) * 0.3).softmax(-1), x)


def decoding(q, x):
    """[batch, heads, d] over [batch, heads, n, d]."""
    return torch.einsum("bhn,bhnd->bhd", (torch.einsum("bhd,bhnd->bhn", q, x) * 0.3).softmax(-1), x)


CASES = [
    *(
        (tied_rows, [(rows, columns, 1, 4, 32)] * 3)
        for rows, columns in ((4, 128), (16, 128), (32, 512), (64, 100), (128, 256))
    ),
    *((edges, [(b, n, d), (b, n, n, d)]) for b, n, d in ((2, 64, 16), (1, 256, 32))),
    *((pooling, [(d,), (b, n, d)]) for b, n, d in ((8, 512, 64), (64, 197, 128))),
    *((decoding, [(b, 8, 64), (b, 8, n, 64)]) for b, n in ((1, 2048), (16, 128))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}; medians in ms\n")
    print(f"| case | K | fusion | Inductor | eager | Inductor / fusion |\n|{'---|' * 6}")
    for function, shapes in CASES:
        ms = measured(function, [0.2 * torch.randn(shape) for shape in shapes], seconds)
        times = " | ".join(f"{value:.2f}" for value in ms.values())
        print(
            f"| {function.__name__} | {list(shapes[1])} | {times} | {ms['Inductor'] / ms['fusion']:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
