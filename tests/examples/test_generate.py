"""examples/generate.py: tokens of a decoder with caches that grow, are static or are paged are eager's."""

from __future__ import annotations

import functools
import importlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from fusion import collect_reports
from fusion.backend import fusion

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged"])
def test_tokens_are_those_of_eager(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    generate = importlib.import_module("generate")
    small = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(generate, "CONFIG", generate.CONFIG | small)
    compiler = functools.partial(fusion, options={"inner": "eager", "strict": True})
    monkeypatch.setattr(generate, "BACKENDS", {"eager": None, "fusion": compiler})
    before = counters["fusion"]["fused"]
    arguments = Namespace(dtype="float32", tokens=6, rounds=1)
    with collect_reports() as reports:
        table, same = generate.measure(cache, 20, arguments)
    assert same and table.row_count == 2
    assert counters["fusion"]["fused"] - before >= 4, "two layers: those that fill the cache, and those that decode"
    assert cache == "dynamic" or len(reports) == 2, "one graph that fills the cache, and one that decodes"
    calls = [node for report in reports for node in report.graph_after.graph.nodes if node.op == "call_function"]
    gathers = [node for node in calls if node.target is torch.ops.aten.index.Tensor]
    assert not any(node.meta["val"].is_floating_point() for node in gathers), "a gathered copy of keys or values"
