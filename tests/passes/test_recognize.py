"""Weights of one element as attentions: softmax, its forms written by hand, sums of attentions; and what is none."""

from __future__ import annotations

import pytest

from fusion.ir import Normalizer
from fusion.ir.expr import ONE, ROW_SUM, E, I, J, Kind, const, coord, load, node, walk
from fusion.ir.ops import apply, where
from fusion.passes.nodes import Unsupported
from fusion.passes.recognize.recognize import attentions

DOT = node("dot", (), Kind.FLOAT, 0)
SCORES = apply("fmul", DOT, const(0.5))
OTHER = apply("tanh", DOT)
GATE = load(0, (I,), Kind.FLOAT)
SINK = load(1, (coord("b0"),), Kind.FLOAT)


def softmax(*columns, kind="softmax"):
    return node("softmax", columns, Kind.FLOAT, kind)


def reduced(name, *columns):
    return node("reduce", columns, Kind.FLOAT, name)


def quotient(x, shift=None, add=None):
    """exp(x - shift) / (sum of it + add)"""
    exponential = apply("exp", x if shift is None else apply("fsub", x, shift))
    total = reduced("sum", exponential)
    return apply("div", exponential, total if add is None else apply("fadd", total, add))


SOFTMAXES = {
    "named": softmax(SCORES),
    "by hand": quotient(SCORES),
    "by hand, shifted by the maximum": quotient(SCORES, reduced("max", SCORES)),
    "by hand, shifted by a number of the row": quotient(SCORES, GATE),
    "logsumexp": apply("exp", apply("fsub", SCORES, reduced("logsumexp", SCORES))),
    "log softmax": apply("exp", apply("log", softmax(SCORES))),
    "times the reciprocal": apply(
        "fmul", apply("exp", SCORES), apply("div", ONE, reduced("sum", apply("exp", SCORES)))
    ),
    "shifted inside": softmax(apply("fsub", SCORES, reduced("max", SCORES))),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_softmax_in_every_guise(name):
    (core,) = attentions(SOFTMAXES[name])
    assert core.score is SCORES and core.normalizer is Normalizer.SOFTMAX
    assert core.weight is ONE and core.row_scale is None and not core.sinks


def test_a_softmax_with_one_added_to_its_sum_scales_its_rows():
    (core,) = attentions(quotient(SCORES, add=ONE))
    assert core.score is SCORES and ROW_SUM in walk(core.row_scale)


def test_columns_without_keys_are_sinks():
    (core,) = attentions(softmax(SCORES, SINK))
    assert core.score is SCORES and core.sinks == (SINK,)


def test_a_difference_of_softmaxes_is_two_attentions():
    first, second = attentions(apply("fsub", softmax(SCORES), apply("fmul", GATE, softmax(OTHER))))
    assert (first.score, second.score) == (SCORES, OTHER)
    assert first.weight is ONE and second.weight is apply("neg", GATE)


def test_a_function_of_scores_needs_no_normaliser():
    (core,) = attentions(apply("sigmoid", SCORES))
    assert core.normalizer is Normalizer.NONE and core.score is apply("sigmoid", SCORES)


WEIGHTS = softmax(SCORES)
REFUSED = [
    (softmax(GATE), "do not come from a product of queries and keys"),
    (apply("fmul", WEIGHTS, WEIGHTS), "an operation that is not linear in it"),
    (apply("exp", WEIGHTS), "an operation that is not linear in it"),
    (apply("fadd", WEIGHTS, const(1.0)), "values that do not depend on the softmax are added to the weights"),
    (
        where(apply("ilt", I, J), WEIGHTS, const(0.5)),
        "weights are replaced by values that do not depend on the softmax",
    ),
    (SCORES, "there is no normaliser, and nothing but linear operations"),
    (apply("fmul", apply("tanh", SCORES), reduced("sum", SCORES)), "normalised in a way that is not a softmax"),
    (softmax(apply("fmul", DOT, reduced("max", OTHER))), "contain another reduction over the keys"),
    (softmax(SCORES, OTHER), "a column concatenated to the scores depends on scores"),
    (apply("fmul", WEIGHTS, reduced("sum", OTHER)), "the result is scaled by another reduction over the keys"),
]


@pytest.mark.parametrize(("weight", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_is_no_attention_says_why(weight, reason):
    assert E not in walk(weight)
    with pytest.raises(Unsupported, match=reason):
        attentions(weight)
