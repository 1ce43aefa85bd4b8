"""The numerics rule accepts what is as exact as eager and refuses what is not."""

import pytest
import torch

from tests.numerics import assert_as_exact_as_eager, leaves


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
