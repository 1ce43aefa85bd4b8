"""Weights that are packed for their products: as exact as eager, and packed again when they change."""

import functools

import numpy
import pytest
import torch
from torch import nn

import fusion
from fusion.linear import packing, products
from fusion.torch_private import devices
from tests.fusion.linear.graphs import Products, given, inputs, redirected
from tests.fusion.linear.test_random_products import update
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws, assert_same

pytestmark = pytest.mark.skipif(bool(products.lacks()), reason=products.lacks() or "it is there")
STORED = {packing.ROWS: lambda w: w, packing.COLUMNS: lambda w: w.t()}
BFLOAT16 = pytest.mark.skipif(not devices.onednn_has(torch.bfloat16), reason="this processor has no bfloat16 in oneDNN")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def packed(x, weight, stored=packing.ROWS, bias=None, gelu="", chosen=True):
    return torch.ops.fusion.linear(x, weight, bias, gelu, chosen, stored)


def forms(weight: torch.Tensor) -> list[tuple[str, int]]:
    """Libraries and sizes that a weight is packed for."""
    kept = packing.packed.get(weight)
    return [(library, size) for library, _, size in kept.forms] if kept else []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("k", [40, 700, 3072])
def test_by_onednn(k: int, stored: str, threads: int) -> None:
    """Few rows and many, with one thread and several: packed in one way or the other."""
    torch.set_num_threads(threads)
    for rows in (0, 1, 8, 64, 300):

        def drawn(rows=rows):
            x, bias, weight = torch.randn(rows, k), torch.randn(48), nn.Parameter(STORED[stored](torch.randn(48, k)))
            eager, exact = (
                nn.functional.linear(given, STORED[stored](w), b)
                for given, w, b in ((x, weight, bias), (x.double(), weight.double(), bias.double()))
            )
            return packed(x, weight, stored, bias), eager, exact

        assert_as_exact_over_draws(drawn, check_strides=True)
    torch.set_num_threads(2)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("k", [40, 700, 3072])
def test_by_mkl(k: int, stored: str, set_speeds) -> None:
    set_speeds(given(450, 200))
    for rows in (1, 31, 32, 70, 300):

        def drawn(rows=rows):
            x, weight = torch.randn(rows, k), nn.Parameter(STORED[stored](torch.randn(48, k)))
            found = packed(x, weight, stored, chosen=False)
            assert forms(weight) == ([("mkl", rows)] if rows >= products.FEW else [])
            w = STORED[stored](weight)
            return found, x @ w.t(), x.double() @ w.double().t()

        assert_as_exact_over_draws(drawn, check_strides=True)


@BFLOAT16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", STORED)
def test_in_bfloat16(stored: str, dtype: torch.dtype) -> None:
    """Also of a parameter that is cast, as under autocast: the cast is packed, too."""
    for rows in (1, 70, 300):
        x, weight = torch.randn(rows, 700).bfloat16(), nn.Parameter(STORED[stored](torch.randn(48, 700)).to(dtype))
        w = STORED[stored](weight).bfloat16()
        eager, exact = x @ w.t(), x.double() @ w.double().t()
        for _ in range(2):
            assert_as_exact_as_eager(packed(x, weight, stored), eager, exact, check_strides=True)


@pytest.mark.parametrize("chosen", [True, False], ids=["oneDNN", "MKL"])
def test_sizes_that_are_zero(chosen: bool, set_speeds) -> None:
    set_speeds(given(450, 200))
    for m, n, k in ((0, 40, 70), (64, 0, 70), (0, 0, 70), *([] if chosen else [(64, 40, 0)])):
        x, weight = torch.randn(m, k), nn.Parameter(torch.randn(n, k))
        assert_same(packed(x, weight, chosen=chosen), x @ weight.t())


