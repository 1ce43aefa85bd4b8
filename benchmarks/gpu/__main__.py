"""Attention on one GPU, side by side in one process: SDPA's kernels, compiled FlexAttention, Inductor and fusion.

    python -m benchmarks.gpu                    at most 8 minutes: correctness, tiles, speed, the most telling first
    python -m benchmarks.gpu --phase check --caches .caches          correctness alone; what it compiles is kept there
    python -m benchmarks.gpu --phase tiles time --caches .caches --continue benchmarks/results/<date>-<gpu>.json
    python -m benchmarks.gpu --quick            the first cells at N = 4096, d = 128, three minutes
    python -m benchmarks.gpu --rows causal --N 8192 --d 128 --no-models --no-training
    python -m benchmarks.gpu --rehearse         no GPU: tiny sizes on CPU tensors, kernels in Triton's interpreter

Phases. check: outputs and gradients of every variant against float64 by the rule that the tests use, the same bits
twice, CUDA graphs, dropout. tiles: some kernels in other tiles and
forms than the planned ones. time: medians of device times over turns in which every competitor runs once, in TFLOP/s of
the two matrix products over live pairs, or GB/s where queries are few; whole models; training: losses, steps, peak
memory; what calls launch. The report begins with the project's targets, and whether they were met. Writes
<date>-<gpu>.json and .md to --out, and a .log with the tracebacks of all that failed; what there was no time for is
named. --continue takes such a .json up again: its steps are not repeated, findings are added. A rehearsal writes only
where --out says.

The steps run in a process of their own, and what they find is kept in the JSON file after each: if a kernel brings the
process down or takes longer than its step may, that step is noted and another process goes on with the next. Others
compile ahead, into the caches on disk.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS
from benchmarks.gpu.device import Device, Gpu, Rehearsal
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.report import report
from benchmarks.gpu.steps import HEADS, PHASES, TELLING, compile_ahead, work
from fusion.codegen.triton.apart import NO_TIME, run_restarting

SHARES = {"check": 0.3, "tiles": 0.2, "time": 0.5}  # of the time, by phase
COMPILING = 0.3  # share of a phase's time in which is only compiled, where what is measured must not be disturbed
LAST_STEP = 25  # s from when no step is begun until the process is stopped
REHEARSED = ("causal", "bias", "latent decode")
NO_GPU = (
    "benchmarks.gpu needs a GPU that torch can use, and found none. What can be done without one: `python -m "
    "benchmarks.gpu --rehearse` (every line of this, nothing measured), `python -m pytest tests/codegen/triton` "
    "(results, in Triton's interpreter) and `python -m benchmarks.offline.triton_versions` (registers, spills and "
    "instructions of compiled kernels)."
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = results.parser(__doc__)
    parser.add_argument("--rows", nargs="*", choices=[*GPU_ROWS], help="attention variants (default: all)")
    parser.add_argument("--N", nargs="+", type=int, default=[8192, 4096, 16384, 2048], help="lengths, in this order")
    parser.add_argument("--d", nargs="+", type=int, choices=[*HEADS], default=[128, 64, 512, 256])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES), help="what is done (default: all)")
    parser.add_argument("--continue", dest="begun", type=Path, help="the .json of an earlier run, to be gone on with")
    parser.add_argument("--caches", type=Path, help="folder of compiled kernels (default: torch's own)")
    parser.add_argument("--minutes", type=float, default=7.7, help="time for everything")
    parser.add_argument("--ahead", type=int, default=6, help="processes that compile ahead (0: none)")
    parser.add_argument("--autotune", action="store_true", help="fusion measures its tiles first (option autotune)")
    parser.add_argument("--quick", action="store_true", help="N = 4096, d = 128, telling rows only, three minutes")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: every line, tiny sizes, no meaning")
    parser.add_argument("--out", type=Path, help="folder of the result (default: benchmarks/results)")
    parser.add_argument("--work", choices=PHASES, help=argparse.SUPPRESS)  # the phase whose steps this process takes
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of them, to be compiled ahead
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rehearse and options.out is not None and options.out.resolve() == results.FOLDER:
        parser.error("--rehearse measures nothing; give --out another folder than that of the results")
    if options.quick:
        options.N, options.d, options.minutes = [4096], [128], 3.0
        options.no_models = options.no_training = True
        options.rows = options.rows or [*TELLING, "decode"]
    options.rows = options.rows or (REHEARSED if options.rehearse else list(GPU_ROWS))
    return options


def device_of(options: argparse.Namespace) -> Device:
    return Rehearsal() if options.rehearse else Gpu(options.autotune)


class Crew:
    """Commands that run side by side, whose end nobody waits for; `dismiss` kills those that still run."""

    def __init__(self, commands: Sequence[Sequence[str]]):
        quiet = subprocess.DEVNULL
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # each: they are several themselves
        self.members = [subprocess.Popen(c, env=environment, stdout=quiet, stderr=quiet) for c in commands]

    def busy(self) -> bool:
        return any(member.poll() is None for member in self.members)

    def dismiss(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()


def supervise(options: argparse.Namespace, path: Path) -> None:
    """Each phase in processes of its own, while or after others compile ahead; the findings are in `path`."""
    again = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--state", str(path)]
    whole = sum(SHARES[phase] for phase in options.phase)
    end = time.time() + 60 * options.minutes

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

    def patience() -> float:
        return Findings.read(path).patience

    for at, phase in enumerate(options.phase):
        rest = sum(SHARES[other] for other in options.phase[at:]) / whole
        share = SHARES[phase] / whole / rest
        stop = time.time() + share * max(0.0, end - time.time())
        compiling = time.time() + COMPILING * (stop - time.time())
        parts = 0 if options.rehearse else options.ahead
        crew = Crew([[*again, "--work", phase, "--part", str(part)] for part in range(parts)])
        try:
            while phase != "check" and crew.busy() and time.time() < compiling:
                time.sleep(0.2)
            if phase != "check":
                crew.dismiss()  # nothing else may use the device while times are taken
            run_restarting([*again, "--work", phase, "--until", str(stop - LAST_STEP)], path, stop, patience, lost)
        finally:
            crew.dismiss()


def keep_compiled(folder: Path) -> None:
    """Let torch, Triton and fusion keep what they compile in this folder, in this process and its children."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve() / "triton")


def stem_of(options: argparse.Namespace, name: str) -> Path | None:
    """Where the results go, without suffix; None where they are only printed."""
    if options.begun is not None:
        return options.begun.with_suffix("")
    folder = options.out or (None if options.rehearse else results.FOLDER)
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d-%H%M}-{name.lower().replace(' ', '-')}"


def main() -> None:
    options = parse()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    if options.part is not None:
        compile_ahead(options.work, options, device_of(options), options.part, options.ahead)
        return
    if options.work:
        found = Findings.read(options.state)
        work(found, options, device_of(options), options.work, options.until, options.state)
        return
    name = "rehearsal" if options.rehearse else torch.cuda.get_device_name()
    stem = stem_of(options, name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped from outside"))  # and the report is written
    if options.caches is not None:
        keep_compiled(options.caches)
    with tempfile.TemporaryDirectory() as temporary:
        path = stem.with_suffix(".json") if stem is not None else Path(temporary, "findings.json")
        if options.begun is None:
            environment = results.environment() | {"arguments": sys.argv[1:], "cuda": torch.version.cuda}
            Findings(environment=environment, device=name, rehearsal=options.rehearse).write(path)
        try:
            supervise(options, path)
        finally:
            text = report(Findings.read(path), device_of(options).machine)
            Console(width=200).print(text, markup=False, highlight=False)
            if stem is not None:
                stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
