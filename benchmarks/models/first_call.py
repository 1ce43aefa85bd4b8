"""The first call of a compiled model, in a process of its own: seconds by the clock and of the processor.

    python -m benchmarks.models.first_call cold [--models bert mamba] [--rounds 3] [--output FILE.md]
    python -m benchmarks.models.first_call warm [--models bert] [--rounds 7] [--train] [--output FILE.md]

cold: compilers' caches are empty. Inductor compiles alone and for us, in turns; the median of each is compared. It may
take less for us, as fused attention is nothing to it. --beside MKL: not Inductor alone, but fusion with all products of
linear layers left to MKL, beside fusion. "Our part" is what analysis, validation, planning and kernels
take, "kernels" lowering and LLVM. warm: a first process fills the caches of a backend, others find them there; a first
call includes what is imported for it, and one run of the model. --train: forward and backward in training, of 512
tokens in place of 64. Processor times include children, and depend less on what else the machine does; our part runs in
one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BACKENDS = {"inductor": ("inductor", None), "MKL": ("fusion", {"linear": "never"}), "fusion": ("fusion", None)}
PARSED = """import torch, fusion.backend, fusion.codegen.cpu, fusion.planning.cpu_planner
torch.compile(lambda x: x.sin())(torch.ones(1))"""
"""Program that imports what the measured ones import, so that its bytecode is there."""


def _transformers(kind: str, tokens: int, **sizes: int) -> tuple[Any, Any]:
    """A model of transformers and its input: token numbers, or an image."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    return model, torch.randn(1, 3, 224, 224) if kind == "convnext" else torch.randint(3, 999, (1, tokens))


_SMALL = {"hidden_size": 128, "vocab_size": 1000}
MODELS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "bert": functools.partial(_transformers, "bert"),
    "llama, 40 layers": functools.partial(
        _transformers, "llama", num_hidden_layers=40, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=256, **_SMALL,
    ),
    "xlstm": functools.partial(_transformers, "xlstm", num_hidden_layers=2, num_heads=4, **_SMALL),
    "recurrent_gemma": functools.partial(
        _transformers, "recurrent_gemma", num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        lru_width=128, **_SMALL,
    ),
    "mamba": functools.partial(_transformers, "mamba", num_hidden_layers=4, **_SMALL),
    "convnext": functools.partial(_transformers, "convnext"),
}  # fmt: skip


def processor_time() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def count_our_part(spent: dict[str, float]) -> None:
    """Add to `spent`, from now on, what our analysis takes in this process and what of it kernels take."""
    from fusion import backend
    from fusion.codegen.cpu import machine_code

    fuse = backend.fuse

    def timed(*arguments):
        start = time.process_time()
        graph, report = fuse(*arguments)
        spent["analysis"] += time.process_time() - start
        spent["sites"] += len(report.sites)
        spent["fused"] += report.fused
        return graph, report

    def counted(inner: Callable[..., Any], *arguments):
        start = time.thread_time()  # kernels are compiled in any thread
        try:
            return inner(*arguments)
        finally:
            spent["kernels"] += time.thread_time() - start

    backend.fuse = timed
    for name in ("_engine", "_object"):
        setattr(machine_code, name, functools.partial(counted, getattr(machine_code, name)))


def measure(name: str, compiler: str, cold: bool, train: bool) -> dict[str, float]:
    """Seconds of `torch.compile` and the first call, with its backward where it trains, in this process."""
    import torch
    from torch._dynamo.utils import counters

    spent: dict[str, float] = dict.fromkeys(("analysis", "kernels", "sites", "fused", "validation"), 0.0)
    if cold:
        count_our_part(spent)
    model, x = MODELS[name](512 if train else 64)

    def call(run: Callable[..., Any]) -> None:
        result = run(x)
        if train:
            result[0].sum().backward()

    with torch.set_grad_enabled(train):
        call(model.train(train))  # torch's threads and libraries are there
        start, used = time.perf_counter(), processor_time()
        backend, options = BACKENDS[compiler]
        call(torch.compile(model, backend=backend, options=options))
        spent |= {"clock": time.perf_counter() - start, "processor": processor_time() - used}
    if cold:
        from fusion.validation import sites

        spent["validation"] = sum(verdict.seconds for verdict in sites._verdicts.values())
    return spent | {name: n for group in counters.values() for name, n in group.items() if "cache" in name}


