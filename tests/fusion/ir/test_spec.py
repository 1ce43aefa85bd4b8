"""Specs refuse what cannot be, print as mathematics, and survive being written and read."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import fusion
from fusion.ir import AttentionSpec, Output, expr, integers
from fusion.ir.expr import FALSE, SCORE, TRUE, WEIGHT, Expr, I, J, Kind, const, coord, load, node
from fusion.ir.ops import apply, as_float, evaluate, where
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.printing import shortened
from fusion.ir.spec import AuxOutput, Reduction
from fusion.passes.pullback.casts import swallows
from tests.numerics import assert_same_in_float64


def _spec() -> AttentionSpec:
    def attend(q, k, v, bias):
        slopes = torch.linspace(0.1, 1, 4)[:, None, None]
        s = 5 * torch.tanh(q @ k.mT / 5) + bias + slopes
        i, j = torch.arange(9)[:, None], torch.arange(9)
        return torch.softmax(s.masked_fill((j > i) | (i - j > 4), -math.inf), -1) @ v

    inputs = [*(torch.randn(2, 4, 9, 8) for _ in range(3)), torch.randn(4, 9, 9)]
    return fusion.explain(attend, *inputs).sites[0].spec


def test_round_trip():
    spec = _spec()
    again = AttentionSpec.from_json(spec.to_json())
    assert again == spec
    assert again.to_json() == spec.to_json() and not set('"\\') & set(spec.to_json())  # nothing to escape
    assert again.score is spec.score  # interned


def test_printed_as_mathematics():
    text = str(_spec())
    assert text.startswith("attention[B0xB1, Nq x Nk, d=8/8, float32]: softmax(")
    assert "tanh(s / 5) * 5" in text and "bias[b1, i, j]" in text and "-inf" in text


def test_an_operand_that_depends_on_the_wrong_coordinate_is_refused():
    from dataclasses import replace

    spec = _spec()
    with pytest.raises(ValueError, match="uses .*'i'"):
        replace(spec, k=(*spec.k[:-1], I))
    with pytest.raises(ValueError, match="sink must not depend on the key"):
        replace(spec, sinks=(as_float(J),))


def test_an_output_names_the_same_dimensions_twice():
    with pytest.raises(ValueError, match="name different coordinates"):
        Output(dims=("b0", "i", "e"), order=("b0", "e", "e"))


def test_a_further_output_has_the_dimensions_that_are_left():
    with pytest.raises(ValueError, match="an auxiliary output over 'j' with dimensions"):
        AuxOutput(value=WEIGHT, dims=("b0", "i", "j"), dtype="float32", reduction=Reduction.SUM, over="j")
    with pytest.raises(ValueError, match="a statistic of weights in bfloat16; float32 is what kernels write"):
        AuxOutput(value=WEIGHT, dims=("b0", "i"), dtype="bfloat16", reduction=Reduction.SUM, over="j")


@pytest.mark.parametrize("name", sorted(set(PRIMITIVES) - {"add", "mul", "floordiv", "mod"}))
def test_constant_folding_is_torchs(name):
    primitive = PRIMITIVES[name]
    samples = {Kind.FLOAT: (0.3, 0.7, 0.2), Kind.INT: (7, 3, 2), Kind.BOOL: (True, False, True)}
    values = [samples[kind][k] for k, kind in enumerate(primitive.args)]
    folded = apply(name, *(const(v, kind) for v, kind in zip(values, primitive.args, strict=True)))
    dtypes = {Kind.FLOAT: torch.float64, Kind.INT: torch.int64, Kind.BOOL: torch.bool}
    tensors = [torch.tensor(v, dtype=dtypes[kind]) for v, kind in zip(values, primitive.args, strict=True)]
    assert folded.is_const
    assert_same_in_float64(folded.attr, primitive.evaluate(*tensors))


@pytest.mark.parametrize("bound", [0.0, 2.5, -3.0, 2.0**24 - 1, 2.0**24, 2.0**40, math.inf, math.nan])
@pytest.mark.parametrize("name", ["flt", "fle"])
def test_comparisons_of_integers_as_floats(name, bound):
    """In float32, as a model computes them: beyond 2**24 an integer is rounded, and the comparison stays one of
    floats."""
    around = [0, 2, 3, -3, -4, 2**24 - 1, 2**24, 2**24 + 1, 2**40 + 1]
    values = torch.tensor(around)
    number = as_float(load(5, (), Kind.INT))
    for args in ((number, const(bound)), (const(bound), number)):
        ours = apply(name, *args)
        assert (ours.op in ("ilt", "ile")) is (abs(bound) < 2**24), ours
        floats = values.float(), torch.tensor(bound)
        expected = {"flt": torch.lt, "fle": torch.le}[name](*(floats if args[0].op == "to_float" else floats[::-1]))
        if ours.op in ("ilt", "ile"):
            assert torch.equal(evaluate(ours, lambda leaf: values), expected)


def test_conditions_say_once_what_is_decided():
    """Built without the normalising constructors, as nested clamps and fills leave them."""
    p, q = (load(n, (), Kind.BOOL) for n in (3, 4))
    twice = node("and", (p, node("or", (apply("not", p), q), Kind.BOOL)), Kind.BOOL)
    assert shortened(twice) is apply("and", p, q)
    nested = node("where", (p, node("where", (p, SCORE, WEIGHT), Kind.FLOAT), const(1.0)), Kind.FLOAT)
    assert shortened(nested) is where(p, SCORE, const(1.0))


def test_shortened_conditions_have_the_same_values():
    generator = random.Random(0)
    leaves = [load(n, (), Kind.BOOL) for n in range(3)]

    def condition(depth: int) -> Expr:
        if not depth:
            return generator.choice(leaves)
        op = generator.choice(["and", "or", "not"])
        return apply(op, *(condition(depth - 1) for _ in range(1 if op == "not" else 2)))

    def selection(depth: int) -> Expr:
        if not depth:
            return const(float(generator.randrange(5)))
        return where(condition(2), selection(depth - 1), selection(depth - 1))

    for _ in range(200):
        expr = selection(3)
        for truths in itertools.product((True, False), repeat=3):
            known = dict(zip(leaves, map(torch.tensor, truths), strict=True))
            assert torch.equal(*(evaluate(part, known.__getitem__) for part in (expr, shortened(expr))))


def test_a_long_part_that_is_repeated_gets_a_name():
    x = SCORE * load(3, (J,), Kind.FLOAT) + load(4, (I,), Kind.FLOAT)
    spec = replace(_spec(), score=apply("fmul", apply("sigmoid", x), x))
    assert "sigmoid(x) * x, x = s * " in spec.formula({n: f"t{n}" for n in range(9)})


def test_every_nan_has_the_same_bits(monkeypatch):
    """Texts of kernels, by which they are cached, must not depend on which NaN a process computes first."""
    monkeypatch.setattr(expr, "_interned", {})
    assert math.copysign(1, const(-math.nan).attr) == math.copysign(1, const(math.nan).attr) == 1


def test_wrong_kinds_are_refused():
    with pytest.raises(TypeError, match="fadd takes"):
        apply("fadd", SCORE, I)


def test_selections_swallow_operations_with_constants():
    causal = apply("ile", J, I)
    inverted = apply("fmul", apply("fsub", const(1.0), as_float(causal)), const(-1e9))
    assert str(inverted) == "0 if j ≤ i else -1e+09"
    assert apply("feq", as_float(causal), const(1.0)) is causal
    assert apply("not", apply("not", causal)) is causal


def test_comparisons_that_are_decided():
    assert apply("ile", const(0), I) is TRUE
    assert apply("ilt", I, const(0)) is FALSE
    assert apply("ieq", I, const(-1)) is FALSE
    assert apply("ile", J, I).op == "ile"


@pytest.mark.parametrize(
    ("fill", "dtype", "expected"),
    [(-math.inf, torch.float32, True), (-1e9, torch.float32, True), (-1e4, torch.float32, False),
     (-1e4, torch.bfloat16, True), (-65504.0, torch.float16, True), (-100.0, torch.float16, False),
     (3e38, torch.float32, False)],
)  # fmt: skip
def test_which_fills_swallow_a_score(fill, dtype, expected):
    assert swallows(fill, dtype) is expected
    if expected:
        kept = torch.tensor(fill, dtype=dtype) + torch.linspace(-15, 15, 31).to(dtype)
        assert (kept == fill).all()


def test_loads_evaluate_at_their_index():
    table = torch.arange(12.0).view(3, 4)
    value = evaluate(load(3, (coord("b0"), J), Kind.FLOAT), lambda leaf: {
        "load": lambda *index: table[index], "coord": torch.tensor(2)}[leaf.op])  # fmt: skip
    assert value.item() == 10.0


def test_a_quotient_within_a_product_keeps_its_brackets():
    half = integers.floordiv(coord("b1"), 2)
    assert str(integers.mul(16, half)) == "16 * (b1 // 2)"
    assert str(integers.floordiv(coord("b1"), 2)) == "b1 // 2"


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (lambda k: k.repeat_interleave(3, 1), 3),
        (lambda k: k[:, :, None].expand(2, 4, 3, 9, 8).reshape(2, 12, 9, 8), 3),
        (lambda k: k[:, :1], 12),
        (lambda k: k.repeat(1, 3, 1, 1), 1),
        (lambda k: torch.cat([k, k, k], 1), 1),
    ],
    ids=["repeat_interleave", "expand", "one head", "repeat", "cat"],
)
def test_heads_that_read_the_same_keys(spelling, expected):
    def attend(q, k, v):
        return torch.softmax(q @ spelling(k).mT, -1) @ spelling(v)

    spec = fusion.explain(attend, torch.randn(2, 12, 9, 8), *(torch.randn(2, 4, 9, 8) for _ in range(2))).sites[0].spec
    assert spec.heads_per_key(12) == expected
    assert spec.heads_per_key(14) == (14 if expected == 12 else 1)
