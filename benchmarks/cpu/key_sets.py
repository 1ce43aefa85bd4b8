"""A layer with an indexer that leaves 512 keys to each query (DeepSeek-V3.2, as transformers writes it), on a CPU: time
with sets of keys, with a mask of all keys in our own kernel, and as plain Inductor compiles it.

    python -m benchmarks.cpu.key_sets [--length 8192] [--keys 512] [--rounds 5] [--dtype float32] [--cases heads latent]

All run in turns within one process; what the indexer takes by itself (its scores and topk) is measured beside them and
subtracted. `heads`: every head has keys of its own. `latent`: all heads share them. Seconds are medians of wall time,
with the least beside them, and medians of processor time, which other work on the machine hardly changes. Errors are
largest differences from float64 in a sample of rows, over what the numerics rule allows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
import types
from collections.abc import Callable, Iterator

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.measuring import allowed_error, largest_error
from fusion.machine import machine as find_machine
from fusion.planning import pays

torch._inductor.config.compile_threads = 1
CASES = {"heads": (2, 2, 192, 128), "latent": (24, 1, 96, 64)}
"""Query heads, key heads, and columns of K and V."""
INDEX_HEADS, INDEX_WIDTH = 4, 64
SAMPLED = 64


def indexer(index_q: Tensor, index_k: Tensor, index_weights: Tensor, keys: int) -> Tensor:
    """[1, N, keys]: the keys of each query with the largest scores. index_q: [1, N, H, d], index_k: [1, N, d],
    index_weights: [1, N, H]."""
    scores = F.relu(torch.matmul(index_q, index_k.transpose(-1, -2).unsqueeze(1)) * INDEX_WIDTH**-0.5)
    scores = torch.matmul(index_weights.unsqueeze(-2), scores).squeeze(-2)
    future = torch.arange(scores.shape[-1]) > torch.arange(scores.shape[-2])[:, None]
    return scores.masked_fill(future, float("-inf")).topk(keys, dim=-1).indices.to(torch.int32)


def layer(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, index_weights: Tensor, keys: int
) -> Tensor:
    """[1, H, N, d_v]: causal attention over the keys that the indexer leaves."""
    chosen = indexer(index_q, index_k, index_weights, keys)
    n = q.shape[-2]
    outside = chosen.new_ones((1, n, n), dtype=torch.bool).scatter(-1, chosen.long(), False).unsqueeze(1)
    mask = (torch.arange(n) <= torch.arange(n)[:, None]) & ~outside
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@contextlib.contextmanager
def masks_kept() -> Iterator[None]:
    """While this lasts, attentions see masks of all keys."""
    before = pays.sets_pay
    pays.sets_pay = lambda *_: "as asked for"
    try:
        yield
    finally:
        pays.sets_pay = before


def sampled_error(result: Tensor, inputs: list[Tensor], keys: int) -> float:
    """The error of a result in some rows, over what is allowed."""
    q, k, v, index_q, index_k, index_weights = inputs
    rows = torch.arange(0, q.shape[2], max(1, q.shape[2] // SAMPLED))
    chosen = indexer(index_q, index_k, index_weights, keys)[:, rows].long()
    live = torch.zeros(1, len(rows), q.shape[2], dtype=torch.bool).scatter(-1, chosen, True)
    live &= torch.arange(q.shape[2]) <= rows[:, None]
    q, k, v = q[:, :, rows], *(x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    eager = F.scaled_dot_product_attention(q, k, v, attn_mask=live.unsqueeze(1))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=live.unsqueeze(1))
    return largest_error(result[:, :, rows], exact) / allowed_error(eager, exact)


Contestant = tuple[Callable[[], Tensor], Tensor]
"""A call, and what it returned the first time."""


def contestants(inputs: list[Tensor], keys: int) -> dict[str, Contestant]:
    """What is timed, each run once."""
    numbers = itertools.count()

    def compiled(function: Callable[..., Tensor], backend: str, tensors: list[Tensor]) -> Contestant:
        code = function.__code__.replace(co_name=f"contestant_{next(numbers)}")  # Dynamo keeps what it made by code
        own = types.FunctionType(code, function.__globals__)
        run = torch.compile(own, backend=backend, dynamic=False)
        return lambda: run(*tensors, keys), run(*tensors, keys)

    calls = {"sets": compiled(layer, "fusion", inputs), "indexer": compiled(indexer, "fusion", inputs[3:])}
    with masks_kept():
        calls["mask"] = compiled(layer, "fusion", inputs)
    calls["Inductor"] = compiled(layer, "inductor", inputs)
    calls["Inductor's indexer"] = compiled(indexer, "inductor", inputs[3:])
    return calls


def timed(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Median and least of wall time and the median of processor time, in seconds, of calls that take turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            taken[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {
        name: (statistics.median(w for w, _ in times), min(w for w, _ in times), statistics.median(p for _, p in times))
        for name, times in taken.items()
    }


def report(case: str, inputs: list[Tensor], keys: int, rounds: int) -> None:
    """One table: the layer, and the layer without its indexer."""
    found = contestants(inputs, keys)
    errors = {name: sampled_error(found[name][1], inputs, keys) for name in ("sets", "mask", "Inductor")}
    times = timed({name: call for name, (call, _) in found.items()}, rounds)
    heads, key_heads, d, d_v = CASES[case]
    print(f"\n{case}: {heads} heads, {key_heads} of keys, d = {d}, d_v = {d_v}\n")
    print("| | layer s (least; processor) | of it the indexer | attention | of `sets`: layer | attention | error |")
    print("|---|---|---|---|---|---|---|")
    own = {"sets": "indexer", "mask": "indexer", "Inductor": "Inductor's indexer"}
    rest = {name: tuple(times[name][k] - times[index][k] for k in (0, 1, 2)) for name, index in own.items()}
    for name, index in own.items():
        whole, indexing = (f"{t[0]:.2f} ({t[1]:.2f}; {t[2]:.2f})" for t in (times[name], times[index]))
        attention = f"{rest[name][0]:.2f} ({rest[name][1]:.2f}; {rest[name][2]:.2f})"
        ratios = [f"{a[name][0] / a['sets'][0]:.2f} ({a[name][2] / a['sets'][2]:.2f})" for a in (times, rest)]
        print(
            f"| {name} | {whole} | {indexing} | {attention} | {' | '.join(ratios)} | {errors[name]:.2f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--keys", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    chosen = parser.parse_args()
    torch.manual_seed(0)
    dtype, n = getattr(torch, chosen.dtype), chosen.length
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"N = {n}, {chosen.keys} keys for each query, {chosen.dtype}; indexer: {INDEX_HEADS} heads of {INDEX_WIDTH}")
    for case in chosen.cases:
        heads, key_heads, d, d_v = CASES[case]
        shapes = [(1, heads, n, d), (1, key_heads, n, d), (1, key_heads, n, d_v)]
        inputs = [torch.randn(shape).to(dtype) for shape in shapes]
        inputs += [torch.randn(1, n, INDEX_HEADS, INDEX_WIDTH), torch.randn(1, n, INDEX_WIDTH)]
        inputs.append(torch.randn(1, n, INDEX_HEADS))
        with torch.no_grad():
            report(case, inputs, chosen.keys, chosen.rounds)


if __name__ == "__main__":
    main()
