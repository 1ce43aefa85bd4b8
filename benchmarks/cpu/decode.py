"""Short calls and decoding on a CPU, side by side in one process.

    python -m benchmarks.cpu.decode --quick                     a few minutes
    python -m benchmarks.cpu.decode                             everything, about half an hour
    python -m benchmarks.cpu.decode --parts decode --keys 16384 --heads 1/1 32/8 --dtype bf16

Competitors: the plain function compiled by fusion and by Inductor, `scaled_dot_product_attention` compiled by Inductor,
and the bare call of it. Decoding is also held against a loop that reads K and V, in the same turns, and does nothing
else. Every result is compared with float64 before it is timed. Times are medians over turns in which every competitor
runs once, after running untimed until threads of the one before have stopped spinning. Writes benchmarks/results/.
"""

import argparse
import datetime
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils._pytree import tree_map

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import peak, results
from benchmarks.common.measuring import Entry, allowed_error, interleave, prepare
from benchmarks.common.rows import ROWS, Problem, Row, sdpa_call
from benchmarks.cpu.caches import CACHES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("short", "decode", "caches")
HEADS = ("1/1", "2/2", "4/4", "8/8", "8/2", "32/32", "32/8")  # query heads / key heads
SETTLE = 6e-3  # s
SAME = 0.97  # of the least time: what is nearer is not told apart
PEERS = ("inductor", "inductor, sdpa", "sdpa")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--N", nargs="+", type=int, help="queries and keys of short calls")
    parser.add_argument("--keys", nargs="+", type=int, help="keys in decoding")
    parser.add_argument("--heads", nargs="+", help="query heads / key heads in decoding")
    parser.add_argument("--caches", nargs="+", choices=[*CACHES], default=[*CACHES])
    parser.add_argument("--d", type=int, default=64, help="head dimension")
    parser.add_argument("--dtype", nargs="+", choices=[*DTYPES], default=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="timing per cell, all competitors together")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, where none are given, and short timing")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    if options.quick:
        options.seconds = min(options.seconds, 0.7)
    options.N = options.N or ([16, 128] if options.quick else [16, 32, 64, 128])
    options.keys = options.keys or ([512, 16384] if options.quick else [512, 2048, 8192, 16384])
    options.heads = options.heads or (["1/1", "8/2", "32/8"] if options.quick else list(HEADS))
    return options


def compiled(function: Callable, backend: str, *operands: Any) -> Callable[[], Any]:
    """A call of the compiled function, with static shapes."""
    return functools.partial(torch.compile(function, backend=backend, dynamic=False), *operands)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def measure_attention(row: Row, problem: Problem, options: argparse.Namespace) -> dict:
    """One cell: an attention at one size and dtype."""
    torch._dynamo.reset()
    operands = problem.tensors(row)
    exact = row.plain(*problem.tensors(row, torch.float64))
    allowed = allowed_error(row.plain(*operands), exact)
    makers = {
        "fusion": lambda: compiled(row.plain, "fusion", *operands),
        "inductor": lambda: compiled(row.plain, "inductor", *operands),
        "inductor, sdpa": lambda: compiled(_attend, "inductor", *operands, row.group != 1),
        "sdpa": lambda: sdpa_call(row, operands),
    }
    entries = [Entry(name=peer) for peer in makers]
    for entry in entries:
        prepare(entry, makers[entry.name], exact, allowed)
    extra = []
    if row.queries is not None:
        extra = [Entry(name="reading", call=peak.reading(operands[1:3], torch.get_num_threads()))]
    interleave([*extra, *entries], seconds=options.seconds, settle=SETTLE)
    bytes_read = sum(x.nbytes for x in operands[1:3])
    return {"bytes": bytes_read, "entries": {entry.name: entry.summary() for entry in [*extra, *entries]}}


