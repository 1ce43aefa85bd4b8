"""Benchmarks on CPUs: their loops hold what they write into, and the shortest run of each measures something."""

import gc
import importlib
import sys
import weakref
from pathlib import Path

import numpy
import pytest
from rich.console import Console

pytest.importorskip("torch_mlir", reason="loops need torch-mlir")
pytest.importorskip("transformers", reason="the models of benchmarks need transformers")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_loop_holds_the_arrays_that_it_writes_into(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peak

    arrays = numpy.zeros((8, 16), numpy.float32), numpy.zeros((1, 16), numpy.float32)
    written = weakref.ref(arrays[1])
    run = peak._compile(peak._read_loop(16), arrays)
    del arrays
    gc.collect()
    assert written() is not None
    run(1, 1)
    del run
    gc.collect()
    assert written() is None


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_every_benchmark_finds_what_it_imports(file, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module(file.stem)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cpu", "--quick --rows full --N 32 --models --dtype fp32 --without flex inductor"),
        ("decode", "--quick --parts decode --keys 64 --heads 2/1 --dtype bf16"),
    ],
)
def test_a_short_run_measures_fusion_and_its_peers(name, arguments, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *arguments.split(), "--seconds", "0.02"])
    data = benchmark.run(benchmark.parse(), Console())
    (cell,) = data.get("rows") or data["cells"]
    assert {"fusion", "sdpa"} <= cell["entries"].keys()
    for entry in cell["entries"].values():
        assert entry["median"] > 0 and not entry["note"], cell