def in_process(task: Sequence[str], name: str, compiler: str, cache: str, bytecode: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.models.first_call", *task, "--process", name, compiler]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's process finds what Python has parsed before
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    spent = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {compiler}: {spent}", file=sys.stderr)
    return spent


def cold(options: argparse.Namespace, bytecode: str) -> list[list[str]]:
    """A line per model: what was spent with us, and what Inductor takes alone."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
    subprocess.run([sys.executable, "-c", PARSED], env=environment, check=False)
    lines = []
    for name in options.models or MODELS:
        runs: dict[str, list[dict[str, float]]] = {options.beside: [], "fusion": []}
        for _ in range(options.rounds or 1):
            for compiler, spent in runs.items():
                with tempfile.TemporaryDirectory() as cache:
                    spent.append(in_process(["cold"], name, compiler, cache, bytecode))
        alone, ours = (sorted(r, key=lambda spent: spent["processor"])[len(r) // 2] for r in runs.values())
        inductor, rest = alone["processor"], ours["analysis"] - ours["kernels"]
        lines.append([
            name, f"{ours['sites']:.0f}", f"{ours['fused']:.0f}", f"{inductor:.1f}", f"{ours['processor']:.1f}",
            f"{ours['processor'] / inductor - 1:.1%}", f"{ours['analysis']:.2f}", f"{ours['analysis'] / inductor:.1%}",
            f"{ours['kernels']:.2f}", f"{rest / inductor:.1%}", f"{ours['validation']:.2f}",
        ])  # fmt: skip
    return lines


def warm(options: argparse.Namespace, bytecode: str) -> list[list[str]]:
    """A line per model, backend and state of its cache."""
    lines, task = [], ["warm", *["--train"] * options.train]
    for name in options.models or ["bert"]:
        runs: dict[str, list[dict[str, float]]] = {options.beside: [], "fusion": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range((options.rounds or 7) + 1):
                for backend in list(runs)[:: 1 if turn % 2 else -1]:
                    runs[backend].append(in_process(task, name, backend, f"{folder}/{backend}", bytecode))
        for backend, spent in runs.items():
            for state, some in (("empty", spent[:1]), ("filled", spent[1:])):
                times = [f"{statistics.median(r[clock] for r in some):.2f}" for clock in ("clock", "processor")]
                hits = ", ".join(f"{key} {n}" for key, n in some[-1].items() if "cache" in key)
                lines.append([name, backend, state, *times, hits])
    return lines


HEADERS = {
    "cold": ["model", "sites", "fused", "alone, s", "with us, s", "added", "our part, s", "share",
             "of it kernels, s", "share without kernels", "validation, s"],
    "warm": ["model", "backend", "caches", "clock, s", "processor, s", "hits and misses"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(HEADERS))
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--rounds", type=int, help="processes of each backend (cold: 1; warm: 7 with filled caches)")
    parser.add_argument("--beside", default="inductor", choices=["inductor", "MKL"], help="what is alone")
    parser.add_argument("--train", action="store_true", help="warm: forward and backward of 512 tokens")
    parser.add_argument("--output", type=Path, help="a file for the table, with machine and versions")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        name, compiler = options.process
        print(json.dumps(measure(name, compiler, options.task == "cold", options.train)))
        return
    from benchmarks.common.results import heading, table  # imports torch, whose time is part of what is measured

    with tempfile.TemporaryDirectory() as bytecode:
        lines = (cold if options.task == "cold" else warm)(options, bytecode)
    text = table(HEADERS[options.task], lines)
    print(text)
    if options.output:
        title = f"First call of models, {options.task} caches" + ", in training" * options.train
        options.output.write_text(heading(title) + text + "\n")


if __name__ == "__main__":
    main()
