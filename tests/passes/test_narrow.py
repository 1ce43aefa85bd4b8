"""Fills of masks that leave the range of float16 or bfloat16 on the way: rows without a live key are eager's."""

import math

import pytest
import torch
from torch.nn import functional as F

import fusion
from fusion.ir import integers
from fusion.ir.expr import ROW_MAX, SCORE, Kind, coord, load, walk
from fusion.ir.ops import apply, where
from fusion.ir.primitives import ROUNDED
from fusion.passes.pullback.roundings import Narrow, first_infinite
from tests.passes.exactness import as_exact_as_eager, padded

LENGTH = 37
NARROW = [torch.float16, torch.bfloat16]
WIDEST = torch.finfo(torch.float32)


def keep(q, pad):
    """Causal, of the keys that are no padding."""
    return pad[:, None, None] & torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


def scores(q, k):
    return q @ k.mT * 0.3


def least(q, k, pad, fill):
    """Scores that a fill replaces by way of a minimum."""
    infinite = torch.full([], math.inf, dtype=q.dtype)
    return torch.minimum(scores(q, k), torch.where(keep(q, pad), infinite, fill))


def doubled(q, k, v, pad, fill):
    s = least(q, k, pad, fill)
    return (s + s).softmax(-1) @ v


def scaled(q, k, v, pad, fill):
    return (least(q, k, pad, fill) * 1.5).softmax(-1) @ v


def scaled_a_little(q, k, v, pad, fill):
    """From the lowest bfloat16 to what float32 has room for."""
    return (least(q, k, pad, fill) * 1.003).softmax(-1) @ v


def less_than_nothing(q, k, v, pad, fill):
    s = least(q, k, pad, fill)
    return (s - (-s)).softmax(-1) @ v


def no_less_than_the_lowest(q, k, v, pad, fill):
    s = scores(q, k).masked_fill(~keep(q, pad), -math.inf)
    return (torch.maximum(s, fill) * 2).softmax(-1) @ v


def half_and_again(q, k, v, pad, fill):
    s = least(q, k, pad, fill) * 0.5
    return (s * 3).softmax(-1) @ v


def cast(q, k, v, wide):
    return (scores(q, k) + wide.to(q.dtype)).softmax(-1) @ v


def cast_and_called(q, k, v, wide):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=wide.to(q.dtype))


def cast_with_the_scores(q, k, v, wide):
    return (scores(q, k).float() + wide).to(q.dtype).softmax(-1) @ v


def cast_and_doubled(q, k, v, wide):
    return (scores(q, k) + wide.clamp(min=-4e4).to(q.dtype) * 2).softmax(-1) @ v


def selected_and_cast(q, k, v, wide):
    rows = torch.arange(q.shape[-2])[:, None] < 30
    return (scores(q, k) + torch.where(rows, wide, 0.0).to(q.dtype)).softmax(-1) @ v


def scaled_with_the_mask(q, k, v, wide):
    """Also in float32."""
    return ((scores(q, k).float() + wide) * 1.5).softmax(-1).to(q.dtype) @ v


def divided_with_the_mask(q, k, v, wide):
    return ((scores(q, k).float() + wide) / 0.7).softmax(-1).to(q.dtype) @ v


def added_by_the_product(q, k, v, wide):
    mask = wide[:, 0].to(q.dtype)
    return torch.baddbmm(mask, q[:, 0], k[:, 0].mT, beta=1.5, alpha=0.3).softmax(-1) @ v[:, 0]


CONSTANTS = [doubled, scaled, scaled_a_little, less_than_nothing, no_less_than_the_lowest, half_and_again]
CASTS = [cast, cast_and_called, cast_with_the_scores, cast_and_doubled, selected_and_cast,
 scaled_with_the_mask, divided_with_the_mask,          added_by_the_product]  # fmt: skip


def given(dtype):
    """Padded Q, K, V, their live keys, and a mask in float32."""
    q, k, v, pad = padded(dtype, LENGTH)
    wide = torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~keep(q, pad), WIDEST.min)
    return q, k, v, pad, wide


@pytest.mark.one_in(4)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("function", CONSTANTS, ids=lambda f: f.__name__)
def test_fills_that_the_compiler_sees(function, dtype, emitter):
    q, k, v, pad, _ = given(dtype)
    lowest = torch.finfo(dtype).min

    def attention(q, k, v, pad):
        return function(q, k, v, pad, torch.full([], lowest, dtype=q.dtype))

    (site,) = as_exact_as_eager(attention, [q, k, v, pad], emitter, gradients=True)
    assert site.reason is None


