"""The first call of a compiled model in a process of its own: cold caches, and caches that another process filled.

    python -m benchmarks.compile.warm_start                       # BERT-base, fusion and Inductor
    python -m benchmarks.compile.warm_start --repeats 9 --output benchmarks/results/<date>-warm-start.md

Each backend has a cache folder of its own. Processes run in turns, and the table has medians of seconds by the clock
and of processor time (children included), which depends less on what else the machine does. A first call includes what
is imported for it, and one run of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BACKENDS = ("inductor", "fusion")
LENGTH = 128


def first_call(backend: str, model_name: str, layers: int) -> dict[str, float]:
    """Seconds of `torch.compile` and the first call, in this process."""
    import torch

    from benchmarks.common.model_zoo import MODELS

    model = MODELS[model_name]
    module = model.make("sdpa", num_hidden_layers=layers)
    x = model.inputs(LENGTH)
    with torch.no_grad():
        module(x)  # torch's threads and libraries are there
        start, used = time.perf_counter(), processor_time()
        out = torch.compile(module, backend=backend)(x)
        clock, processor = time.perf_counter() - start, processor_time() - used
    assert out.isfinite().all()
    from torch._dynamo.utils import counters

    hits = {name: count for group in counters.values() for name, count in group.items() if "cache" in name}
    return {"clock": clock, "processor": processor} | hits


def processor_time() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(backend: str, cache: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One process."""
    command = [sys.executable, "-m", "benchmarks.compile.warm_start", "--process", backend, "--model", arguments.model]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache / backend)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second process does not parse Python again
    environment["PYTHONPYCACHEPREFIX"] = str(cache / backend / "bytecode")
    command += ["--layers", str(arguments.layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{backend}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: a line per backend and state of its cache."""
    lines = ["| backend | caches | clock, s | processor, s | hits and misses |", "|---|---|---|---|---|"]
    for backend, runs in found.items():
        for state, some in (("empty", runs[:1]), ("filled", runs[1:])):
            clock, processor = (statistics.median(r[name] for r in some) for name in ("clock", "processor"))
            counted = ", ".join(f"{name} {count}" for name, count in some[-1].items() if "cache" in name)
            lines.append(f"| {backend} | {state} | {clock:.2f} | {processor:.2f} | {counted} |")
    more = [
        statistics.median(a[name] - b[name] for a, b in zip(found["fusion"][1:], found["inductor"][1:], strict=True))
        for name in ("clock", "processor")
    ]
    lines += [
        "",
        f"A second process with fusion takes {more[0]:.2f} s more by the clock, {more[1]:.2f} s of a processor",
    ]
    return "\n".join(lines) + " (medians of the differences, run by run)."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert", choices=("bert", "vit", "llama"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7, help="processes with filled caches, of each backend")
    parser.add_argument("--output", type=Path, help="a file for the table, with machine and versions")
    parser.add_argument("--process", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(first_call(arguments.process, arguments.model, arguments.layers)))
        return
    found: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.repeats + 1):
            for backend in BACKENDS if turn % 2 else BACKENDS[::-1]:
                found[backend].append(run(backend, Path(folder), arguments))
                print(f"{turn}: {backend}: {found[backend][-1]}", file=sys.stderr)
    text = table(found)
    print(text)
    if arguments.output:
        from benchmarks.common.results import heading  # imports torch, whose time is part of what is measured

        title = f"First call of {arguments.model}, {arguments.layers} layers, {LENGTH} tokens, in a process of its own"
        arguments.output.write_text(heading(title) + text + "\n")


if __name__ == "__main__":
    main()
