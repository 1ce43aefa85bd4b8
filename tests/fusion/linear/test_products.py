"""Products by oneDNN, and the operator that calls them."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.library import opcheck

from fusion.linear import products
from fusion.torch_private import devices
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws, assert_same

pytestmark = pytest.mark.skipif(bool(products.lacks()), reason=products.lacks() or "it is there")

LAYOUTS = {
    "rows": lambda m, k: torch.randn(m, k),
    "columns": lambda m, k: torch.randn(k, m).mT,
    "a part": lambda m, k: torch.randn(m + 3, k + 7)[2 : m + 2, 5 : k + 5],
    "a part of columns": lambda m, k: torch.randn(k + 7, m + 3)[5 : k + 5, 2 : m + 2].mT,
    "every other": lambda m, k: torch.randn(2 * m, 2 * k)[::2, 1::2],
    "one row": lambda m, k: torch.randn(1, k).expand(m, k),
    "one column": lambda m, k: torch.randn(m, 1).expand(m, k),
    "overlapping": lambda m, k: torch.randn(3 * m + k).as_strided((m, k), (3, 1)),
}


def linear(x, w, bias=None):
    return torch.ops.fusion.linear(x, w, bias, "", True)


def eager(x, w, bias=None):
    return torch.nn.functional.linear(x, w, bias)


def check(draw) -> None:
    def drawn():
        given = draw()
        return linear(*given), eager(*given), eager(*(None if t is None else t.double() for t in given))

    with torch.no_grad():
        assert_as_exact_over_draws(drawn, check_strides=True)


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_operands_with_any_strides(left: str, right: str) -> None:
    for m, n, k in ((5, 64, 96), (64, 33, 600)):
        check(lambda m=m, n=n, k=k: (LAYOUTS[left](m, k), LAYOUTS[right](n, k), torch.randn(n)))


BIASES = [lambda n: torch.randn(2 * n)[::2], lambda n: torch.randn(1).expand(n), lambda n: None]


@pytest.mark.parametrize("bias", BIASES, ids=["every other", "one number", "none"])
def test_biases(bias) -> None:
    check(lambda: (torch.randn(8, 40), torch.randn(48, 40), bias(48)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draw", [torch.randn, torch.rand], ids=["of both signs", "positive"])
@pytest.mark.parametrize("depth", [1, 64, 384, 500, 512, 520, 768, 1000, 1024, 2048, 3072, 8200])
def test_deep_sums_are_as_exact_as_eagers(depth: int, draw) -> None:
    """Sums of many terms: MKL adds up parts of them, and so has oneDNN to do."""
    for rows in (1, 4, 8, 16, 70):
        for stored in (lambda k: draw(300, k), lambda k: draw(k, 300).mT):
            check(lambda rows=rows, stored=stored: (draw(rows, depth), stored(depth), None))


CUTS = [(512, 768, 768), (512, 1024, 768), (512, 3072, 768), (9999, 768, 384), (9999, 430, 430), (1, 9999, 9999)]


@pytest.mark.parametrize(("chain", "depth", "width"), CUTS)
def test_sums_are_cut_by_how_they_are_added(chain: int, depth: int, width: int, monkeypatch) -> None:
    """chain: the terms that oneDNN adds one to the other, of which there are several in deep sums."""

    def averaged(depth: int) -> float:
        whole, rest = divmod(depth, chain)
        return (whole * chain**2 + rest**2) / depth

    monkeypatch.setattr(products, "_chain", averaged)
    products.width.cache_clear()
    assert products.width(depth) == width
    products.width.cache_clear()


def test_chains_are_found_in_results() -> None:
    """Short sums are one chain on every processor that is known; in others the terms are added in parts."""
    for depth in (64, 300, 2000):
        assert 0 < products._chain(depth) <= depth


@pytest.mark.parametrize("rows", [rows for rows in range(1, products.FEW) if products.stays(rows)])
def test_few_rows_stay(rows: int, monkeypatch) -> None:
    monkeypatch.setattr(products, "product", None)
    x, w = torch.randn(rows, 300), torch.randn(64, 300)
    assert_same(linear(x, w), eager(x, w))


def test_sizes_that_are_zero() -> None:
    for m, n, k in ((0, 5, 3), (4, 0, 3), (0, 0, 3)):
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        assert_same(linear(x, w, bias), eager(x, w, bias))


@pytest.mark.parametrize("depth", [16, 70, 700])
def test_nan_and_infinities_stay_in_their_rows(depth: int) -> None:
    x, w = torch.randn(9, depth), torch.randn(40, depth)
    x[2, 3], x[4, 5], x[6, -1], w[7, 2], w[8, 1] = torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf
    x[5, 1] = 0  # times infinity
    assert_as_exact_as_eager(linear(x, w), eager(x, w), eager(x.double(), w.double()))


def test_memory_beside_the_operands_is_not_read() -> None:
    wide = torch.full((40, 80), torch.nan)
    x, w = wide[:7, 3:30], wide[10:40, 40:67]
    x.copy_(torch.randn(7, 27))
    w.copy_(torch.randn(30, 27))
    assert_as_exact_as_eager(linear(x, w), eager(x, w), eager(x.double(), w.double()))


def test_a_weight_that_changes_is_read_anew() -> None:
    x, w = torch.randn(64, 96), torch.randn(48, 96)
    before = linear(x, w)
    w.mul_(2)
    assert_same(linear(x, w), 2 * before)


def test_the_operator_is_one_to_torch() -> None:
    for bias in (None, torch.randn(48)):
        for gelu, chosen in itertools.product(("", "none", "tanh"), (False, True)):
            opcheck(torch.ops.fusion.linear.default, (torch.randn(6, 40), torch.randn(48, 40), bias, gelu, chosen))


@contextlib.contextmanager
def allowed(precision: str) -> Iterator[None]:
    before, torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision, precision
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize(("switch", "has_tf32"), [("bf16", False), ("bf16", True), ("tf32", True)])
def test_less_precision_is_torchs_business(switch: str, has_tf32: bool, monkeypatch) -> None:
    """Where torch's switches ask for less than float32, and torch has less here, the product is eager's own."""
    monkeypatch.setattr(products, "product", None)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: has_tf32)
    x, w = torch.randn(64, 256), torch.randn(128, 256)
    with allowed(switch):
        assert_same(linear(x, w), eager(x, w))


def test_few_rows_stay_for_their_precision_alone() -> None:
    with allowed("tf32"):
        assert not any(map(products.stays, range(products.FEW)))


@pytest.mark.parametrize("gelu", ["", "none"])
def test_sums_are_not_cut_where_tf32_would_do(gelu: str, monkeypatch) -> None:
    """Without tf32 in the processor one call in float32 is far more exact than was asked for."""
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    x, w, bias = torch.randn(70, 3072), torch.randn(90, 3072), torch.randn(90)
    with allowed("tf32"), monkeypatch.context() as patch:
        patch.setattr(devices, "onednn_product_and", None)
        result = torch.ops.fusion.linear(x, w, bias, gelu, True)
    assert_same(result, devices.onednn_product(x, w, bias, gelu))
    in_tf32 = [(t.view(torch.int32) & -(1 << 13)).view(torch.float32) for t in (x, w)]  # 10 bits of the mantissa
    exact, plain = eager(x.double(), w.double()), devices.onednn_product(x, w, None)
    assert 16 * (plain - exact).abs().max() < (eager(*in_tf32) - exact).abs().max()


def test_onednn_is_turned_off(monkeypatch) -> None:
    monkeypatch.setattr(products, "product", None)
    x, w = torch.randn(64, 256), torch.randn(128, 256)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not devices.onednn_may_run()
        assert_same(linear(x, w), eager(x, w))
