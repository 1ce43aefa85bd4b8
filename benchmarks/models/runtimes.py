"""Whole models on a CPU beside the runtimes that people deploy with: the same weights and inputs, a process for each.

    python -m benchmarks.models.runtimes [--models bert vit] [--dtypes float32 bfloat16] [--batches 1 8]
        [--lengths 128 512 2048] [--runtimes eager Inductor fusion onnxruntime openvino zentorch]
        [--python onnxruntime=PATH zentorch=PATH] [--seconds 10] [--busy] [--append FILE.json]

The models are transformers', and a U-Net is diffusers', made from configurations with random weights; batches of more
than one text are padded. A runtime that is not installed fails, with a note: `pip install ".[runtimes]"` in a clone,
and `pip install zentorch`, which asks for one version of torch; --python names the interpreter of an environment that
has one. "fusion+tf32" is fusion where `torch.set_float32_matmul_precision("high")` allows less than float32,
"fusion+packed" with `linear="packed"`, "fusion+frozen" where Inductor's `freezing` makes constants of weights. Errors
are shares of what the project's rule allows beside eager mode, over real tokens. A runtime has one process for all rows
of a model and a dtype; once all are ready, each is called for --seconds a row, in three turns. A first compilation
takes up to a minute. Files are written after each row, and --append adds to one. --busy: one thread, and the processor
time that the process takes.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

import fusion
from benchmarks.common import results
from benchmarks.common.measuring import Entry, interleave
from benchmarks.common.model_zoo import MODELS as LARGE
from benchmarks.common.model_zoo import SMALL, VOCABULARY
from fusion.exactness import errors

MODELS = LARGE | SMALL
Inputs = tuple[Tensor, ...]
Call = Callable[[], Tensor]


def inputs_of(name: str, batch: int, N: int, dtype: torch.dtype) -> Inputs:
    """Token ids `[B, N]` with a mask of those that are real where B > 1, or B images."""
    generator = torch.Generator().manual_seed(0)
    if (one := MODELS[name].inputs(N)).is_floating_point():
        return (torch.randn(batch, *one.shape[1:], generator=generator).to(dtype),)
    tokens = torch.randint(0, VOCABULARY, (batch, N), generator=generator)
    lengths = N - torch.arange(batch) * N // (2 * batch)
    return (tokens,) if batch == 1 else (tokens, (torch.arange(N) < lengths[:, None]).long())


def _compiled(backend: str, options: dict[str, Any], model: nn.Module, inputs: Inputs, _: Path) -> Call:
    if "zentorch" in (backend, options.get("inner")):
        import zentorch  # noqa: F401  # type: ignore[reportMissingImports]  (registers itself)
    run = torch.compile(model, backend=backend, options=options or None, dynamic=False)
    return lambda: run(*inputs)


def _with_tf32(model: nn.Module, inputs: Inputs, folder: Path) -> Call:
    torch.set_float32_matmul_precision("high")
    return _compiled("fusion", {}, model, inputs, folder)


def _frozen(model: nn.Module, inputs: Inputs, folder: Path) -> Call:
    inductor.freezing = True
    return _compiled("fusion", {}, model, inputs, folder)


def _onnxruntime(model: nn.Module, inputs: Inputs, folder: Path) -> Call:
    import onnxruntime  # type: ignore[reportMissingImports]

    path = folder / "model.onnx"
    torch.onnx.export(model, inputs, str(path), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _openvino(model: nn.Module, inputs: Inputs, _: Path) -> Call:
    import openvino  # type: ignore[reportMissingImports]

    dtype = next(model.parameters()).dtype
    inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    settings = {"INFERENCE_PRECISION_HINT": "bf16" if dtype is torch.bfloat16 else "f32",
                "INFERENCE_NUM_THREADS": torch.get_num_threads()}  # fmt: skip
    graph = openvino.convert_model(torch.export.export(copy.deepcopy(model).float(), inputs))
    run = openvino.Core().compile_model(graph, "CPU", settings)
    arrays = [x.numpy() for x in inputs]
    return lambda: torch.from_numpy(run(arrays)[0])


RUNTIMES: dict[str, Callable[[nn.Module, Inputs, Path], Call]] = {
    "eager": lambda model, inputs, _: lambda: model(*inputs),
    "Inductor": functools.partial(_compiled, "inductor", {}),
    "fusion": functools.partial(_compiled, "fusion", {}),
    "fusion+tf32": _with_tf32,
    "fusion+packed": functools.partial(_compiled, "fusion", {"linear": "packed"}),
    "fusion+frozen": _frozen,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "zentorch": functools.partial(_compiled, "zentorch", {}),
    "fusion+zentorch": functools.partial(_compiled, "fusion", {"inner": "zentorch"}),
}


def built(group: dict) -> tuple[nn.Module, list[Inputs]]:
    """The model of a group of rows, and the inputs of each row."""
    model, dtype = MODELS[group["model"]], getattr(torch, group["dtype"])
    fewer = {model.layers: group["layers"]} if group["layers"] else {}
    inputs = [inputs_of(group["model"], batch, N, dtype) for batch, N in group["sizes"]]
    return model.make("eager", **fewer).to(dtype), inputs


def prepare(group: dict, folder: Path) -> None:
    """Write weights, and the results of eager mode and float64 for each row, for all runtimes."""
    model, rows = built(group)
    torch.save(model.state_dict(), folder / "weights.pt")
    wide = copy.deepcopy(model).double()
    for inputs, size in zip(rows, group["sizes"], strict=True):
        exact = wide(*(x.double() if x.is_floating_point() else x for x in inputs))
        torch.save([_real(result, inputs) for result in (model(*inputs), exact)], folder / f"results {size}.pt")


def _real(result: Tensor, inputs: Inputs) -> Tensor:
    """The results of real tokens."""
    return result[inputs[1].bool()] if len(inputs) > 1 else result


def ready(runtime: str, group: dict, folder: Path) -> Iterator[tuple[dict, Call]]:
    """Figures of each row after its first call in a runtime, in this process (seconds of it, error), and the call."""
    model, rows = built(group)
    model.load_state_dict(torch.load(folder / "weights.pt"))
    for inputs, size in zip(rows, group["sizes"], strict=True):
        start = time.perf_counter()
        call = RUNTIMES[runtime](model, inputs, folder)
        result = call()
        first = time.perf_counter() - start
        share = errors(_real(result, inputs), *torch.load(folder / f"results {size}.pt")).share
        versions = {name: version for name in ("torch", runtime) if (version := results.version_of(name))}
        yield {"first_call": first, "share": share, "versions": versions}, call


def answer(runtime: str, group: dict, folder: Path, busy: bool) -> None:
    """Print the figures of each row, and then the times of those that standard input names, each for some seconds."""
    clock, calls = time.process_time if busy else time.perf_counter, []
    for entry, call in ready(runtime, group, folder):
        print(json.dumps(entry), flush=True)
        calls.append(call)
    for line in sys.stdin:
        number, seconds = line.split()
        entry = Entry(name=runtime, call=calls[int(number)])
        interleave([entry], seconds=float(seconds), rounds=1, clock=clock)
        print(json.dumps(entry.times), flush=True)


class Contestant:
    """A runtime in a process of its own. rows: figures of each, with a note where it fails."""

    def __init__(self, runtime: str, group: dict, folder: Path, options: argparse.Namespace) -> None:
        python = dict(entry.split("=", 1) for entry in options.python).get(runtime, sys.executable)
        command = [python, "-m", "benchmarks.models.runtimes", "--child", runtime, json.dumps(group), str(folder)]
        environment = {"ZENDNNL_MATMUL_WEIGHT_CACHE": "1"} if runtime == "fusion+zentorch" else {}
        with (folder / f"{runtime}.txt").open("w+") as log:
            self.process = subprocess.Popen([*command, *["--busy"] * options.busy], text=True, stderr=log,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            env=os.environ | environment)  # fmt: skip
            self.rows = [row for _ in group["sizes"] if (row := self._read()) is not None]
            if missing := len(group["sizes"]) - len(self.rows):
                code = self.process.wait()
                log.seek(0)
                reason = (log.read().strip().splitlines() or [f"exit {code}"])[-1]
                self.rows += [{"note": f"fails: {reason[:160]}"}] * missing

    def _read(self) -> Any:
        """The next line of JSON; None at the end."""
        assert self.process.stdout is not None
        return next((json.loads(line) for line in self.process.stdout if line.startswith(("{", "["))), None)

    def times(self, number: int, seconds: float) -> list[float]:
        """Seconds of calls of a row; none where it fails."""
        if "note" in self.rows[number]:
            return []
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number} {seconds}\n")
        self.process.stdin.flush()
        return self._read()


def measured(runtimes: Sequence[str], group: dict, folder: Path, options: argparse.Namespace) -> Iterator[dict]:
    """Times of each row in each runtime, in turns, once all runtimes are ready."""
    contestants = {name: Contestant(name, group, folder, options) for name in runtimes}
    for number in range(len(group["sizes"])):
        taken: dict[str, list[float]] = {name: [] for name in runtimes}
        for _ in range(TURNS):
            for name, contestant in contestants.items():
                taken[name] += contestant.times(number, options.seconds / TURNS)
        figures = {name: {"median": statistics.median(times), "least": min(times), "samples": len(times)}
                   for name, times in taken.items() if times}  # fmt: skip
        yield {name: contestant.rows[number] | figures.get(name, {}) for name, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.process.communicate()


def write(path: Path, data: dict) -> None:
    """Write the JSON file, and a table beside it."""
    path.write_text(json.dumps(data, indent=1) + "\n")
    runtimes = [name for name in RUNTIMES if any(name in cell["entries"] for cell in data["cells"])]
    lines = []
    for cell in data["cells"]:
        texts = [_text(cell["entries"].get(name)) for name in runtimes]
        title = MODELS[cell["model"]].title
        if cell.get("layers"):
            title = f"{title.partition(' (')[0]}, {cell['layers']} layers"
        lines.append([title, f"{cell['batch']} x {cell['N']}", cell["dtype"], *texts])
    versions = [e.get("versions", {}).items() for cell in data["cells"] for e in cell["entries"].values()]
    versions = dict.fromkeys(f"{name} {version}" for items in versions for name, version in items)
    notes = sorted({f"- {name}: {e['note']}" for c in data["cells"] for name, e in c["entries"].items() if "note" in e})
    text = (
        f"{results.heading('Whole models beside other runtimes')}Milliseconds, medians{data['clock']}; in brackets the "
        "error, as a share of what the project's rule allows beside eager mode. Each in a process of its own: "
        f"{', '.join(versions)}.\n\n" + results.table(["model", "B x N", "dtype", *runtimes], lines)
    )
    path.with_suffix(".md").write_text("\n\n".join([text, *(["\n".join(notes)] if notes else [])]) + "\n")


def _text(entry: dict | None) -> str:
    if entry is None or "note" in entry:
        return "" if entry is None else "fails"
    return f"{1e3 * entry['median']:.4g} ({entry['share']:.2f})"


def run(options: argparse.Namespace) -> Path:
    """Measure all cells, one runtime after the other, and write the files after each."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
    path = options.append or results.FOLDER / f"{stamp}-models.json"
    clock = ", processor time of one thread" if options.busy else f", {torch.get_num_threads()} threads"
    data = json.loads(path.read_text()) if path.exists() else {"clock": clock, "cells": []}
    known = {tuple(map(cell.get, KEY)): cell for cell in data["cells"]}
    for name in options.models:
        is_image = MODELS[name].inputs(MODELS[name].lengths[0]).is_floating_point()
        lengths = MODELS[name].lengths[:1] if is_image else options.lengths
        for dtype in options.dtypes:
            sizes = [(batch, N) for batch in options.batches for N in lengths if batch * N <= options.tokens]
            keys = [(name, options.layers, dtype, *size) for size in sizes]
            data["cells"] += [dict(zip(KEY, key, strict=True), entries={}) for key in keys if key not in known]
            known |= {tuple(map(cell.get, KEY)): cell for cell in data["cells"]}
            for _ in _rows([known[key] for key in keys], options):
                write(path, data)
    return path


