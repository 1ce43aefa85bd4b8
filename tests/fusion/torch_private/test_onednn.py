"""oneDNN's product as fusion.torch_private.devices uses it."""

import pytest
import torch
import torch.nn.functional as F

from fusion.torch_private import devices
from tests.numerics import assert_as_exact_as_eager

needs_onednn = pytest.mark.skipif(bool(devices.onednn_lacks()), reason=devices.onednn_lacks() or "it is there")


@needs_onednn
@pytest.mark.parametrize("columns", [False, True])
def test_products(columns: bool) -> None:
    x, w, bias, other = torch.randn(9, 40), torch.randn(50, 40), torch.randn(50), torch.randn(9, 50)
    w = w.mT.contiguous().mT if columns else w
    exact = x.double() @ w.double().mT
    assert_as_exact_as_eager(devices.onednn_product(x, w, None), x @ w.mT, exact, check_strides=True)
    assert_as_exact_as_eager(devices.onednn_product(x, w, bias), x @ w.mT + bias, exact + bias)
    assert_as_exact_as_eager(devices.onednn_product_and(x, w, other), x @ w.mT + other, exact + other)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_gelu_of_products(gelu: str, dtype: torch.dtype) -> None:
    if not devices.onednn_has(dtype):
        pytest.skip(f"this processor has no {dtype} in oneDNN")
    x, w, bias = (torch.randn(size).to(dtype) for size in ((9, 40), (50, 40), (50,)))
    eager, exact = (F.gelu(F.linear(*operands), approximate=gelu) for operands in
                    ((x, w, bias), (x.double(), w.double(), bias.double())))  # fmt: skip
    assert_as_exact_as_eager(devices.onednn_product(x, w, bias, gelu), eager, exact, check_strides=True)


@needs_onednn
def test_packed_weights() -> None:
    x, w, bias = torch.randn(9, 40), torch.randn(50, 40), torch.randn(50)
    exact = x.double() @ w.double().mT + bias
    packed = devices.onednn_packed(w, 9)
    for rows in (9, 1):  # also of other numbers of rows
        found = devices.onednn_product(x[:rows], packed, bias)
        assert_as_exact_as_eager(found, x[:rows] @ w.mT + bias, exact[:rows], check_strides=True)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
def test_arguments_of_products_that_inductor_gives_to_mkl() -> None:
    product = torch.ops.mkl._mkl_linear
    names = [argument.name for argument in product.default._schema.arguments]
    assert names == ["X", "MKL_W", "ORI_W", "B", "batch_size"]
    graph = torch.fx.Graph()
    for target in (product, product.default):
        assert devices.is_mkl_product(graph.call_function(target, (None, None, None, None, 1)))
    assert not devices.is_mkl_product(graph.call_function(torch.ops.aten.mm.default))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
def test_weights_packed_for_mkl() -> None:
    """Also where a product has another number of rows than the weight was packed for."""
    w, bias = torch.randn(50, 40), torch.randn(1).expand(50)
    packed = devices.mkl_packed(w, 64)
    for x in (torch.randn(64, 40), torch.randn(40, 64).mT, torch.randn(9, 40)):
        for b in (bias, None):
            eager, exact = (F.linear(x.to(t), w.to(t), b if b is None else b.to(t)) for t in (w.dtype, torch.float64))
            assert_as_exact_as_eager(devices.mkl_product(x, packed, w, b), eager, exact, check_strides=True)


@needs_onednn
def test_weights_are_read_at_every_call() -> None:
    x, w = torch.randn(9, 40), torch.randn(50, 40)
    devices.onednn_product(x, w, None)
    w.zero_()
    assert not devices.onednn_product(x, w, None).any()


def _precision_of_products(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


def _precision_of_all(value: str) -> None:
    torch.backends.fp32_precision = value


@pytest.fixture(params=[_precision_of_products, _precision_of_all])
def put(request: pytest.FixtureRequest):
    yield request.param
    request.param("none")


@needs_onednn
def test_switches(put, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.onednn_may_run() and not devices.products_may_round_more()
    put("bf16")
    assert not devices.onednn_may_run() and devices.products_may_round_more()
    put("tf32")
    assert devices.products_may_round_more()
    for has_tf32 in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda has=has_tf32: has)
        assert devices.onednn_may_run() is not has_tf32
    put("none")
    with torch.backends.mkldnn.flags(enabled=False):
        assert not devices.onednn_may_run()
    assert devices.onednn_may_run()


@needs_onednn
@pytest.mark.skipif(torch.cpu._is_amx_fp16_supported(), reason="this processor has tf32")
def test_tf32_is_float32_without_amx(put) -> None:
    """Torch's products and oneDNN's are the same with tf32 allowed, to the last bit."""
    x, w, bias = torch.randn(70, 700), torch.randn(90, 700), torch.randn(90)
    products = lambda: (F.linear(x, w, bias), x @ w.mT, devices.onednn_product(x, w, bias))
    before = products()
    put("tf32")
    for result, expected in zip(products(), before, strict=True):
        assert torch.equal(result, expected)


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert devices.onednn_lacks() == "torch is built without oneDNN"
    if not devices.onednn_lacks():
        monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
        assert "no product by oneDNN that is known here" in devices.onednn_lacks()
