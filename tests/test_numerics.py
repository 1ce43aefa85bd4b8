"""The numerics rule accepts what is as exact as eager and refuses what is not."""

import pytest
import torch

from tests.numerics import (
    assert_as_exact_as_eager,
    assert_runs_as_exact_as_eager,
    assert_same,
    assert_same_in_float64,
    assert_within,
    leaves,
)


@pytest.fixture
def results():
    """(reference in float64, eager in float32) of a product, with ordinary rounding."""
    torch.manual_seed(0)
    a, b = torch.randn(33, 47, dtype=torch.float64), torch.randn(47, 29, dtype=torch.float64)
    a, b = a.float().double(), b.float().double()
    return a @ b, a.float() @ b.float()


def test_eager_and_the_rounded_reference_pass(results):
    reference, eager = results
    for actual in (eager, reference.float()):
        (found,) = assert_as_exact_as_eager(actual, eager, reference, torch.float32)
        assert 0 < found.share <= 0.5


def test_one_wrong_element_is_refused(results):
    reference, eager = results
    actual = eager.clone()
    actual[3, 5] += 1e-4
    with pytest.raises(AssertionError, match=r"\[3, 5\].*1 of 957"):
        assert_as_exact_as_eager(actual, eager, reference)


def test_a_small_error_everywhere_is_refused(results):
    reference, eager = results
    (found,) = assert_as_exact_as_eager(eager, eager, reference)
    shift = 1.2 * found.rms_bound
    assert shift + found.max_error < found.max_bound, "the largest error alone would see it"
    with pytest.raises(AssertionError, match="root mean square"):
        assert_as_exact_as_eager(eager.double() + shift, eager, reference, check_dtype=False)


def test_half_precision_in_disguise_is_refused(results):
    reference, eager = results
    with pytest.raises(AssertionError, match="exceeds"):
        assert_as_exact_as_eager(eager.bfloat16().float(), eager, reference)
    wide = assert_as_exact_as_eager(eager.bfloat16().float(), eager, reference, torch.bfloat16)
    assert wide[0].share < 1


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_specials_must_stand_where_eager_has_them(results, special):
    reference, eager = results
    eager[2, 2] = special
    assert_as_exact_as_eager(eager.clone(), eager, reference)
    elsewhere = eager.clone()
    elsewhere[2, 2], elsewhere[4, 4] = 0.0, special
    for actual in (elsewhere, results[0].float()):
        with pytest.raises(AssertionError, match=r"first difference at \[2, 2\]"):
            assert_as_exact_as_eager(actual, eager, reference)


def test_shape_dtype_and_strides(results):
    reference, eager = results
    with pytest.raises(AssertionError, match="shape"):
        assert_as_exact_as_eager(eager[:1], eager, reference)
    with pytest.raises(AssertionError, match="float64, eager has"):
        assert_as_exact_as_eager(eager.double(), eager, reference)
    with pytest.raises(AssertionError, match="strides"):
        assert_as_exact_as_eager(eager.t().contiguous().t(), eager, reference, check_strides=True)
    assert_as_exact_as_eager(eager[None].clone(), eager[None], reference[None], check_strides=True)


def test_nested_outputs(results):
    reference, eager = results
    index = torch.arange(4)

    def nest(x):
        return {"a": (x, [x * 2]), "i": index}

    assert [path for path, _ in leaves(nest(eager))] == ["output.a[0]", "output.a[1][0]", "output.i"]
    assert_as_exact_as_eager(nest(eager), nest(eager), nest(reference))
    with pytest.raises(AssertionError, match="integers differ"):
        assert_as_exact_as_eager(nest(eager) | {"i": index + 1}, nest(eager), nest(reference))
    with pytest.raises(AssertionError, match="outputs"):
        assert_as_exact_as_eager((eager,), nest(eager), nest(reference))
    with pytest.raises(AssertionError, match="no tensors"):
        assert_as_exact_as_eager({}, {}, {})


def test_the_same_bits():
    value = torch.tensor([1.0, float("nan"), -0.0])
    assert_same({"x": value}, {"x": value.clone()})
    for other in (value.double(), value[:2], value.nextafter(torch.tensor(2.0)), torch.tensor([1.0, 1.0, 0.0])):
        with pytest.raises(AssertionError):
            assert_same(value, other)


def test_a_function_and_a_module_are_their_own_reference():
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    assert_runs_as_exact_as_eager(lambda x: x @ layer.weight.T + layer.bias, layer, x)
    with pytest.raises(AssertionError, match="root mean square|largest"):
        assert_runs_as_exact_as_eager(lambda x: layer(x) * 1.001, layer, x)
    assert layer.weight.dtype is torch.float32


def test_formulas_in_float64():
    x = torch.randn(50, dtype=torch.float64)
    assert_same_in_float64(x.sum(), x.flip(0).sum())
    for other in (x * (1 + 1e-9), x.clone().fill_(float("nan")), x[:49]):
        with pytest.raises(AssertionError):
            assert_same_in_float64(x, other)


def test_a_bound_holds_for_every_element():
    assert_within(torch.tensor([0.1, 0.2]), torch.tensor([0.1, 0.3]))
    for error, bound in ((torch.tensor([0.1, 0.4]), torch.tensor([0.1, 0.3])), (float("nan"), 1.0)):
        with pytest.raises(AssertionError, match="exceeds the bound"):
            assert_within(error, bound)
