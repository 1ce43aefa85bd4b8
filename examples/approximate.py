"""Approximate attention with certificates: measured error and time against N, and where the exact kernel runs.

Polynomial features on scores that are small, and on plain random scores, which they cannot help: there the exact kernel
runs, and the certificate says so. Writes approximate.png.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion

HEADS, D = 4, 16
LENGTHS = (1024, 2048, 4096, 8192)
EPSILON = 1e-2


def small(n: int) -> tuple[Tensor, ...]:
    """Vectors of norm at most 1: every score lies between -1 and 1."""
    q, k, v = torch.randn(3, 1, HEADS, n, D)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v


def plain(n: int) -> tuple[Tensor, ...]:
    """Standard normal vectors."""
    q, k, v = torch.randn(3, 1, HEADS, n, D)
    return q * D**0.5, k, v


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


CASES: tuple[tuple[str, Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]], ...] = (
    ("small scores", small, unscaled),
    ("plain random", plain, scaled),
)


def milliseconds(calls: list[Callable[[], object]], repeats: int = 5) -> list[float]:
    """Median time of each call, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seen.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


def measure(make: Callable, function: Callable[..., Tensor]) -> list[dict[str, float]]:
    """One row per length: times of exact and approximate, measured and certified error."""
    rows = []
    torch._dynamo.reset()
    exact = torch.compile(function, backend="fusion", options={"inner": "eager"}, dynamic=True)
    options = {"inner": "eager", "approximate": "polynomial", "epsilon": EPSILON}
    approximate = torch.compile(function, backend="fusion", options=options, dynamic=True)
    for n in LENGTHS:
        q, k, v = make(n)
        reference, found = exact(q, k, v), approximate(q, k, v)
        certificates = fusion.last_certificates()
        error = float((found - reference).norm(dim=-1).max())
        certified = max(c.output_error for c in certificates)
        # One rounding of float32 is no part of the certificate.
        assert error <= certified + 1e-4, (n, error, certified)
        exact_ms, ours_ms = milliseconds([lambda: exact(q, k, v), lambda: approximate(q, k, v)])  # noqa: B023
        ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
        rows.append({"n": n, "exact": exact_ms, "ours": ours_ms, "error": error, "certified": certified, "ran": ran})
        text = "" if ran else f"  exact: {certificates[0].reason}"
        print(f"  {n:6}  {exact_ms:8.2f}  {ours_ms:8.2f}  {error:10.1e}  {certified:10.1e}  {ran}/{HEADS}{text}")
    return rows


def plot(results: list[tuple[str, list[dict[str, float]]]], path: str) -> None:
    """Time and error against N."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for title, rows in results:
        n = [row["n"] for row in rows]
        (line,) = left.loglog(n, [row["ours"] for row in rows], marker="o", label=title)
        left.loglog(n, [row["exact"] for row in rows], linestyle=":", color=line.get_color())
        if any(row["ran"] for row in rows):
            right.loglog(
                n, [row["error"] for row in rows], marker="o", color=line.get_color(), label=f"{title}: measured"
            )
            right.loglog(
                n, [row["certified"] for row in rows], linestyle="--", color=line.get_color(), label="certified"
            )
    left.set(xlabel="N", ylabel="ms", title="time (dotted: exact)")
    right.set(xlabel="N", ylabel="error of an output row", title="error")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = []
    for title, make, function in CASES:
        print(f"{title}, epsilon {EPSILON:g}, {HEADS} heads, d = {D}")
        print("       N  exact ms   ours ms    measured   certified  approximate heads")
        results.append((title, measure(make, function)))
    print("\nthe last call's certificates:")
    for certificate in fusion.last_certificates():
        print(" ", certificate)
    path = sys.argv[1] if len(sys.argv) > 1 else "approximate.png"
    plot(results, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
