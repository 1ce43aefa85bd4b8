"""What the analysis adds to the time of a compilation: models with attention, and models without.

    python benchmarks/compile_time.py                     # every model, each in a process of its own
    python benchmarks/compile_time.py --models bert mamba --output benchmarks/results/<date>-compile-time.md

Inductor compiles with empty caches. "Kernels" is what lowering and LLVM take for those of fused attention. Times are of
the processor, children included, which depends less on what else the machine does; analysis, validation and planning
run in one thread.
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

from results import heading
from warm_start import processor_time

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


def measure(name: str) -> dict[str, float]:
    """Processor seconds of one compilation with its first call, and of our part of it."""
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
        torch.compile(model, backend="fusion")(given)
    spent["total"] = processor_time() - start
    spent["validation"] = sum(verdict.seconds for verdict in sites._verdicts.values())
    return spent


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown: a line per model."""
    lines = [
        "| model | sites | fused | all, s | without fusion's part, s | fusion's part, s | share "
        "| of it kernels, s | share without kernels | validation, s |"
    ]
    lines.append("|---" * 10 + "|")
    for name, spent in found.items():
        rest = spent["total"] - spent["analysis"]
        analysis = spent["analysis"] - spent["kernels"]
        lines.append(
            f"| {name} | {spent['sites']:.0f} | {spent['fused']:.0f} | {spent['total']:.1f} | {rest:.1f} "
            f"| {spent['analysis']:.2f} | {spent['analysis'] / rest:.1%} | {spent['kernels']:.2f} "
            f"| {analysis / rest:.1%} | {spent['validation']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="a file for the table, with machine and versions")
    parser.add_argument("--process", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(measure(arguments.process)))
        return
    found = {}
    bytecode = tempfile.mkdtemp()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode  # a user's process finds what Python has parsed before
    subprocess.run([sys.executable, "-c", f"import {', '.join(PARSED)}"], env=environment, check=False)
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--process", name]
            own = environment | {"TORCHINDUCTOR_CACHE_DIR": folder}
            done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {found[name]}", file=sys.stderr)
    shutil.rmtree(bytecode)
    print(table(found))
    if arguments.output:
        arguments.output.write_text(
            heading("What the analysis adds to compilation: seconds of the processor") + table(found) + "\n"
        )


if __name__ == "__main__":
    main()
