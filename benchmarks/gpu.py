"""Attention on one GPU, side by side in one process: SDPA's three kernels, compiled FlexAttention, Inductor and fusion.

    python benchmarks/gpu.py                    at most 8 minutes: first correctness, then speed, telling cells first
    python benchmarks/gpu.py --quick            two minutes
    python benchmarks/gpu.py --rows causal --N 8192 --d 128

Correctness: outputs and gradients of every variant against float64, by the rule that the tests use, and twice the same
gradients of q, k and v. Speed: medians of CUDA event times over turns in which every competitor runs once, in TFLOP/s
of the two matrix products over live pairs (backward: 2.5 times the forward's), GB/s for decoding. Writes
benchmarks/results/<date>-<gpu>.json and .md. Cells that do not fit the time are named, not dropped silently.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
import results
from measuring import allowed_error, largest_error
from rows import ROWS, Problem, Row, sdpa_call

TFLOPS = {"H100": 989.5, "H200": 989.5, "GH200": 989.5, "A100": 312.0, "B200": 2250.0, "L40": 181.0}
"""Dense bfloat16 peaks by a part of the device's name, from the makers' data sheets."""

HEADS = {64: 32, 80: 24, 128: 16, 256: 8, 512: 4}
SDPA = ("flash", "cudnn", "efficient")


@dataclass(slots=True, kw_only=True)
class Cell:
    """One variant at one size: seconds per call by competitor, and why one has none."""

    row: str
    direction: str
    N: int
    d: int
    H: int
    B: int
    flop: float
    bytes: float
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    predicted: float | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--N", nargs="*", type=int, default=[4096, 8192, 2048, 16384])
    parser.add_argument("--d", nargs="*", type=int, choices=[*HEADS], default=[128, 64, 256, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything")
    parser.add_argument("--quick", action="store_true", help="N = 4096, d = 128 only, two minutes")
    parser.add_argument("--no-correctness", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    return parser.parse_args()


# --- competitors ----------------------------------------------------------------------------------------------------


def compiled(call: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, dynamic=False)


def flex(row: Row, operands: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, *extras = operands
    blocks = None
    if row.mask is not None:
        blocks = create_block_mask(row.mask, None, None, q.shape[-2], k.shape[-2], device=str(q.device))
    call = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    score = row.score(*extras) if row.score else None
    return lambda: call(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=row.group > 1)


def sdpa(row: Row, operands: tuple[Tensor, ...], kind: str) -> Callable[[], Tensor] | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
               "efficient": SDPBackend.EFFICIENT_ATTENTION}[kind]  # fmt: skip
    with torch.device(operands[0].device):
        call = sdpa_call(row, operands)
    if call is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def competitors(row: Row, operands: tuple[Tensor, ...], scores: int) -> Iterator[tuple[str, Callable]]:
    """(name, maker of a call); scores: elements of the score matrix, which Inductor may have to keep."""
    yield "fusion", lambda: _bound(compiled(row.plain, "fusion"), operands)
    for kind in SDPA:
        yield f"sdpa {kind}", lambda kind=kind: sdpa(row, operands, kind)
    yield "flex", lambda: flex(row, operands)
    if scores <= 1 << 32:
        yield "inductor", lambda: _bound(compiled(row.plain, "inductor"), operands)


def _bound(call: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return lambda: call(*operands)


# --- correctness ----------------------------------------------------------------------------------------------------


def gradients(call: Callable[..., Tensor], operands: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of all operands."""
    given = [o.detach().clone().requires_grad_() for o in operands]
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


def check(row: Row, d: int, dtype: torch.dtype) -> list[str]:
    """What is wrong with a variant on the device; empty if nothing is."""
    problem = Problem(B=2, H=4, N=389, d=d, dtype=dtype)
    operands = tuple(o.cuda() for o in problem.tensors(row))
    wide = tuple(o.double() for o in operands)
    call = compiled(row.plain, "fusion")
    grad = torch.randn(2, 4, 389, d, device="cuda", dtype=dtype)
    want, eager = gradients(row.plain, wide, grad), gradients(row.plain, operands, grad)
    got, again = gradients(call, operands, grad), gradients(call, operands, grad)
    faults = []
    for name, ours, theirs, true in zip(("out", "dq", "dk", "dv", "dbias"), got, eager, want, strict=False):
        error, allowed = largest_error(ours, true), allowed_error(theirs, true)
        if not error <= allowed:
            faults.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}")
    if not all(torch.equal(x, y) for x, y in zip(got[:4], again[:4], strict=True)):
        faults.append("two runs differ in the output or in the gradients of q, k, v")
    return faults


