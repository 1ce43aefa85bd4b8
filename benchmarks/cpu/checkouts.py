"""Kernels of another checkout beside those of this one: the same calls, one process for each, in turns.

    git worktree add ../before COMMIT
    FUSION_MAX_ISA=avx512 python -m benchmarks.cpu.checkouts ../before --dtypes float32

Least times of all turns in milliseconds, of one thread and two heads (decoding: one query of eight heads); `ratio` is
this checkout's over the other's, `median` the median of the turns' ratios. Two of one commit show the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fusion  # noqa: F401  that of the checkout that PYTHONPATH names

LENGTHS, HEAD_SIZES, CACHES, TURN, TURNS = (128, 512, 1024, 4096), (64, 128), (1024, 16384), 0.02, 10
OPTIONS = {"inner": "eager", "strict": True}
CAUSAL = "torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()"
MASKS = {"full": "s", "causal": f"s.masked_fill(~{CAUSAL}, -torch.inf)"}


def compiled(mask: str) -> Callable[..., torch.Tensor]:
    """Attention, compiled: new code each time, as Dynamo compiles one function for eight shapes and no more."""
    names: dict = {"torch": torch}
    text = f"s = q @ k.mT * q.shape[-1] ** -0.5\n    return ({MASKS[mask]}).softmax(-1) @ v"
    exec(f"def attend(q, k, v):\n    {text}", names)
    return torch.compile(names["attend"], backend="fusion", dynamic=False, options=OPTIONS)


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of each row of the table."""
    for d in HEAD_SIZES:
        for n in LENGTHS:
            for mask in MASKS:
                yield f"{mask} N={n} d={d}", forward(mask, *(torch.randn(1, 2, n, d, dtype=dtype) for _ in range(3)))
            operands = [torch.randn(1, 2, n, d, dtype=dtype, requires_grad=True) for _ in range(3)]
            out = compiled("full")(*operands)
            yield f"backward N={n} d={d}", backward(out, operands, torch.randn_like(out))
        for n in CACHES:
            q, k, v = (torch.randn(1, 8, rows, d, dtype=dtype) for rows in (1, n, n))
            yield f"decode N={n} d={d}", forward("full", q, k, v)


def forward(mask: str, *operands: torch.Tensor) -> Callable[[], object]:
    run = compiled(mask)
    return torch.no_grad()(lambda: run(*operands))


def backward(out: torch.Tensor, operands: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, operands, gradient, retain_graph=True)


def serve(dtypes: list[str]) -> None:
    """Compile all calls, print their names, and time the ones asked for: the least and the median of so many."""
    torch.set_num_threads(1)
    known = {f"{name} {row}": call for name in dtypes for row, call in calls(getattr(torch, name))}
    for call in known.values():
        call()
    print(json.dumps([*known]), flush=True)
    for line in sys.stdin:
        name, times = json.loads(line)
        known[name]()
        found = sorted(_seconds(known[name]) for _ in range(times))
        print(json.dumps([found[0], found[times // 2]]), flush=True)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Checkout:
    """A process that serves a checkout's kernels."""

    def __init__(self, tree: Path, dtypes: list[str]):
        given = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(tree), "--serve", "--dtypes", *dtypes]
        self.process = subprocess.Popen(
            command, cwd=tree, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> list:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):
                return json.loads(line)
        raise SystemExit("a process ended; its message is above")

    def ask(self, name: str, times: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, times]) + "\n")
        self.process.stdin.flush()
        return self.answer()


def compare(before: Checkout, after: Checkout, name: str) -> list[str]:
    """A row of the table."""
    once = before.ask(name, 3)[1]
    times = max(2, min(40, int(TURN / once) + 1))
    turns = []
    for turn in range(TURNS if once < 0.1 else TURNS // 2):
        order = (before, after) if turn % 2 else (after, before)
        found = {checkout: checkout.ask(name, times) for checkout in order}
        turns.append((found[before], found[after]))
    least = [1e3 * min(turn[side][0] for turn in turns) for side in (0, 1)]
    median = statistics.median(turn[1][1] / turn[0][1] for turn in turns)
    return [name, *(f"{x:.3f}" for x in least), f"{least[1] / least[0]:.2f}", f"{median:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.dtypes)
        return
    from benchmarks.common.results import heading, table

    trees = given.before, Path(__file__).parents[2]
    before, after = (Checkout(tree, given.dtypes) for tree in trees)
    names = before.answer()
    if names != after.answer():
        raise SystemExit("the checkouts have other calls")
    print(heading(f"Kernels before and after, FUSION_MAX_ISA={os.environ.get('FUSION_MAX_ISA', '')}"))
    print(table(["call", "before", "after", "ratio", "median"], [compare(before, after, name) for name in names]))


if __name__ == "__main__":
    main()