def measure_cache(name: str, heads: tuple[int, int], keys: int, kind: torch.dtype, options: argparse.Namespace) -> dict:
    """One cell: a query over a cache that is kept in some form."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    cache, q = CACHES[name], torch.randn(1, heads[0], 1, options.d).to(kind)
    stored, shared = cache.draw((1, heads[1], keys, options.d), kind)
    operands: list[Any] = [q, *stored, shared]
    exact = cache.attention(*tree_map(lambda x: x.double() if x.is_floating_point() else x, operands))
    allowed = allowed_error(cache.attention(*operands), exact)
    makers = {peer: functools.partial(compiled, cache.attention, peer, *operands) for peer in ("fusion", "inductor")}
    entries = [Entry(name=peer) for peer in makers]
    for entry in entries:
        prepare(entry, makers[entry.name], exact, allowed)
    interleave(entries, seconds=options.seconds, settle=SETTLE)
    live = sum(x.nbytes // (2 if shared else 1) for one in stored for x in one)
    return {"bytes": live, "entries": {entry.name: entry.summary() for entry in entries}}


def cells(options: argparse.Namespace) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """What is to be measured: where, and the call that measures it."""
    for dtype in options.dtype:
        kind = DTYPES[dtype]
        for N in options.N if "short" in options.parts else ():
            problem = Problem(H=8, N=N, d=options.d, dtype=kind)
            where = {"part": "short", "what": "8 heads", "N": N, "dtype": dtype}
            yield where, functools.partial(measure_attention, ROWS["full"], problem, options)
        for heads in options.heads if "decode" in options.parts else ():
            queries, keys = map(int, heads.split("/"))
            plain = ROWS["full"] if queries == keys else ROWS["decode"]
            row = replace(plain, group=queries // keys, queries=1)
            for N in options.keys:
                problem = Problem(H=queries, N=N, d=options.d, dtype=kind)
                where = {"part": "decode", "what": f"{heads} heads", "N": N, "dtype": dtype}
                yield where, functools.partial(measure_attention, row, problem, options)
        for heads in options.heads if "caches" in options.parts else ():
            queries, keys = map(int, heads.split("/"))
            for name in options.caches:
                for N in options.keys:
                    where = {"part": "caches", "what": f"{CACHES[name].title}, {heads} heads", "N": N, "dtype": dtype}
                    yield where, functools.partial(measure_cache, name, (queries, keys), N, kind, options)


def line(cell: dict) -> list[str]:
    """A line of the table."""
    entries = cell["entries"]
    ours, least = entries["fusion"]["median"], entries["fusion"]["least"]

    def ratio(name: str) -> str:
        entry = entries.get(name)
        if entry is None:
            return ""
        if not entry["median"] or not ours:
            return entry["note"][:20]
        return f"{entry['median'] / ours:.2f}x ({entry['least'] / least:.2f}x)"

    share = f"{entries['reading']['median'] / ours:.0%}" if "reading" in entries and ours else ""
    rate = f"{cell['bytes'] / ours / 1e9:.1f}" if "bytes" in cell and ours else ""
    best = [entries[peer]["least"] for peer in PEERS[:2] if entries.get(peer, {}).get("least")]
    slower = "slower" if least and best and min(best) < SAME * least else ""
    note = entries["fusion"]["note"][:60]
    time = f"{ours * 1e6:.1f} ({least * 1e6:.1f})" if ours else "–"
    return [cell["what"], str(cell["N"]), cell["dtype"], time, *map(ratio, PEERS), rate, share, note or slower]


HEADER = ["", "N", "dtype", "fusion us", *PEERS, "GB/s", "of reading", "note"]
LEGEND = (
    "Peers: their median time over fusion's, from turns in one process (above 1: fusion is faster); in parentheses the "
    "same of the least times, which other users of the machine touch less. `sdpa` is the bare call, without a compiled "
    "function around it. `of reading`: the time of a loop that reads K and V and does nothing else, over fusion's. "
    "`slower`: the least time of the plain function or of SDPA, compiled by Inductor, is below 0.97 of fusion's."
)


def save(data: dict) -> Path:
    """Write the JSON file and its Markdown beside it."""
    where = data["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    text = [
        f"# Short calls and decoding, {where['date']}",
        f"{where['cpu']}, {where['threads']} threads on {where['cores']} cores (OMP_WAIT_POLICY: {where['waiting']}); "
        f"{where['system']}, Python {where['python']}; {versions}; commit {where['commit'] or 'unknown'}.",
        LEGEND,
    ]
    for part in PARTS:
        if lines := [line(cell) for cell in data["cells"] if cell["part"] == part]:
            text += [f"## {part}", results.table(HEADER, lines)]
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
    path = results.FOLDER / f"{stamp}-decode.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    return path


@torch.inference_mode()
def run(options: argparse.Namespace, console: Console) -> dict:
    """Measure all cells; interrupted runs keep what they have."""
    data: dict[str, Any] = {"environment": results.environment({}), "cells": []}
    for where, found in results.measured(cells(options), console, lambda where: " ".join(map(str, where.values()))):
        data["cells"].append(where | found)
        console.print(" | ".join(line(where | found)), soft_wrap=True, highlight=False)
    return data


def main() -> int:
    """Run what the command line asks for; 1 if fusion returned a wrong result anywhere."""
    options = parse()
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    data = run(options, console)
    wrong = [cell for cell in data["cells"] if cell["entries"]["fusion"]["note"].startswith("wrong")]
    if not options.no_save:
        console.print(f"written: {save(data)} and .md", soft_wrap=True)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
