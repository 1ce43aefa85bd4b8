"""What we add to the time of a compilation: models with attention, and models without.

    python -m benchmarks.compile.compile_time                     # every model, each in a process of its own
    python -m benchmarks.compile.compile_time --models bert mamba --rounds 3 --output FILE.md

Inductor compiles with empty caches, alone and for us: with `--rounds`, in turns, and what took the median time of each
is compared. It may take less for us, as fused attention is nothing to it. "Our part" is what analysis, validation,
planning and kernels take; "kernels" is lowering and LLVM. Times are of the processor, children included, which depends
less on what else the machine does; our part runs in one thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common.results import heading
from benchmarks.compile.warm_start import processor_time

LENGTH = 64
PARSED = ("torch._inductor.compile_fx", "fusion.backend", "fusion.codegen.mlir", "fusion.planning.cpu_planner")


def _transformers(kind: str, **sizes: int) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()


def _convolutions() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextModel

    torch.manual_seed(0)
    return ConvNextModel(ConvNextConfig()).eval()


_SMALL = {"hidden_size": 128, "vocab_size": 1000}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: _transformers("bert"),
    "llama, 40 layers": lambda: _transformers(
        "llama", num_hidden_layers=40, num_attention_heads=4, num_key_value_heads=4, intermediate_size=256, **_SMALL
    ),
    "xlstm": lambda: _transformers("xlstm", num_hidden_layers=2, num_heads=4, **_SMALL),
    "recurrent_gemma": lambda: _transformers(
        "recurrent_gemma", num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, lru_width=128, **_SMALL
    ),
    "mamba": lambda: _transformers("mamba", num_hidden_layers=4, **_SMALL),
    "convnext": _convolutions,
}


def inputs(name: str) -> Tensor:
    """Token numbers, or an image."""
    return torch.randn(1, 3, 224, 224) if name == "convnext" else torch.randint(3, 999, (1, LENGTH))


def measure(name: str, compiler: str) -> dict[str, float]:
    """Processor seconds of one compilation with its first call by a backend, and of our part of it."""
    from fusion import backend
    from fusion.validation import sites

    kernels = importlib.import_module("fusion.codegen.mlir.compile")  # the package has a function of that name
    spent = {"analysis": 0.0, "kernels": 0.0, "sites": 0.0, "fused": 0.0}
    fuse = backend.fuse

    def timed(*arguments):
        start = time.process_time()
        found, report = fuse(*arguments)
        spent["analysis"] += time.process_time() - start
        spent["sites"] += len(report.sites)
        spent["fused"] += report.fused
        return found, report

    def of_kernels(name: str) -> None:
        """Count what a function of the compilation of kernels takes, in any thread."""
        inner = getattr(kernels, name)

        def counted(*arguments):
            start = time.thread_time()
            try:
                return inner(*arguments)
            finally:
                spent["kernels"] += time.thread_time() - start

        setattr(kernels, name, counted)

    of_kernels("_engine")
    of_kernels("_object")
    backend.fuse = timed
    model, given = MODELS[name](), inputs(name)
    with torch.no_grad():
        model(given)
        start = processor_time()
        torch.compile(model, backend=compiler)(given)
    spent["total"] = processor_time() - start
    spent["validation"] = sum(verdict.seconds for verdict in sites._verdicts.values())
    return spent


def table(found: dict[str, tuple[dict[str, float], float]]) -> str:
    """Markdown: a line per model, of what was spent with us and what Inductor takes alone."""
    lines = [
        "| model | sites | fused | Inductor alone, s | with us, s | added | our part, s | share "
        "| of it kernels, s | share without kernels | validation, s |"
    ]
    lines.append("|---" * 11 + "|")
    for name, (spent, alone) in found.items():
        analysis = spent["analysis"] - spent["kernels"]
        lines.append(
            f"| {name} | {spent['sites']:.0f} | {spent['fused']:.0f} | {alone:.1f} | {spent['total']:.1f} "
            f"| {spent['total'] / alone - 1:.1%} | {spent['analysis']:.2f} | {spent['analysis'] / alone:.1%} "
            f"| {spent['kernels']:.2f} | {analysis / alone:.1%} | {spent['validation']:.2f} |"
        )
    return "\n".join(lines)


def in_process(name: str, compiler: str, environment: dict[str, str]) -> dict[str, float]:
    """`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.compile.compile_time", "--process", name, compiler]
        own = environment | {"TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {compiler}: {found}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="a file for the table, with machine and versions")
    parser.add_argument("--rounds", type=int, default=1, help="compilations of each model by each backend")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(measure(*arguments.process)))
        return
    found = {}
    bytecode = tempfile.mkdtemp()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode  # a user's process finds what Python has parsed before
    subprocess.run([sys.executable, "-c", f"import {', '.join(PARSED)}"], env=environment, check=False)
    for name in arguments.models:
        runs: dict[str, list[dict[str, float]]] = {"inductor": [], "fusion": []}
        for _ in range(arguments.rounds):
            for compiler, spent in runs.items():
                spent.append(in_process(name, compiler, environment))
        alone, ours = (sorted(r, key=lambda spent: spent["total"])[len(r) // 2] for r in runs.values())
        found[name] = ours, alone["total"]
    shutil.rmtree(bytecode)
    print(table(found))
    if arguments.output:
        arguments.output.write_text(
            heading("What we add to compilation: seconds of the processor") + table(found) + "\n"
        )


if __name__ == "__main__":
    main()
