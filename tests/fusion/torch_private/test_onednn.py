"""oneDNN's product as fusion.torch_private.onednn uses it."""

import pytest
import torch

from fusion.torch_private import onednn
from tests.numerics import assert_as_exact_as_eager

needs_onednn = pytest.mark.skipif(bool(onednn.lacks()), reason=onednn.lacks() or "it is there")


@needs_onednn
@pytest.mark.parametrize("columns", [False, True])
def test_products(columns: bool) -> None:
    x, w, bias, other = torch.randn(9, 40), torch.randn(50, 40), torch.randn(50), torch.randn(9, 50)
    w = w.mT.contiguous().mT if columns else w
    exact = x.double() @ w.double().mT
    assert_as_exact_as_eager(onednn.product(x, w, None), x @ w.mT, exact, check_strides=True)
    assert_as_exact_as_eager(onednn.product(x, w, bias), x @ w.mT + bias, exact + bias)
    assert_as_exact_as_eager(onednn.product_and(x, w, other), x @ w.mT + other, exact + other)


@needs_onednn
def test_weights_are_read_at_every_call() -> None:
    x, w = torch.randn(9, 40), torch.randn(50, 40)
    onednn.product(x, w, None)
    w.zero_()
    assert not onednn.product(x, w, None).any()


def _precision_of_products(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


def _precision_of_all(value: str) -> None:
    torch.backends.fp32_precision = value


@needs_onednn
@pytest.mark.parametrize("put", [_precision_of_products, _precision_of_all])
def test_switches(put) -> None:
    assert onednn.may_run()
    for value in ("bf16", "tf32"):
        put(value)
        try:
            assert not onednn.may_run()
        finally:
            put("none")
    with torch.backends.mkldnn.flags(enabled=False):
        assert not onednn.may_run()
    assert onednn.may_run()


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert onednn.lacks() == "torch is built without oneDNN"
    if not onednn.lacks():
        monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
        assert "no product by oneDNN that is known here" in onednn.lacks()