@pytest.mark.one_in(4)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("function", CASTS, ids=lambda f: f.__name__)
def test_fills_in_a_mask_of_a_wider_dtype(function, dtype, emitter):
    q, k, v, _, wide = given(dtype)
    (site,) = as_exact_as_eager(function, [q, k, v, wide], emitter, gradients=True)
    assert site.reason is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("weight", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_part_of_a_fill_is_as_coarse_as_the_dtype(dtype, weight, emitter):
    """0.4 times float16's lowest is a number beside which scores are lost: eager averages over the keys."""

    def attention(q, k, v, pad):
        s = scores(q, k)
        return torch.lerp(torch.where(keep(q, pad), s, torch.finfo(s.dtype).min), s, weight).softmax(-1) @ v

    (site,) = as_exact_as_eager(attention, padded(dtype, LENGTH), emitter, gradients=True)
    assert site.reason is None


def test_a_mask_cast_by_autocast():
    q, k, v, _, wide = given(torch.float32)

    def attention(q, k, v, wide):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=wide)

    with torch.no_grad(), fusion.collect_reports() as reports:
        out = torch.compile(attention, backend="fusion", options={"inner": "eager"})(q, k, v, wide)
    assert torch.equal(out.isnan(), attention(q, k, v, wide).isnan()) and reports[0].fused == 1


def narrow(dtype, held=torch.float32):
    """Loads are of a tensor that is no parameter."""
    tensor = torch.fx.Graph().placeholder("mask")
    tensor.meta["val"] = torch.empty(4, 4, dtype=held)
    return Narrow(dtype, lambda whole: (-100, 100), lambda part: tensor)


I, J = coord("i"), coord("j")
MASK, PER_HEAD = load(3, (I, J), Kind.FLOAT), load(3, (coord("b0"),), Kind.FLOAT)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_where_numbers_become_infinite(dtype):
    end = first_infinite(dtype)
    below = end * (1 - 2.0**-20)
    assert torch.tensor([end, below]).to(dtype).isinf().tolist() == [True, False]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "ordinary",
    [
        SCORE * 0.125 + PER_HEAD * apply("to_float", integers.sub(J, I)),
        SCORE * SCORE * SCORE + 3.0,
        apply("exp", SCORE) * 10.0,
        apply("tanh", SCORE / 50.0) * 50.0,
        where(apply("ile", J, I), SCORE * 0.125, apply("neg", SCORE)),
        apply("minimum", SCORE, apply("div", PER_HEAD, SCORE)),
        ROW_MAX + 1.0,
    ],
    ids=str,
)
def test_ordinary_programs_are_not_rounded(ordinary, dtype):
    assert narrow(dtype)(ordinary) is ordinary


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_tensor_of_a_wider_dtype_is_rounded_and_one_of_the_same_is_not(dtype):
    assert narrow(dtype)(MASK) is apply(ROUNDED[dtype], MASK)
    assert narrow(dtype, dtype)(MASK) is MASK
    assert narrow(torch.float16, torch.bfloat16)(MASK) is apply("round_float16", MASK)
    assert narrow(dtype)(PER_HEAD) is PER_HEAD


def test_only_the_arm_that_may_overflow_is_rounded():
    causal = apply("ile", J, I)
    found = narrow(torch.float16)(where(causal, SCORE * 2.0, MASK + SCORE))
    assert found is where(causal, SCORE * 2.0, apply("round_float16", MASK + SCORE))


def test_what_was_rounded_is_in_range():
    hold = narrow(torch.float16)
    assert hold(hold(MASK)) is hold(MASK)
    assert hold(hold(MASK) * 0.99).op == "fmul" and hold(hold(MASK) * 1.01).op == "round_float16"


def test_a_bias_made_of_parameters_is_ordinary():
    def attention(q, k, v, table, numbers, wide):
        return (q @ k.mT + table[numbers] + wide.to(q.dtype)).softmax(-1) @ v

    q, k, v, _, wide = given(torch.float16)
    table = torch.nn.Parameter(torch.randn(80, dtype=torch.float16))
    numbers = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + 40
    with torch.no_grad(), fusion.collect_reports() as reports:
        torch.compile(attention, backend="fusion", options={"inner": "eager", "emitter": "reference"})(
            q, k, v, table, numbers, wide
        )
    score = reports[0].sites[0].attentions[0].spec.score
    rounded = [part for part in walk(score) if part.op == "round_float16"]
    assert len(rounded) == 2  # the mask, and the sum with it