def test_nan_and_infinities() -> None:
    for chosen in (True, False):
        x, weight = torch.randn(40, 70), nn.Parameter(torch.randn(48, 70))
        x[2, 3], x[4, 5], weight[7, 2], weight[8, 1], x[5, 1] = torch.nan, torch.inf, torch.nan, torch.inf, 0
        eager, exact = x @ weight.t(), x.double() @ weight.double().t()
        assert_as_exact_as_eager(packed(x, weight, chosen=chosen), eager, exact)


CHANGES = {
    "in place": lambda weight: weight.mul_(2),
    "a part": lambda weight: weight[3:5].zero_(),
    "through a view": lambda weight: weight.view(-1)[7:9].fill_(1.0),
    "through a detached alias": lambda weight: weight.detach().add_(1),
    "by an optimizer": lambda weight: (setattr(weight, "grad", torch.ones_like(weight)),
                                       torch.optim.SGD([weight], lr=0.1).step()),
    "other memory": lambda weight: setattr(weight, "data", torch.randn_like(weight)),
    "other memory, twice": lambda weight: [setattr(weight, "data", torch.randn_like(weight)) for _ in range(2)],
    "unseen by torch": lambda weight: weight.data.mul_(2),
    "merged": lambda weight: setattr(weight, "data", weight.data.add_(torch.randn(48, 1) @ torch.randn(1, 96))),
    "by NumPy": lambda weight: numpy.copyto(numpy.asarray(weight.detach()), 0.5),
    "set": lambda weight: weight.set_(torch.randn_like(weight)),
}  # fmt: skip


@pytest.mark.parametrize("chosen", [True, False], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, chosen: bool, set_speeds) -> None:
    set_speeds(given(450, 200))
    x, weight = torch.randn(64, 96), nn.Parameter(torch.randn(48, 96))
    before = packed(x, weight, chosen=chosen)
    assert_same(packed(x, weight, chosen=chosen), before)
    CHANGES[change](weight)
    now = packed(x, weight, chosen=chosen)
    assert_same(now, packed(x, nn.Parameter(weight.clone()), chosen=chosen))
    assert not torch.equal(now, before)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (48, 96)], ids=str)
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_bytes_at_the_ends_are_compared(shape: tuple[int, int], place: int) -> None:
    for make in (torch.randn, lambda n, k: torch.randn(2 * n, 3 * k)[::2, 1::3], lambda n, k: torch.randn(k, n).t()):
        x, weight = torch.randn(64, shape[1]), nn.Parameter(make(*shape))
        before = packed(x, weight)
        weight.data[place, place] += 100
        assert not torch.equal(packed(x, weight), before)


def test_changes_that_are_not_seen() -> None:
    """Writes, as the page says, that torch does not count and that leave the first, middle and last bytes."""
    x, weight = torch.randn(64, 96), nn.Parameter(torch.randn(48, 96))
    before = packed(x, weight)
    weight.data[3, 7] += 100
    assert_same(packed(x, weight), before)
    torch.autograd.graph.increment_version(weight)
    assert not torch.equal(packed(x, weight), before)


def test_what_is_packed_goes_with_the_weight() -> None:
    before, weight = len(packing.packed), nn.Parameter(torch.randn(48, 96))
    packed(torch.randn(64, 96), weight)
    assert len(packing.packed) == before + 1
    del weight
    assert len(packing.packed) == before


@pytest.mark.parametrize("chosen", [True, False], ids=["oneDNN", "MKL"])
def test_a_weight_that_is_read_as_it_is_and_transposed(chosen: bool, set_speeds) -> None:
    set_speeds(given(450, 200))
    x, weight = torch.randn(40, 64), nn.Parameter(torch.randn(64, 64))
    for stored, w in ((packing.ROWS, weight), (packing.COLUMNS, weight.t())):
        eager, exact = x @ w.t(), x.double() @ w.double().t()
        assert_as_exact_as_eager(packed(x, weight, stored, chosen=chosen), eager, exact)


