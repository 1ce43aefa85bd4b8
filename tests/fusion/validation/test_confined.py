"""A pass that fails at one attention leaves the others as they are."""

import importlib

import pytest
import torch

import fusion


@pytest.mark.parametrize("failing", ["fusion.passes.recognize.find._examine", "fusion.passes.specify.calls.specify",
                                     "fusion.passes.specify.calls.uses_of"])  # fmt: skip
def test_a_failure_of_a_pass_costs_one_attention(failing, monkeypatch):
    """It is called a defect, and the others are fused."""
    module, name = importlib.import_module(failing.rpartition(".")[0]), failing.rpartition(".")[2]
    original, calls = getattr(module, name), []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("of a test")
        return original(*args)

    def function(q, k, v):
        w = (q @ k.mT).softmax(-1)
        return w @ v, w.amax(-1), torch.nn.functional.scaled_dot_product_attention(v, k, q)

    monkeypatch.setattr(module, name, fails_once)
    report = fusion.explain(function, *(torch.randn(2, 2, 9, 8) for _ in range(3)))
    assert sorted(site.fused for site in report.sites) == [False, True]
    assert "ValueError: of a test" in next(site.reason for site in report.sites if not site.fused)
