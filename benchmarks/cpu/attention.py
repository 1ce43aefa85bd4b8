"""Attention on a CPU, side by side in one process: eager, Inductor, SDPA, compiled FlexAttention and fusion.

    python -m benchmarks.cpu.attention --quick                        a few minutes
    python -m benchmarks.cpu.attention                                everything, more than an hour
    python -m benchmarks.cpu.attention --rows full causal --N 1024 --d 64 --dtype fp32

Every result is compared with float64 before it is timed. Times are medians over turns in which every competitor runs
once. Prints ratios and the share of the machine's measured multiply-add peak; writes benchmarks/results/.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch._dynamo.utils import counters

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import peak, results
from benchmarks.common.measuring import Entry, allowed_error, interleave, prepare
from benchmarks.common.rows import ROWS, Problem, Row, flex_call, sdpa_call

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {64: 12, 128: 8}  # query heads by head dimension, as in models of that size


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], help="attention variants")
    parser.add_argument("--N", nargs="*", type=int, help="sequence lengths (default: 128 1024 4096)")
    parser.add_argument("--d", nargs="*", type=int, choices=[*HEADS], default=[*HEADS], help="head dimensions")
    parser.add_argument("--dtype", nargs="*", choices=[*DTYPES], default=["fp32", "bf16"], help="dtypes")
    parser.add_argument("--without", nargs="*", default=[], help="competitors to leave out, by the name in the table")
    parser.add_argument("--quick", action="store_true", help="d = 64, N up to 1024, short timing")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing per cell, all competitors together")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--cold", action="store_true", help="compile without Inductor's caches, for compile times")
    parser.add_argument("--append", type=Path, help="add the cells to this result file, replacing those it has")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args()


def sites_now() -> tuple[int, int]:
    """Attention sites that fusion has fused and left in this process so far."""
    return counters["fusion"]["fused"], counters["fusion"]["unfused"]


def compiled(call, backend: str):
    """`torch.compile` with static shapes, so that no competitor pays for generality that another does not offer."""
    return torch.compile(call, backend=backend, dynamic=False)


def measure_row(name: str, row: Row, problem: Problem, dtype: str, options: argparse.Namespace) -> dict:
    """One cell of the table: a variant at one size and dtype."""
    torch.compiler.reset()
    operands = problem.tensors(row)
    exact = row.plain(*problem.tensors(row, torch.float64))
    eager = functools.partial(row.plain, *operands)
    allowed = allowed_error(eager(), exact)
    before = sites_now()
    makers = {
        "eager": lambda: eager,
        "inductor": lambda: functools.partial(compiled(row.plain, "inductor"), *operands),
        "sdpa": lambda: sdpa_call(row, operands),
        "flex": lambda: flex_call(row, operands),
        "fusion": lambda: functools.partial(compiled(row.plain, "fusion"), *operands),
    }
    entries = [Entry(name=peer) for peer in makers if peer not in options.without]
    for entry in entries:
        prepare(entry, makers[entry.name], exact, allowed)
    _note_sites(entries, before)
    loop = options.peak[dtype]
    limit = Entry(name="peak", call=loop.call)
    interleave([limit, *entries], seconds=options.seconds)
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
        "entries": {entry.name: entry.summary() for entry in entries},
    }


def _note_sites(entries: list[Entry], before: tuple[int, int]) -> None:
    """Say in fusion's entry where it left a site alone since `before`."""
    fused, left = (now - then for now, then in zip(sites_now(), before, strict=True))
    for entry in entries:
        if entry.name == "fusion" and entry.call is not None and (left or not fused) and not entry.note:
            entry.note = f"{fused} of {fused + left} sites fused"


def cells(options: argparse.Namespace) -> Iterator[tuple[str, functools.partial]]:
    """Everything that is to be measured: a line for the progress bar, and the call that measures it."""
    lengths = options.N or ([128, 1024] if options.quick else [128, 1024, 4096])
    for dtype in options.dtype:
        for d in [64] if options.quick else options.d:
            for N in lengths:
                for name in options.rows:
                    problem = Problem(H=HEADS[d], N=N, d=d, dtype=DTYPES[dtype])
                    line = f"{ROWS[name].title}, N={N}, d={d}, {dtype}"
                    yield line, functools.partial(measure_row, name, ROWS[name], problem, dtype, options)


@torch.no_grad()
def run(options: argparse.Namespace, console: Console) -> dict:
    """Measure all cells behind a progress bar; interrupted runs keep what they have."""
    loops = peak.loops(torch.get_num_threads())
    peaks = {loop.name: round(loop.rate(), 1) for loop in loops}
    console.print("peaks, GFLOP/s:", ", ".join(f"{name} {rate:.0f}" for name, rate in peaks.items()), highlight=False)
    options.peak = {dtype: peak.fastest(loops, peaks, DTYPES[dtype]) for dtype in options.dtype}
    data = {"environment": results.environment(peaks), "rows": []}
    for line, cell in results.measured(cells(options), console, str):
        data["rows"].append(cell)
        for name, entry in cell["entries"].items():
            if entry["note"] and entry["note"] != "cannot express it":
                console.print(f"[yellow]{line}: {name}: {entry['note']}", soft_wrap=True)
    return data


def main() -> int:
    """Run what the command line asks for; 1 if fusion returned a wrong result anywhere."""
    options = parse()
    if options.quick:
        options.seconds = min(options.seconds, 1.0)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.cold:
        torch._inductor.config.force_disable_caches = True
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log file has no width of its own
    start = time.perf_counter()
    data = run(options, console)
    results.show(console, "attention variants", *results.row_table(data["rows"]))
    console.print(results.LEGEND, highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s")
    if not options.no_save:
        path = results.save(data, options.append)
        console.print(f"written: {path} and .md", soft_wrap=True)
    ours = [cell["entries"].get("fusion", {}) for cell in data["rows"]]
    return int(any(entry.get("note", "").startswith("wrong") for entry in ours))


if __name__ == "__main__":
    raise SystemExit(main())
