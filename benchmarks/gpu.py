"""Attention on one GPU, side by side in one process: SDPA's kernels, compiled FlexAttention, Inductor and fusion.

    python benchmarks/gpu.py                    at most 8 minutes: correctness, then speed, the most telling first
    python benchmarks/gpu.py --quick            the first cells at N = 4096, d = 128, three minutes
    python benchmarks/gpu.py --rows causal --N 8192 --d 128 --no-models --no-training
    python benchmarks/gpu.py --rehearse         no GPU: tiny sizes on CPU tensors, kernels in Triton's interpreter

Correctness: outputs and gradients of every variant against float64 by the rule that the tests use, the same bits twice,
CUDA graphs, dropout. Speed: medians of device times over turns in which every competitor runs once, in TFLOP/s of the
two matrix products over live pairs, or GB/s where queries are few; whole models; training: losses, steps, peak memory;
what calls launch. Begins with the project's targets, and whether they were met. Writes <date>-<gpu>.json and .md to
--out, and a .log with the tracebacks of all that failed; what there was no time for is named. A rehearsal writes only
where --out says.

The steps run in a process of their own, and what they find is kept in the JSON file after each: if a kernel brings the
process down or hangs, that step is noted and another process goes on with the next. Others compile ahead, into the
caches on disk, while results are checked.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

import results
from gpu_device import Device, Gpu, Rehearsal
from gpu_findings import Findings
from gpu_report import report
from gpu_steps import HEADS, TELLING, Sizes, compile_ahead, steps, work
from gpu_supervisor import NO_TIME, Crew, attend
from rows import GPU_ROWS

CHECKING = 0.3  # share of the time in which steps of the phase "check" may begin, and ahead of which is compiled
SILENCE = 200  # s without a finished step after which a process counts as hung
LAST_STEP = 30  # s from when no step is begun until the process is stopped
REHEARSED = ("causal", "bias", "latent decode")
NO_GPU = (
    "benchmarks/gpu.py needs a GPU that torch can use, and found none. What can be done without one: `python "
    "benchmarks/gpu.py --rehearse` (every line of this, nothing measured), `python -m pytest tests/codegen/triton` "
    "(results, in Triton's interpreter) and `python benchmarks/triton_versions.py` (registers, spills and instructions "
    "of compiled kernels)."
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[*GPU_ROWS], help="attention variants (default: all)")
    parser.add_argument("--N", nargs="+", type=int, default=[8192, 4096, 16384, 2048], help="lengths, in this order")
    parser.add_argument("--d", nargs="+", type=int, choices=[*HEADS], default=[128, 64, 512, 256])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--minutes", type=float, default=7.7, help="time for everything")
    parser.add_argument("--ahead", type=int, default=6, help="processes that compile ahead (0: none)")
    parser.add_argument("--autotune", action="store_true", help="fusion measures its tiles first (option autotune)")
    parser.add_argument("--quick", action="store_true", help="N = 4096, d = 128, telling rows only, three minutes")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: every line, tiny sizes, no meaning")
    parser.add_argument("--out", type=Path, help="folder of the result (default: benchmarks/results)")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # the phase whose steps this process takes
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of what is compiled ahead
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rehearse and options.out is not None and options.out.resolve() == results.FOLDER:
        parser.error("--rehearse measures nothing; give --out another folder than that of the results")
    if options.quick:
        options.N, options.d, options.minutes = [4096], [128], 3.0
        options.no_models = options.no_training = True
        options.rows = options.rows or [*TELLING, "decode"]
    return options


def sizes_of(options: argparse.Namespace) -> Sizes:
    rows = options.rows or (REHEARSED if options.rehearse else tuple(GPU_ROWS))
    return Sizes(
        rows=tuple(rows),
        N=tuple(options.N),
        d=tuple(options.d),
        dtype=options.dtype,
        models=not options.no_models,
        training=not options.no_training,
    )


def device_of(options: argparse.Namespace) -> Device:
    return Rehearsal() if options.rehearse else Gpu(options.autotune)


def started(options: argparse.Namespace, device: str) -> Findings:
    environment = results.environment({}) | {"arguments": sys.argv[1:], "cuda": torch.version.cuda}
    return Findings(environment=environment, device=device, rehearsal=options.rehearse)


def supervise(options: argparse.Namespace, path: Path) -> None:
    """Check while others compile ahead, then measure, each in processes of its own; the findings are in `path`."""
    end = time.time() + 60 * options.minutes
    checking = time.time() + 60 * options.minutes * CHECKING
    again = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--state", str(path)]

    def lost(reason: str) -> None:
        found = Findings.read(path)
        if reason != NO_TIME:
            if found.current is not None:
                found.tried.append(found.current)
                if found.current.startswith("check "):
                    found.checks[found.current.removeprefix("check ")] = [reason]
            found.failed[found.current or f"start {len(found.failed)}"] = reason
        found.current = None
        found.write(path)

    crew = Crew([[*again, "--part", str(part)] for part in range(0 if options.rehearse else options.ahead)])
    try:
        for phase, last, stop in (("check", checking, checking + LAST_STEP), ("time", end - LAST_STEP, end)):
            attend([*again, "--work", phase, "--until", str(last)], path, stop, SILENCE, lost)
            while crew.busy() and time.time() < checking:
                time.sleep(0.2)
            crew.dismiss()  # nothing else may use the device while times are taken
    finally:
        crew.dismiss()


def finish(options: argparse.Namespace, found: Findings, device: Device, stem: Path | None) -> None:
    """Print the report, and write it beside the findings."""
    begun = {*found.tried, *found.failed}
    found.left = [step.title for step in steps(sizes_of(options), device) if step.title not in begun]
    found.environment["device"] = found.device
    text = report(found, device.machine)
    Console(width=200).print(text, markup=False, highlight=False)
    if stem is not None:
        found.write(stem.with_suffix(".json"))
        stem.with_suffix(".md").write_text(text)


def main() -> None:
    options = parse()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    if options.part is not None:
        compile_ahead(sizes_of(options), device_of(options), options.part, options.ahead)
        return
    if options.work:
        found = Findings.read(options.state)
        work(found, sizes_of(options), device_of(options), options.work, options.until, options.state)
        return
    name = "rehearsal" if options.rehearse else torch.cuda.get_device_name()
    folder = options.out or (None if options.rehearse else results.FOLDER)
    stem = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d-%H%M}-{name.lower().replace(' ', '-')}"
    with tempfile.TemporaryDirectory() as temporary:
        path = stem.with_suffix(".json") if stem is not None else Path(temporary, "findings.json")
        started(options, name).write(path)
        supervise(options, path)
        finish(options, Findings.read(path), device_of(options), stem)


if __name__ == "__main__":
    main()