def correctness(console: Console, names: list[str], dtype: torch.dtype, deadline: float) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, d in track([(n, d) for d in (128, 80) for n in names], "Checking", console=console):
        if time.monotonic() > deadline:
            found[f"{name} d={d}"] = ["not checked: no time left"]
            continue
        try:
            found[f"{name} d={d}"] = check(ROWS[name], d, dtype)
        except Exception as failure:  # the rest is still worth knowing
            found[f"{name} d={d}"] = [f"{type(failure).__name__}: {str(failure).splitlines()[0][:160]}"]
    return found


# --- speed ----------------------------------------------------------------------------------------------------------


def events(call: Callable[[], object]) -> float:
    """Seconds of one call on the device, by events; the cache is emptied before."""
    _flush.zero_()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def backward_call(call: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> Callable[[], object]:
    """The gradient of q, k and v of a call that has run."""
    out = call()
    grad = torch.randn_like(out)
    wanted = [o for o in operands if o.requires_grad]
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def measure(cell: Cell, row: Row, operands: tuple[Tensor, ...], seconds: float) -> None:
    """Fill in the times of a cell."""
    calls: dict[str, Callable[[], object]] = {}
    for name, make in competitors(row, operands, cell.B * cell.H * cell.N * cell.N):
        try:
            call = make()
            if call is None:
                cell.notes[name] = "cannot express it"
                continue
            if cell.direction == "backward":
                call = backward_call(call, operands)
            events(call)
            calls[name] = call
        except Exception as failure:  # a peer's failure is a result
            cell.notes[name] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:120]}"
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop, turn = time.monotonic() + seconds, 0
    while calls and (turn < 5 or time.monotonic() < stop) and turn < 200:
        for name, call in calls.items():
            times[name].append(events(call))
        turn += 1
    cell.seconds = {name: statistics.median(values[1:]) for name, values in times.items()}


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """(row, direction, N, d), the most telling first."""
    for n in options.N:
        for d in options.d:
            for direction in ("forward", "backward"):
                for name in options.rows:
                    if (d in (256, 512) and name not in ("full", "causal")) or (name == "bias" and n > 4096):
                        continue
                    if d == options.d[0] or name in ("full", "causal", "alibi"):
                        yield name, direction, n, d


def predicted(name: str, n: int, d: int, h: int, b: int, dtype: str) -> float | None:
    """The planner's time for an H200, s; the device may be another one."""
    try:
        from fusion.plan import Problem as Planned
        from fusion.plan import plan

        heads_kv = h // ROWS[name].group
        causal = ROWS[name].mask is not None
        planned = Planned(n_q=n, n_k=n, d=d, d_v=d, batch=b, heads=h, heads_kv=heads_kv, dtype=dtype, causal=causal)
        return plan(planned, machine="h200").time
    except Exception:  # a missing prediction must not stop a measurement
        return None