def test_numbers_of_rows_that_mkl_packs_for_are_few(set_speeds) -> None:
    set_speeds(given(450, 200))
    weight = nn.Parameter(torch.randn(48, 96))
    for rows in (40, 50, 60, 50):
        packed(torch.randn(rows, 96), weight, chosen=False)
    assert forms(weight) == [("mkl", 40), ("mkl", 50)]


def test_tensors_that_may_vanish_or_change_unseen_are_read_as_they_are() -> None:
    x, before = torch.randn(64, 96), len(packing.packed)
    with torch.inference_mode():
        inferred = nn.Parameter(torch.randn(48, 96))
    for weight in (torch.randn(48, 96), inferred):
        assert_same(packed(x, weight), torch.ops.fusion.linear(x, weight, None, "", True))
    assert len(packing.packed) == before


class Model(nn.Module):
    """A weight in rows, one in columns, and the first once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.columns = nn.Linear(64, 96), nn.Parameter(torch.randn(96, 64) / 10)

    def forward(self, x):
        return self.first(torch.relu(self.first(x)) @ self.columns)


@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model(dynamic: bool, library: str, set_speeds) -> None:
    set_speeds(given(200, 450, overhead=0) if library == "oneDNN" else given(450, 200))
    model, before = Model(), len(packing.packed)
    run = torch.compile(model, backend="fusion", options={"linear": "packed"}, dynamic=dynamic)
    for rows in (40, 300):
        for _ in range(2):
            with fusion.collect_reports() as reports:
                x = torch.randn(rows, 64)
                found, exact = run(x), Model().double()
                exact.load_state_dict(model.state_dict())
                assert_as_exact_as_eager(found, model(x), exact(x.double()))
            for report in reports:
                assert any(f"3 products by {library}" in note and "packed weights" in note for note in report.notes)
            update(model)
    assert len(packing.packed) == before + 2


def test_a_processor_without_bfloat16_in_onednn(monkeypatch) -> None:
    monkeypatch.setattr(devices, "onednn_has", lambda dtype: dtype is torch.float32)
    model, x, before = Model().bfloat16(), torch.randn(40, 64).bfloat16(), len(packing.packed)
    with fusion.collect_reports() as reports:
        assert_same(torch.compile(model, backend="fusion", options={"linear": "packed"})(x), model(x))
    assert len(packing.packed) == before
    assert not any("packed" in note for report in reports for note in report.notes)


def test_training_reads_weights_as_they_are() -> None:
    model, before = Model(), len(packing.packed)
    with torch.enable_grad():
        torch.compile(model, backend="fusion", options={"linear": "packed"})(torch.randn(40, 64)).sum().backward()
    assert len(packing.packed) == before


@BFLOAT16
def test_autocast_packs_what_it_casts() -> None:
    model, x = Model(), torch.randn(40, 64)
    run = torch.compile(model, backend="fusion", options={"linear": "packed"})
    for _ in range(2):
        with torch.autocast("cpu"):
            found, eager = run(x), model(x)
        exact = Model().double()
        exact.load_state_dict(model.state_dict())
        assert_as_exact_as_eager(found, eager, exact(x.double()))
        assert [name for name, _ in forms(model.columns)] == ["onednn torch.bfloat16 128"]
        update(model)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.long if n >= 40 else ()) for n in range(400)])
def test_random_products(seed: int, set_speeds) -> None:
    """Weights that change between calls, by each library."""
    module = Products(seed)
    set_speeds(given(450, 200))
    backend = functools.partial(redirected, always=seed % 2 == 0, packed=True)
    run = torch.compile(module, backend=backend, dynamic=module.draw.choice([None, True]))
    for _ in range(2):
        exact, make = Products(seed).double(), inputs(module.draw, module.width)
        exact.load_state_dict(module.state_dict())

        def drawn(exact=exact, make=make):
            x = make()
            return run(x), module(x), exact(x.double())

        assert_as_exact_over_draws(drawn, check_strides=True)
        update(module)
