"""A second process compiles nothing again: not the graph, not the kernels; it binds the functions that the graph calls,
and its results are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.machine import object_file
from tests.numerics import assert_as_exact_as_eager

PROCESS = """
import json, sys
import torch
import fusion
from fusion.runtime import specialized
from torch._dynamo.utils import counters

made, make = [], specialized.specialized_attention
specialized.specialized_attention = lambda *given: made.append(given) or make(*given)
load, save, result = sys.argv[1:]
if load:
    with open(load, "rb") as file:
        assert torch.compiler.load_cache_artifacts(file.read()).artifacts["fusion"]
torch.manual_seed(0)
x, keys = torch.randn(2, 2, 40, 16), torch.nn.Linear(16, 16, bias=False)

def attention(x):  # nothing else, for which a C++ compiler would run
    return torch.nn.functional.scaled_dot_product_attention(x, keys(x), x, is_causal=True)

model = torch.compile(attention, backend="fusion", options={"strict": True})
out = model(x)
out.square().sum().backward()
torch.save((out.detach(), keys.weight.grad), result)
if save:
    artifacts = torch.compiler.save_cache_artifacts()
    with open(save, "wb") as file:
        file.write(artifacts[0])
    objects, verdicts = (counters["fusion"][name] for name in ("kernel_cache_miss", "kernels_proved"))
    assert len(artifacts[1].artifacts["fusion"]) == objects + verdicts
found = {name: dict(counters[name]) for name in ("fusion", "inductor", "aot_autograd")}
print(json.dumps(found | {"bound": {"functions": len(made)}}))
"""


def run(cache: Path, load: Path | str, save: Path | str, result: Path) -> dict[str, dict[str, int]]:
    """The counters of a process with a cache folder of its own."""
    command = [sys.executable, "-c", PROCESS, str(load), str(save), str(result)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def eager(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What the process computes, in eager mode."""
    torch.manual_seed(0)
    x, keys = torch.randn(2, 2, 40, 16), torch.nn.Linear(16, 16, bias=False)
    x, keys = x.to(dtype), keys.to(dtype)
    out = torch.nn.functional.scaled_dot_product_attention(x, keys(x), x, is_causal=True)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [keys.weight])


@pytest.mark.skipif(not object_file.loadable(), reason="objects are loaded on x86-64 Linux alone")
def test_everything_that_was_compiled_travels_with_torch_s_artifacts(tmp_path: Path) -> None:
    artifacts, first, second = tmp_path / "artifacts", tmp_path / "first.pt", tmp_path / "second.pt"
    cold = run(tmp_path / "cold", "", artifacts, first)
    warm = run(tmp_path / "warm", artifacts, "", second)
    kernels = cold["fusion"]["kernel_cache_miss"]
    assert kernels >= 2 and warm["fusion"]["kernel_cache_hit"] == kernels
    assert "kernel_cache_miss" not in warm["fusion"] and warm["fusion"]["fused"] == 1
    for name, prefix in (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache")):
        assert warm[name][f"{prefix}_hit"] == cold[name][f"{prefix}_miss"], name
        assert not {f"{prefix}_miss", f"{prefix}_bypass"} & set(warm[name]), name
    assert cold["bound"] == warm["bound"] == {"functions": 2}  # forward and backward
    found = torch.load(first)
    assert all(map(torch.equal, found, torch.load(second)))
    assert_as_exact_as_eager(found, eager(torch.float32), eager(torch.float64))
