"""Programs whose values are used twice at every step: their text doubles with each, and nothing may take time in it."""

import math

import pytest
import torch

import fusion
from fusion.ir import integers
from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import SCORE, coord, walk
from fusion.ir.ops import apply
from fusion.ir.printing import to_text
from tests.numerics import assert_as_exact_as_eager

STEPS = 28


def chain(x):
    for _ in range(STEPS):
        x = torch.tanh(x) * x
    return x


def distance():
    return torch.arange(40)[:, None] - torch.arange(40)


def score(q, k, v):
    return torch.softmax(chain(q @ k.mT), -1) @ v


def sums(q, k, v):
    s = q @ k.mT
    for _ in range(STEPS):
        s = s + torch.tanh(s)
    return torch.softmax(s, -1) @ v


def selections(q, k, v):
    s = q @ k.mT
    for step in range(STEPS):
        s = torch.where(s > 0.1 * step, s * 1.1, s - 0.1)
    return torch.softmax(s, -1) @ v


def sink(q, k, v):
    columns = torch.cat([q @ k.mT, chain(q.sum(-1, keepdim=True))], -1)
    return torch.softmax(columns, -1)[..., :-1] @ v


def shifted_by_a_clamped_maximum(q, k, v):
    s = chain(q @ k.mT)
    e = (s - s.amax(-1, keepdim=True).clamp(min=0)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


def masked_after(q, k, v):
    keep = distance() >= 0
    s = chain(q @ k.mT).masked_fill(~keep, -math.inf)
    return torch.softmax(s, -1).masked_fill(~keep, 0.0) @ v


def selections_masked_after(q, k, v):
    s, keep = q @ k.mT, distance() >= 0
    for step in range(STEPS):
        s = torch.where(s < 0.1 * step, torch.tanh(s) * s, s)
    return torch.softmax(s.masked_fill(~keep, -math.inf), -1).masked_fill(~keep, 0.0) @ v


def bias(q, k, v):
    return torch.softmax(q @ k.mT + chain(distance().float()), -1) @ v


def mask(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(chain(distance().float()) > 0.1, -math.inf), -1) @ v


def mask_of_integers(q, k, v, steps=STEPS):
    x = distance()
    for _ in range(steps):
        x = torch.maximum(x // 2 + x, x - 3)
    return torch.softmax((q @ k.mT).masked_fill(x > 9, -math.inf), -1) @ v


def mask_of_integers_within_64_bits(q, k, v):
    return mask_of_integers(q, k, v, steps=16)


PROGRAMS = [
    score, sums, selections, sink, shifted_by_a_clamped_maximum, masked_after, selections_masked_after, bias, mask,
    mask_of_integers, mask_of_integers_within_64_bits,
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_time_and_text_do_not_double_with_each_step(program, trained):
    inputs = [torch.randn(1, 2, 40, 16, requires_grad=trained) for _ in range(3)]
    with fusion.collect_reports() as reports:
        compiled = torch.compile(program, backend="fusion", options={"inner": "eager", "emitter": "reference"})
        out = compiled(*inputs)
    assert_as_exact_as_eager(out, program(*inputs), program(*(x.double() for x in inputs)), torch.float32)
    (report,) = reports
    assert report.fused == 1, report
    assert len(str(report)) < 5000


def test_kernels_of_long_programs_are_written():
    inputs = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    options = {"inner": "eager", "strict": True}
    out = torch.compile(shifted_by_a_clamped_maximum, backend="fusion", options=options)(*inputs)
    exact = shifted_by_a_clamped_maximum(*(x.double() for x in inputs))
    assert_as_exact_as_eager(out, shifted_by_a_clamped_maximum(*inputs), exact, torch.float32)


def test_derivatives_of_gates_in_gates():
    """h(x) of x h(x) is derived for itself, and may be used elsewhere, too."""
    value = SCORE
    for _ in range(40):
        gate = apply("tanh", value)
        value = SCORE * gate + gate
    assert SCORE in walk(adjoints(value, UPSTREAM, [SCORE])[SCORE])


def test_a_sum_of_many_terms_has_a_text():
    """It is longer than what is cut, and has no inner part."""
    total = integers.integer(0)
    for number in range(400):
        total = integers.add(total, coord(f"x{number}"))
    assert to_text(total).count("x") == 400
