"""Every error message of the package is read by a test."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusion
from fusion.api import export as exporting
from fusion.codegen import cpu, triton
from fusion.codegen.cpu import calling
from fusion.codegen.cpu.export import attention_module
from fusion.codegen.triton import launch as triton_launch
from fusion.codegen.triton import source as triton_source
from fusion.errors import (
    KernelTextError,
    MlirExportError,
    ProblemError,
    UnsupportedSizeError,
)
from fusion.ir import AttentionSpec
from fusion.ir.ranges import LARGEST_SIZE
from fusion.planning.problem import Problem

ROOT = Path(__file__).resolve().parents[1]

# Messages for defects of ours, which no test can provoke without breaking the code first.
DEFECTS = {"AssertionError", "NotImplementedError", "KeyError", "SystemExit", "TypeError", "AttributeError"}


def messages() -> list[tuple[str, str, list[str]]]:
    """(place, class, constant parts of the message) of every `raise` with a message of its own."""
    found = []
    for top in ("fusion", "passes", "codegen"):
        for file in sorted((ROOT / top).rglob("*.py")):
            if top == "fusion" and file.relative_to(ROOT).parts[1] in ("passes", "codegen"):
                continue  # links to the other two
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                    continue
                name = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
                parts = [
                    n.value
                    for n in ast.walk(node.exc.args[0])
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
                if name and name not in DEFECTS and name != "Unsupported" and parts:
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno}", name, parts))
    return found


def runs(words: list[str]) -> set[str]:
    """Runs of three words, by which a test shows that it knows a message."""
    return {" ".join(words[k : k + 3]) for k in range(max(1, len(words) - 2))} if len(words) > 1 else set()


def plain(text: str) -> str:
    """Letters and digits alone, so that patterns and line breaks compare."""
    return re.sub(r"[^a-z0-9]+", " ", re.sub(r"\\.", " ", text).lower()).strip()


def test_every_message_is_read_by_a_test() -> None:
    tests = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 2000:
                tests.append(plain(node.value))
    unread = []
    for place, name, parts in messages():
        if not any(run in text for part in parts for run in runs(plain(part).split()) for text in tests):
            unread.append(f"{place}: {name}: {' ... '.join(parts)[:100]}")
    assert not unread, "\n".join(unread)


# --- messages that no other test has a reason to read --------------------------------------------------------------


def attend(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.fixture(scope="module")
def spec() -> AttentionSpec:
    torch._dynamo.reset()
    return fusion.explain(attend, *[torch.randn(1, 2, 5, 4)] * 3).sites[0].spec


def test_of_the_planner(spec):
    with pytest.raises(ProblemError, match=r"values for \['B0', 'B1', 'Nq', 'Nk'\] are missing: give sizes="):
        fusion.plan(spec)
    with pytest.raises(ProblemError, match="the share of live tiles lies between 0 and 1"):
        Problem(n_q=4, n_k=4, d=4, d_v=4, density=2.0)
    with pytest.raises(ProblemError, match="'int4' is not one that attention is planned for; known: "):
        Problem(n_q=4, n_k=4, d=4, d_v=4, dtype="int4")


def test_of_specs(spec):
    with pytest.raises(ValueError, match=r"an operand's index uses \['c', 'j'\], only \['i', 'c'\] may occur"):
        replace(spec, q=spec.k)


def test_of_emitters(spec):
    double = replace(spec, operands=tuple(replace(operand, dtype="float64") for operand in spec.operands))
    with pytest.raises(ValueError, match="no CPU kernel for .*: operand q has dtype float64"):
        cpu.compile(double)
    with pytest.raises(ValueError, match="no GPU kernel for .*: operand q has dtype float64"):
        triton.compile(double)
    with pytest.raises(MlirExportError, match="no MLIR for .*: operand q has dtype float64"):
        attention_module(double, [(1, 2, 5, 4)] * 3, [1, 2, 5, 5])
    with pytest.raises(MlirExportError, match=r"the type !torch.vtensor<\[\?,4\],f32>; export with static shapes"):
        exporting._shape(SimpleNamespace(type="!torch.vtensor<[?,4],f32>"))
    with pytest.raises(MlirExportError, match=r"is computed \(torch.aten.size.int\); export with static shapes"):
        exporting._integer(SimpleNamespace(owner=SimpleNamespace(name="torch.aten.size.int")))
    with pytest.raises(KernelTextError, match="generated text is not Python: .*, line 2"):
        triton_source.parse("x = 1\ny = = 2\n")


def test_of_sizes_beyond_the_kernels(spec, monkeypatch):
    large, given = [1, 2, LARGEST_SIZE, 5], [torch.randn(1, 2, 5, 4)] * 3
    with pytest.raises(UnsupportedSizeError, match="was met; CPU kernels take sizes below"):
        cpu.compile(spec)(given, large)
    trained = cpu.compile_training(spec)
    with pytest.raises(UnsupportedSizeError, match="was met; CPU kernels take sizes below"):
        trained.outputs(given, large)
    monkeypatch.setattr(calling, "PARAMETER_SLOTS", 0)
    with pytest.raises(UnsupportedSizeError, match="parameters; there is room for 0"):
        trained.outputs(given, [1, 2, 5, 5])
    with pytest.raises(UnsupportedSizeError, match="was met; GPU kernels take sizes below"):
        triton_launch.check_sizes([1 << 40])