KEY = ("model", "layers", "dtype", "batch", "N")


TURNS = 3


def _rows(cells: list[dict], options: argparse.Namespace) -> Iterator[None]:
    """Measure rows of one model with each runtime, and add to them what comes of it."""
    group = {name: cells[0][name] for name in KEY[:3]}
    group["sizes"] = [[cell["batch"], cell["N"]] for cell in cells]
    with tempfile.TemporaryDirectory() as folder:
        prepare(group, Path(folder))
        for cell, entries in zip(cells, measured(options.runtimes, group, Path(folder), options), strict=True):
            cell["entries"] |= entries
            texts = [f"{name} {entry.get('note') or _text(entry)}" for name, entry in entries.items()]
            print(f"{cell['model']} {cell['dtype']} {cell['batch']} x {cell['N']}: {', '.join(texts)}", flush=True)
            yield


def parse() -> argparse.Namespace:
    parser = results.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(LARGE), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, help="of each model, in place of its own number; a U-Net has its own")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512], help="N; images have their own")
    parser.add_argument("--tokens", type=int, default=1 << 14, help="rows of more are left out")
    parser.add_argument("--runtimes", nargs="*", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--python", nargs="+", default=[], metavar="RUNTIME=PATH", help="interpreters of runtimes")
    parser.add_argument("--seconds", type=float, default=10.0, help="per runtime")
    parser.add_argument("--busy", action="store_true", help="processor time of one thread")
    parser.add_argument("--append", type=Path, help="a file of an earlier run, to add to")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    options = parse()
    if options.busy:
        torch.set_num_threads(1)
    if options.child is None:
        sys.argv = [word for word in sys.argv if word not in ("--python", *options.python)]  # no paths in files
        print(f"written to {run(options)}")
        return
    answer(options.child[0], json.loads(options.child[1]), Path(options.child[2]), options.busy)


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    main()
