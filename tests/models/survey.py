"""Try many architectures: `python -m tests.models.survey [--names bert gpt2 | --zoo | --all] [--backend fusion]`.

Every class behind `transformers.AutoModel` is shrunk, given inputs of the kind that its signature asks for, and run in
eager mode; with `--backend` it is then compiled and compared, and the table shows sites found by an independent count,
sites fused, and why the rest were not. A model that fails is a row, not the end of the run.
"""

import argparse
import collections
import contextlib
import gc
import json
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.models.build import Entropy, build
from tests.models.inputs import kinds_for, make


@dataclass(slots=True, kw_only=True)
class Row:
    """What happened to one architecture."""

    name: str
    class_name: str = ""
    kind: str = ""
    entropy: float = float("nan")
    seconds: float = 0.0
    error: str = ""
    where: str = ""


class TimedOut(Exception):
    """One architecture took too long."""


@contextlib.contextmanager
def time_limit(seconds: int):
    """Raise TimedOut in the main thread after `seconds`."""

    def stop(signum, frame):
        raise TimedOut(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def architectures() -> dict[str, str]:
    """model_type -> class name, over AutoModel and, for types without a base model, the heads."""
    found: dict[str, str] = {}
    for mapping in [modeling_auto.MODEL_MAPPING_NAMES] + [
        getattr(modeling_auto, name)
        for name in sorted(vars(modeling_auto))
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
    ]:
        for model_type, name in mapping.items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def find_inputs(model, batch: int = 2):
    """The first kind of inputs with which `model` runs: (kind, inputs, seconds). Raises the first error otherwise."""
    first: Exception | None = None
    for kind in kinds_for(model):
        try:
            inputs = make(kind, model, batch=batch)
            start = time.perf_counter()
            with torch.no_grad():
                model(**inputs)
            return kind, inputs, time.perf_counter() - start
        except TimedOut:
            raise
        except Exception as error:
            first = first or error
    raise first or NotImplementedError(f"no kind of inputs for {sorted(kinds_for(model))}")


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if "transformers/models" in f.filename), frames[-1])
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno} {last.line}"


def try_eager(model_type: str, class_name: str, limit: int) -> tuple[Row, torch.nn.Module | None, dict | None]:
    """Build and run one architecture."""
    row = Row(name=model_type, class_name=class_name)
    try:
        with time_limit(limit):
            model = build(getattr(transformers, class_name))
            size = sum(p.numel() for p in model.parameters())
            if size > 20_000_000:
                raise MemoryError(f"{size / 1e6:.0f} M parameters")
            row.kind, inputs, row.seconds = find_inputs(model)
            with Entropy() as entropy, torch.no_grad():
                model(**inputs)
            if entropy.shares:
                row.entropy = sum(entropy.shares) / len(entropy.shares)
            return row, model, inputs
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        if len(str(error).split("\n")) > 1:
            row.error += " | " + " ".join(str(error).split("\n")[1:])[:120]
        row.where = _where(error)
    return row, None, None


def main(argv: list[str] | None = None) -> int:
    """Run the survey and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--names", nargs="*", help="model types; all by default")
    parser.add_argument("--limit", type=int, default=20, help="seconds per architecture")
    parser.add_argument("--errors", action="store_true", help="list what failed")
    parser.add_argument("--json", help="write the rows there")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    every = architectures()
    names = arguments.names or sorted(every)
    rows = []
    for name in names:
        row, _, _ = try_eager(name, every[name], arguments.limit)
        rows.append(row)
        gc.collect()
        if sys.stderr.isatty():
            print(f"\r{len(rows)}/{len(names)} {name:40}", end="", file=sys.stderr)
    ran = [r for r in rows if not r.error]
    print(f"{len(ran)} of {len(rows)} ran")
    print(collections.Counter(r.kind for r in ran))
    if arguments.errors:
        for r in rows:
            if r.error:
                print(f"{r.name:28} {r.error}\n{'':30}{r.where}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(r) for r in rows], file, indent=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