def run_cell(name: str, direction: str, n: int, d: int, options: argparse.Namespace) -> Cell:
    row, dtype, h = ROWS[name], getattr(torch, options.dtype), HEADS[d]
    b = max(1, 16384 // n)
    problem = Problem(B=b, H=h, N=n, d=d, dtype=dtype)
    operands = tuple(o.cuda() for o in problem.tensors(row))
    if direction == "backward":
        operands = tuple(o.requires_grad_(place < 3) for place, o in enumerate(operands))
    flop = row.flop(problem) * (2.5 if direction == "backward" else 1)
    size = sum(o.numel() * o.element_size() for o in operands) + b * h * n * d * 2
    cell = Cell(row=name, direction=direction, N=n, d=d, H=h, B=b, flop=flop, bytes=size)
    if direction == "forward":
        cell.predicted = predicted(name, n, d, h, b, options.dtype)
    with torch.no_grad() if direction == "forward" else contextlib.nullcontext():
        measure(cell, row, operands, 0.3)
    return cell


def decode(options: argparse.Namespace) -> Cell:
    """One query of 32 heads against 16384 keys of 8 heads: bound by memory."""
    b, h, n, d = 8, 32, 16384, 128
    dtype = getattr(torch, options.dtype)
    q = torch.randn(b, h, 1, d, device="cuda", dtype=dtype)
    k, v = (torch.randn(b, h // 4, n, d, device="cuda", dtype=dtype) for _ in range(2))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        return torch.softmax(q @ k.transpose(-2, -1) * d**-0.5, -1) @ v

    row = Row(title="decoding", plain=plain, group=4, sdpa=lambda q, k: {"enable_gqa": True})
    cell = Cell(row="decode", direction="forward", N=n, d=d, H=h, B=b, flop=4 * b * h * n * d,
                bytes=2 * b * (h // 4) * n * d * q.element_size())  # fmt: skip
    with torch.no_grad():
        measure(cell, row, (q, k, v), 0.3)
    return cell


# --- report ---------------------------------------------------------------------------------------------------------


def table(done: list[Cell], peak: float | None) -> str:
    names = ["fusion", *(f"sdpa {kind}" for kind in SDPA), "flex", "inductor"]
    head = ["variant", "pass", "B x H", "N", "d", *names, "of peak", "vs best peer", "predicted / measured"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in done:
        work, unit = (cell.bytes / 1e9, " GB/s") if cell.row == "decode" else (cell.flop / 1e12, "")
        values = [f"{work / cell.seconds[n]:.0f}{unit}" if n in cell.seconds else "-" for n in names]
        ours, peers = cell.seconds.get("fusion"), [s for n, s in cell.seconds.items() if n != "fusion"]
        share = f"{cell.flop / 1e12 / ours / peak:.0%}" if ours and peak else "-"
        ratio = f"{min(peers) / ours:.2f}" if ours and peers else "-"
        guess = f"{cell.predicted / ours:.2f}" if ours and cell.predicted else "-"
        place = [cell.row, cell.direction, f"{cell.B} x {cell.H}", str(cell.N), str(cell.d)]
        lines.append("| " + " | ".join([*place, *values, share, ratio, guess]) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/gpu.py needs a GPU that torch can use, and found none. What can be checked without one: "
            "`python -m pytest tests/codegen/triton` (results, in Triton's interpreter) and "
            "`python benchmarks/triton_versions.py` (registers, spills and instructions of compiled kernels)."
        )
    console, started = Console(), time.monotonic()
    minutes = 2.0 if options.quick else options.minutes
    if options.quick:
        options.N, options.d = [4096], [128]
    deadline = started + 60 * minutes
    global _flush
    _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    device = torch.cuda.get_device_name()
    peak = next((value for part, value in TFLOPS.items() if part in device), None)
    dtype = getattr(torch, options.dtype)
    found = {}
    if not options.no_correctness:
        found = correctness(console, options.rows, dtype, started + 20 * minutes)
    done: list[Cell] = []
    left: list[str] = []
    wanted = [("decode", "forward", 0, 0), *cells(options)]
    for name, direction, n, d in track(wanted, "Measuring", console=console):
        if time.monotonic() > deadline:
            left.append(f"{name} {direction} N={n} d={d}")
            continue
        try:
            done.append(decode(options) if name == "decode" else run_cell(name, direction, n, d, options))
        except torch.OutOfMemoryError:
            left.append(f"{name} {direction} N={n} d={d}: out of memory")
        torch.cuda.empty_cache()
    text = report(device, found, done, left, peak)
    console.print(text, markup=False)
    if not options.no_save:
        save(device, text, found, done, left)


def report(device: str, found: dict[str, list[str]], done: list[Cell], left: list[str], peak: float | None) -> str:
    import triton

    wrong = [f"- {case}: {fault}" for case, faults in found.items() for fault in faults]
    checked = [
        f"Correctness: {len(found) - len({w.split(':')[0] for w in wrong})} of {len(found)} as exact as eager.",
        *wrong,
    ]
    notes = [f"- {c.row} {c.direction} N={c.N} d={c.d}, {n}: {t}" for c in done for n, t in c.notes.items()]
    version = f"{device}, torch {torch.__version__}, Triton {triton.__version__}, {datetime.date.today()}; TFLOP/s"
    return "\n\n".join(
        [
            version,
            "\n".join(checked),
            table(done, peak),
            "\n".join(notes),
            f"No time for: {', '.join(left) or 'nothing'}",
        ]
    )


def save(device: str, text: str, found: dict, done: list[Cell], left: list[str]) -> None:
    stem = f"{datetime.date.today()}-{device.lower().replace(' ', '-')}"
    folder = Path(results.FOLDER)
    folder.mkdir(exist_ok=True)
    document = {"environment": results.environment({}), "device": device, "correctness": found, "left": left}
    (folder / f"{stem}.json").write_text(json.dumps(document | {"cells": [asdict(c) for c in done]}, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(text + "\n")


_flush: Tensor

if __name__ == "__main__":
    main()
