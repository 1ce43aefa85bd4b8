"""Decoding over keys in order and in pages, all of them live and few: microseconds of one query, least and median.

    python -m benchmarks.cpu.pages [--keys 2048 8192] [--seconds 0.5]

K and V are [1, H, N, d] ("order"), pages [pages, 16, H, d] ("pages") or [pages, H, 16, d] ("by head"), in any order. A
boolean mask leaves the first keys: all, or an eighth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import fusion  # noqa: F401  registers the backend

PAGE, D = 16, 64
HEADS = ((2, 4), (8, 4), (8, 1))  # key heads, query heads of each
KEYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "order": lambda x, table: x,
    "pages": lambda x, table: x[table].flatten(1, 2).transpose(1, 2),
    "by head": lambda x, table: x[table].transpose(1, 2).flatten(2, 3),
}
SHAPES = {
    "order": lambda heads, keys: (1, heads, keys, D),
    "pages": lambda heads, keys: (keys // PAGE, PAGE, heads, D),
    "by head": lambda heads, keys: (keys // PAGE, heads, PAGE, D),
}


def attention(kept: str, group: int) -> Callable[..., torch.Tensor]:
    """Over a cache that is kept like this, as transformers calls it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, mask: torch.Tensor):
        k, v = (KEYS[kept](x, table).repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def microseconds(run: Callable[..., object], given: Sequence[torch.Tensor], seconds: float) -> str:
    run(*given)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(5):
            run(*given)
        times.append((time.perf_counter() - start) / 5e-6)
    return f"{min(times):8.1f} {statistics.median(times):8.1f}"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--seconds", type=float, default=0.5, help="time of a cell")
    parser.add_argument("--backends", nargs="+", default=["fusion", "inductor"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for heads, group in HEADS:
        for keys in arguments.keys:
            table = torch.randperm(keys // PAGE)[None]
            q = torch.randn(1, heads * group, 1, D)
            for kept, shape in SHAPES.items():
                torch._dynamo.reset()
                k, v = (torch.randn(shape(heads, keys)) for _ in range(2))
                found = {name: torch.compile(attention(kept, group), backend=name) for name in arguments.backends}
                for live in (keys, keys // 8):
                    given = q, k, v, table, (torch.arange(keys) < live)[None, None, None]
                    cells = [f"{name} {microseconds(run, given, arguments.seconds)}" for name, run in found.items()]
                    title = f"{heads * group}/{heads} heads, {keys} keys, {live} live, {kept}"
                    print(f"{title:45}", "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
