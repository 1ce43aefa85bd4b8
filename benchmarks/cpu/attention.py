"""Attention on a CPU, side by side in one process: eager, Inductor, SDPA, compiled FlexAttention and fusion.

    python -m benchmarks.cpu.attention --quick                        a few minutes
    python -m benchmarks.cpu.attention                                everything, more than an hour
    python -m benchmarks.cpu.attention --rows full causal --N 1024 --d 64 --dtype fp32

Every result is compared with float64 before it is timed. Times are medians over turns in which every competitor runs
once. Prints ratios and the share of the machine's measured multiply-add peak; writes benchmarks/results/, JSON with
everything and Markdown to read.
"""

import argparse
import datetime
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import peak, results
from benchmarks.common.measuring import Entry, interleave
from benchmarks.common.rows import ROWS, Problem, flex_call, sdpa_call
from fusion.exactness import errors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {64: 12, 128: 8}  # query heads by head dimension, as in models of that size
PEERS = {"eager": "eager", "inductor": "Inductor", "sdpa": "SDPA", "flex": "FlexAttention"}
"""By name on the command line and in files: the name in the table."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], help="attention variants")
    parser.add_argument("--N", nargs="*", type=int, help="sequence lengths (default: 128 1024 4096)")
    parser.add_argument("--d", nargs="*", type=int, choices=[*HEADS], default=[*HEADS], help="head dimensions")
    parser.add_argument("--dtype", nargs="*", choices=[*DTYPES], default=["fp32", "bf16"], help="dtypes")
    parser.add_argument("--without", nargs="*", default=[], choices=[*PEERS], help="competitors to leave out")
    parser.add_argument("--quick", action="store_true", help="d = 64, N up to 1024, short timing")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing per cell, all competitors together")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--busy", action="store_true", help="least processor times of one thread, beside other work")
    parser.add_argument("--cold", action="store_true", help="compile without Inductor's caches, for compile times")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args()


def prepare(entry: Entry, make: Callable[[], Callable[[], Tensor] | None], eager: Tensor, exact: Tensor) -> dict:
    """Build and run a competitor once: its first call and its error, or the reason why it cannot run."""
    facts: dict[str, Any] = {"first_call": None, "error": None, "allowed": None, "note": ""}
    before = counters["fusion"]["fused"]
    try:
        start = time.perf_counter()
        call = make()
        if call is None:
            return facts | {"note": "cannot express it"}
        result = call()
        facts["first_call"] = time.perf_counter() - start
        comparison = errors(result, eager, exact)
        facts["error"], facts["allowed"] = comparison.figures
        entry.call = call
        if comparison.share > 1:
            facts["note"] = f"wrong: {comparison}"
        elif entry.name == "fusion" and counters["fusion"]["fused"] == before:
            facts["note"] = "not fused"
    except Exception as failure:  # a peer's failure is a result of this benchmark
        text = str(failure).strip().splitlines() or [""]
        facts["note"] = f"fails: {type(failure).__name__}: {text[0][:160]}"
    return facts


def summary(entry: Entry) -> dict:
    """Times in seconds, for the result file."""
    quartiles = statistics.quantiles(entry.times, n=4) if len(entry.times) > 3 else None
    return {
        "median": entry.median,
        "least": min(entry.times, default=None),
        "quartiles": [quartiles[0], quartiles[2]] if quartiles else None,
        "samples": len(entry.times),
    }


def measure(name: str, problem: Problem, dtype: str, loop: peak.Loop, options: argparse.Namespace) -> dict:
    """One cell of the table: a variant at one size and dtype, compiled with static shapes, so that no competitor pays
    for generality that another does not offer."""
    torch.compiler.reset()
    row, operands = ROWS[name], problem.tensors(ROWS[name])
    exact = row.plain(*problem.tensors(row, torch.float64))
    eager = functools.partial(row.plain, *operands)
    own = eager()

    def compiled(backend: str) -> Callable[[], Tensor]:
        return functools.partial(torch.compile(row.plain, backend=backend, dynamic=False), *operands)

    makers = {
        "eager": lambda: eager,
        "inductor": lambda: compiled("inductor"),
        "sdpa": lambda: sdpa_call(row, operands),
        "flex": lambda: flex_call(row, operands),
        "fusion": lambda: compiled("fusion"),
    }
    entries = {peer: Entry(name=peer) for peer in makers if peer not in options.without}
    facts = {peer: prepare(entry, makers[peer], own, exact) for peer, entry in entries.items()}
    limit = Entry(name="peak", call=loop.call)
    clock = time.process_time if options.busy else time.perf_counter
    interleave([limit, *entries.values()], seconds=options.seconds, clock=clock)
    for entry in [limit, *entries.values()] if options.busy else []:
        entry.times = [min(entry.times)] if entry.times else []
    assert limit.median is not None
    return {
        "row": name,
        "title": row.title,
        "B": problem.B,
        "H": problem.H,
        "N": problem.N,
        "d": problem.d,
        "dtype": dtype,
        "flop": row.flop(problem),
        "peak": round(loop.flop / limit.median / 1e9, 1),
        "entries": {peer: summary(entry) | facts[peer] for peer, entry in entries.items()},
    }


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, Problem]]:
    """Everything that is to be measured: variant, dtype and size."""
    lengths = options.N or ([128, 1024] if options.quick else [128, 1024, 4096])
    for dtype in options.dtype:
        for d in [64] if options.quick else options.d:
            for N in lengths:
                for name in options.rows:
                    yield name, dtype, Problem(H=HEADS[d], N=N, d=d, dtype=DTYPES[dtype])


@torch.no_grad()
def run(options: argparse.Namespace) -> dict:
    """Measure all cells; interrupted runs keep what they have."""
    loops = peak.loops(torch.get_num_threads())
    peaks = {loop.name: round(loop.rate(), 1) for loop in loops}
    print("peaks, GFLOP/s:", ", ".join(f"{name} {rate:.0f}" for name, rate in peaks.items()))
    data = {"environment": results.environment(peaks), "rows": []}
    try:
        for name, dtype, problem in cells(options):
            cell = measure(name, problem, dtype, peak.fastest(loops, peaks, DTYPES[dtype]), options)
            data["rows"].append(cell)
            print(variant_table([cell]).splitlines()[-1], flush=True)
            for peer, entry in cell["entries"].items():
                if entry["note"] and entry["note"] != "cannot express it":
                    print(f"{peer}: {entry['note']}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what has been measured so far follows")
    return data


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g}"


def _ratio(entries: dict, peer: str) -> str:
    """Peer's median over fusion's (above 1: fusion is faster), or why there is none."""
    entry, ours = entries.get(peer), entries.get("fusion", {}).get("median")
    if entry is None:
        return ""
    if entry["median"] is None:
        return "n/a" if entry["note"] == "cannot express it" else "fails"
    mark = "!" if entry["note"].startswith("wrong") else ""
    return f"{entry['median'] / ours:.2f}x{mark}" if ours else f"{_milliseconds(entry['median'])} ms{mark}"


def variant_table(cells: list[dict]) -> str:
    """The table of attention variants."""
    header = ["variant", "N", "d", "dtype", "fusion ms", "GFLOP/s", "peak", "of peak", "vs full"]
    rate = {}
    for cell in cells:
        if ours := cell["entries"].get("fusion", {}).get("median"):
            rate[cell["row"], cell["N"], cell["d"], cell["dtype"]] = cell["flop"] / ours
    lines = []
    for cell in cells:
        where, ours = (cell["N"], cell["d"], cell["dtype"]), cell["entries"].get("fusion", {})
        speed, full = rate.get((cell["row"], *where)), rate.get(("full", *where))
        lines.append([
            cell["title"],
            *map(str, where),
            _milliseconds(ours.get("median")),
            f"{speed / 1e9:.0f}" if speed else "–",
            f"{cell['peak']:.0f}",
            f"{speed / 1e9 / cell['peak']:.0%}" if speed else "–",
            f"{speed / full:.2f}" if speed and full else "–",
            *(_ratio(cell["entries"], peer) for peer in PEERS),
            re.sub(r"\s+", " ", ours.get("note", ""))[:60],
        ])  # fmt: skip
    return results.table([*header, *PEERS.values(), "note"], lines)


LEGEND = (
    "Columns with a peer's name: the peer's median time over fusion's, both from turns in one process (above 1: fusion "
    "is faster; `!`: the peer's result is wrong; n/a: it cannot express the variant). GFLOP/s count the live query-key "
    "pairs only; `vs full` is that speed over full attention's own; the peak is the best multiply-add rate of these "
    "cores for the dtype in GFLOP/s, measured in turns with the kernels of its line: on a busy machine it is below the "
    "one at the start."
)


def page(data: dict) -> str:
    """The result file as a page."""
    where = data["environment"]
    peaks = ", ".join(f"{name} {rate:.0f}" for name, rate in where["peaks"].items())
    start = f"{where['threads']} threads; multiply-add peaks at the start, in GFLOP/s: {peaks}."
    parts = [start, LEGEND, "## Attention variants", variant_table(data["rows"])]
    return results.heading("CPU benchmark") + "\n\n".join(parts) + "\n"


def save(data: dict) -> Path:
    """Write the JSON file and its Markdown beside it; returns the JSON file's path."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
    path = results.FOLDER / f"{stamp}-cpu.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(data))
    return path


def main() -> int:
    """Run what the command line asks for; 1 if fusion returned a wrong result anywhere."""
    options = parse()
    if options.quick:
        options.seconds = min(options.seconds, 1.0)
    if options.threads or options.busy:
        torch.set_num_threads(1 if options.busy else options.threads)
    if options.cold:
        torch._inductor.config.force_disable_caches = True
    data = run(options)
    print(f"\n{variant_table(data['rows'])}\n\n{LEGEND}")
    if not options.no_save:
        print(f"written: {save(data)} and .md")
    ours = [cell["entries"].get("fusion", {}) for cell in data["rows"]]
    return int(any(entry.get("note", "").startswith("wrong") for entry in ours))


if __name__ == "__main__":
    raise SystemExit(main())
