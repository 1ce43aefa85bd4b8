"""Masks that are added to scores, in GPU kernels: rows without a live key, and their gradients."""

import pytest
import torch

from tests.passes import test_added_masks as cases
from tests.passes.exactness import as_exact_as_eager, padded

FUNCTIONS = [cases.padding_and_causal, cases.selection_and_padding, cases.large_twice, cases.infinite_where_dead]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_added_masks_are_as_in_eager_mode(function):
    (site,) = as_exact_as_eager(function, padded(torch.float32, cases.LENGTH), gradients=True)
    assert site.fused


def test_in_float16():
    (site,) = as_exact_as_eager(cases.padding_and_causal, padded(torch.float16, cases.LENGTH), gradients=True)
    assert site.fused
