"""Programs that were refused as defects of the compiler although what it makes of them is what eager computes."""

import pytest
import torch

import fusion
from fusion.caching import BoundedCache
from fusion.validation import sites

LOWEST = torch.finfo(torch.float32).min


def _drawn(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _operands(*further, keys=17, dtype=torch.float32):
    return _drawn((2, 3, 17, 12), (2, 3, keys, 12), (2, 3, keys, 6), *further, dtype=dtype)


def _of_log_sums(s):
    return torch.exp(s - s.logsumexp(-1, keepdim=True))


def _of_sums(s):
    e = torch.exp(s)
    return e / e.sum(-1, keepdim=True)


def less_a_bias(q, k, v, bias):
    """A fill that is subtracted is a score of +inf, after which eager's weight is NaN at that key alone."""
    return _of_log_sums(q @ k.mT - bias) @ v


def with_weights(q, k, v, bias):
    p = _of_log_sums(q @ k.mT + bias)
    return p @ v, p


def beyond_exponentials(q, k, v):
    """Exponentials without a maximum, which overflow in eager mode alone."""
    return _of_sums((q * 100 @ k.mT).abs()) @ v


def tempered(q, k, v, keep, temperature):
    """The gradient of the temperature sums -1e9 times what cancels in a row without a live key."""
    return ((q @ k.mT + (keep <= 0) * -1e9) * temperature.exp()).softmax(-1) @ v


def far_waves(q, k, v):
    return ((q * 1e5 @ k.mT) * 1e6).sin().softmax(-1) @ v


def changed_later(q, k, v):
    o = ((q @ k.mT).softmax(-1) @ v).float()
    o.mT.add_(0.3)
    return o


def beyond_half(q, k, v, top, total):
    """Weights that reach the largest number of float16, and a product that is beyond it."""
    return ((q @ k.mT - top).exp() / total).nan_to_num(0.0) @ v


def beside_a_product(q, k, v, x, c):
    """A product that something else reads is no mask either."""
    q = q.clone()
    before = q @ k.mT
    q[..., ::2].mul_(-2)
    s = q @ x.mT + before
    return ((s - s.amax(-1, keepdim=True)) * c).softmax(-1) @ v


def shifted_by_one_number(q, k, v, keep, x):
    """What is the same for all keys and queries is no mask."""
    keep = keep > 0
    s = torch.where(keep, q @ k.mT, -1e9) + x.sum()
    return torch.where(keep, s.softmax(-1), 0.0) @ v


BIAS, ROW = (17, 17), (17, 1)
CASES = {
    "less a bias": (less_a_bias, _operands(BIAS), True),
    "with weights": (with_weights, _operands(BIAS), False),
    "beyond exponentials": (beyond_exponentials, _operands(keys=1), False),
    "tempered": (tempered, _operands((17, 17), (3, 1, 1)), True),
    "far waves": (far_waves, _operands(), False),
    "changed later": (changed_later, _operands(), False),
    "beyond half": (beyond_half, _operands(ROW, ROW, dtype=torch.float16), False),
    "beside a product": (beside_a_product, _operands((17, 12), ()), True),
    "shifted by one number": (shifted_by_one_number, _operands((2, 1, 1, 17), (4,)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_fused(monkeypatch, name):
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())
    program, given, trained = CASES[name]
    given = [x.clone().requires_grad_(trained and x.is_floating_point()) for x in given]
    with fusion.collect_reports() as reports, torch.set_grad_enabled(trained):
        options = {"inner": "eager", "emitter": "reference", "verify": True}
        torch.compile(program, backend="fusion", options=options)(*given)
    ((site,),) = [report.sites for report in reports]
    assert site.reason is None
    assert site.validated.startswith("values in 72 rows")
