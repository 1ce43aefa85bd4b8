"""What is not fused says which operation of the user's stood in the way, and what to do."""

import ast
import re
from pathlib import Path

import pytest
import torch

import fusion
from fusion.report.advice import advice

ROOT = Path(__file__).resolve().parents[2]


def tanh_of_weights(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = torch.tanh(w)  # here
    return w @ v


def other_axis(q, k, v):
    s = q @ k.mT
    w = torch.softmax(s, 1)  # here
    return w @ v


def running_sum(q, k, v):
    s = q @ k.mT
    s = s.cumsum(-1)  # here
    return torch.softmax(s, -1) @ v


def talking_heads(q, k, v):
    s = q @ k.mT
    s = torch.einsum("bhij,gh->bgij", s, torch.ones(3, 3))  # here
    return torch.softmax(s, -1) @ v


def also_averaged(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    out = w @ v
    return out, w.mean(1)  # here


def returned(q, k, v):
    w = torch.softmax(q @ k.mT, -1)  # here
    return w @ v, w


def constant_added(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = w + 0.5  # here
    return w @ v


def constant_put_in(q, k, v):
    w = torch.softmax(q @ k.mT, -1)
    w = w.masked_fill(torch.arange(17) > 3, 0.5)  # here
    return w @ v


def softmax_twice(q, k, v):
    s = torch.softmax(q @ k.mT, -1)  # here
    return torch.softmax(s, -1) @ v


def written_to(q, k, v):
    s = q @ k.mT
    k.add_(1)  # here
    return torch.softmax(s, -1) @ v + k.sum()


CASES = {
    tanh_of_weights: ("not linear in it", "aten.tanh"),
    other_axis: ("do not come from a product", "aten.softmax"),
    running_sum: ("do not come from a product", "aten.cumsum"),
    talking_heads: ("do not come from a product", "aten.einsum"),
    also_averaged: ("needed elsewhere .by aten.mean", "aten.mean"),
    returned: ("they are returned", "aten.softmax"),
    constant_added: ("added to the weights", "aten.add"),
    constant_put_in: ("takes the place of weights", "aten.masked_fill"),
    softmax_twice: ("another reduction", "aten.softmax"),
    written_to: ("changed in place", "aten.add_"),
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_operation_and_its_line_are_named(function):
    reason, operation = CASES[function]
    report = fusion.explain(function, *(torch.randn(2, 3, 17, 16) for _ in range(3)))
    (site,) = report.sites
    assert not site.fused
    assert re.search(reason, site.reason), site.reason
    assert site.stopped_by.startswith(operation)
    lines = Path(__file__).read_text().splitlines()
    number = int(site.stopped_at.split(":")[1].split()[0])
    assert lines[number - 1].endswith("# here"), site.stopped_at
    assert site.advice and site.advice in " ".join(str(report).split())
    assert f"stopped  by {site.stopped_by} at {site.stopped_at}" in str(report)


def test_a_fused_site_has_no_advice():
    (site,) = fusion.explain(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *[torch.randn(1, 1, 5, 4)] * 3).sites
    assert site.fused and site.advice is None and site.stopped_by is None


def reasons() -> set[str]:
    """The text of every refusal in the package, with X for what is filled in."""
    found = set()
    for file in (ROOT / "passes").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) == "Unsupported":
                found.add(_text(call.args[0]))
    for file in (ROOT / "codegen" / "mlir" / "strategy.py", ROOT / "codegen" / "triton" / "__init__.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in ("supports", "unavailable"):
                returns = [r.value for r in ast.walk(function) if isinstance(r, ast.Return)]
                found |= {_text(r) for r in returns if isinstance(r, (ast.Constant, ast.JoinedStr))}
    return found - {"", "None", "X"}


def _text(node) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "X" for v in node.values)
    return ""


def test_there_is_advice_for_every_reason():
    found = reasons()
    assert len(found) > 35
    assert not sorted(text for text in found if advice(text) is None)
