"""Benchmarks on CPUs: their loops hold what they write into, and the shortest run of each measures something."""

import argparse
import gc
import importlib
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("torch_mlir", reason="loops need torch-mlir")
pytest.importorskip("transformers", reason="the models of benchmarks need transformers")

ROOT = Path(__file__).parents[1]
MODULES = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in ROOT.glob("benchmarks/**/*.py"))


def test_a_loop_holds_the_arrays_that_it_writes_into():
    peak = importlib.import_module("benchmarks.common.peak")
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


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_finds_what_it_imports(name):
    importlib.import_module(name)


def test_a_short_run_measures_fusion_and_its_peers(monkeypatch):
    attention = importlib.import_module("benchmarks.cpu.attention")
    arguments = "--quick --rows full --N 32 --dtype fp32 --without flex inductor --seconds 0.02"
    monkeypatch.setattr(sys, "argv", ["attention", *arguments.split()])
    (cell,) = attention.run(attention.parse())["rows"]
    assert {"fusion", "sdpa"} <= cell["entries"].keys()
    for entry in cell["entries"].values():
        assert entry["median"] > 0 and not entry["note"], cell


def test_a_comparison_writes_a_table(monkeypatch, tmp_path):
    decode = importlib.import_module("benchmarks.cpu.decode")
    arguments = f"decode --lengths 64 --cases 2/1 --dtype bfloat16 --seconds 0.02 --output {tmp_path / 'table.md'}"
    monkeypatch.setattr(sys, "argv", ["decode", *arguments.split()])
    assert decode.main(decode.__doc__, decode.STUDIES) == 0
    *_, head, rule, line = (tmp_path / "table.md").read_text().splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == head.count("|") - 1 and cells[0] == "2/1 heads, 64 keys"
    assert all(float(cell) > 0 for cell in cells[1:])


def test_a_wrong_result_is_not_timed(capsys):
    compare = importlib.import_module("benchmarks.common.compare")
    functions = {"fusion": lambda x: x + 1, "peer": torch.nn.Identity()}
    case = compare.Case(name="wrong", tensors=[torch.ones(3)], functions=functions, plain=torch.nn.Identity())
    text, wrong = compare.table(lambda options: iter([case]), argparse.Namespace())
    assert wrong and "wrong: error 1, allowed" in text


def test_runtimes_are_measured_with_the_same_weights(tmp_path):
    models = importlib.import_module("benchmarks.models.runtimes")
    group = {"model": "small-bert", "dtype": "float32", "layers": 2, "sizes": [[2, 16], [1, 8]]}
    with torch.no_grad():
        models.prepare(group, tmp_path)
    options = argparse.Namespace(python=["onnxruntime=false"], seconds=0.02, busy=False)
    cells, taken = [], models.measured(("eager", "fusion", "onnxruntime"), group, tmp_path, options)
    for (batch, n), entries in zip(group["sizes"], taken, strict=True):
        cells.append(group | {"batch": batch, "N": n, "entries": entries})
        for entry in (entries["eager"], entries["fusion"]):
            assert entry["median"] > 0 and entry["share"] <= 1
    models.write(tmp_path / "table.json", {"clock": "", "cells": cells})
    text = (tmp_path / "table.md").read_text()
    assert "BERT, 2 layers | 2 x 16 | float32 |" in text and "- onnxruntime: fails: exit 1" in text
