"""Masks are understood whichever way they are written; key ranges are those of a brute-force count."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusion
from fusion.ir import integers
from fusion.ir.expr import SCORE, TRUE, I, J, const, coord, walk
from fusion.ir.ops import apply, evaluate
from fusion.passes.specify.masks import fold_comparisons, understand
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import EMITTERS, as_exact_as_eager, padded

N = 40
LENGTH = 37


def _positions(n=N, m=N):
    return torch.arange(n)[:, None], torch.arange(m)[None, :]


def _additive(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, -math.inf)


CAUSAL = {
    "tril of ones": lambda s: s.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -math.inf),
    "triu above": lambda s: s.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf),
    "triu of -inf added": lambda s: s + torch.full((N, N), -math.inf).triu(1),
    "arange ge": lambda s: torch.where(_positions()[0] >= _positions()[1], s, -math.inf),
    "arange gt masked": lambda s: s.masked_fill(_positions()[1] > _positions()[0], torch.finfo(s.dtype).min),
    "difference": lambda s: s.masked_fill((_positions()[0] - _positions()[1]) < 0, -1e9),
    "clamped difference": lambda s: s + torch.where(_positions()[0] - _positions()[1] >= 0, 0.0, -math.inf),
    "one minus": lambda s: s + (1.0 - torch.ones(N, N).tril()) * torch.finfo(torch.float32).min,
    "one minus integers": lambda s: s + (1 - torch.ones(N, N).tril().long()) * -(10**9),
    "integers less one": lambda s: s + ((_positions()[1] <= _positions()[0]).long() - 1).mul(10**9).to(s.dtype),
    "tril equals zero": lambda s: s.masked_fill(torch.tril(torch.ones(N, N)) == 0, -math.inf),
    "four dimensional": lambda s: s + _additive(torch.ones(N, N).tril().bool())[None, None].expand(2, 1, N, N),
    "logical not": lambda s: s.masked_fill(torch.logical_not(_positions()[1] <= _positions()[0]), -math.inf),
    "offset of one": lambda s: torch.where(_positions()[1] < _positions()[0] + 1, s, torch.tensor(-math.inf)),
    "multiplied": lambda s: s * torch.ones(N, N).tril() + (torch.ones(N, N).tril() - 1) * 1e9,
    "in place": lambda s: s.clone().masked_fill_(torch.ones(N, N).tril() < 1, -math.inf),
}
WINDOW = {
    "difference": lambda s: s.masked_fill((_positions()[0] - _positions()[1]).abs() >= 7, -math.inf),
    "two comparisons": lambda s: torch.where(
        (_positions()[1] > _positions()[0] - 7) & (_positions()[1] < _positions()[0] + 7), s, -math.inf
    ),
    "tril and triu": lambda s: s.masked_fill(~(torch.ones(N, N).tril(6) * torch.ones(N, N).triu(-6)).bool(), -math.inf),
    "nested fills": lambda s: s.masked_fill(_positions()[1] - _positions()[0] > 6, -1e9).masked_fill(
        _positions()[0] - _positions()[1] > 6, -1e9
    ),
    "additive": lambda s: s + _additive((_positions()[0] - _positions()[1]).abs() < 7),
}
OTHERS = {
    "prefix": (
        lambda s: s.masked_fill(~((_positions()[1] <= _positions()[0]) | (_positions()[1] < 9)), -math.inf),
        lambda i, j: j <= i or j < 9,
    ),
    "prefix by a maximum": (
        lambda s: torch.where(_positions()[1] < torch.clamp(_positions()[0] + 1, min=9), s, -math.inf),
        lambda i, j: j < max(i + 1, 9),
    ),
    "window by a minimum": (
        lambda s: torch.where(
            torch.maximum(_positions()[1], _positions()[0] - 5) <= torch.clamp(_positions()[0], max=30), s, -math.inf),
        lambda i, j: max(j, i - 5) <= min(i, 30),
    ),
    "chunked": (
        lambda s: s.masked_fill(_positions()[0] // 8 != _positions()[1] // 8, -math.inf),
        lambda i, j: i // 8 == j // 8,
    ),
    "causal and chunked": (
        lambda s: s.masked_fill(~((_positions()[0] // 8 == _positions()[1] // 8)
                                  & (_positions()[1] <= _positions()[0])), -math.inf),
        lambda i, j: i // 8 == j // 8 and j <= i,
    ),
    "dilated": (
        lambda s: s.masked_fill((_positions()[0] - _positions()[1]) % 3 != 0, -math.inf),
        lambda i, j: (i - j) % 3 == 0,
    ),
}  # fmt: skip


def _site(mask):
    def attend(q, k, v):
        return torch.softmax(mask(q @ k.mT), -1) @ v

    inputs = [torch.randn(2, 3, N, 8) for _ in range(3)]
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(attend, backend="fusion", options={"inner": "eager"})(*inputs)
        eager, exact = attend(*inputs), attend(*(x.double() for x in inputs))
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
    (site,) = reports[0].sites
    assert site.fused, site.reason
    return site


def _value(expr, **at):
    return int(evaluate(expr, lambda leaf: torch.tensor(at[str(leaf.attr)])))


def _check_range(mask, live, keys):
    """The range of every block of rows holds all live keys."""
    for first in range(0, N, 5):
        last = min(first + 4, N - 1)
        low = 0 if mask.key_lo is None else _value(mask.key_lo, i0=first, i1=last)
        high = keys if mask.key_hi is None else _value(mask.key_hi, i0=first, i1=last)
        alive = [j for j in range(keys) for i in range(first, last + 1) if live(i, j)]
        assert all(low <= j < high for j in alive)


def _check_tiles(mask, live, rows=8, columns=8):
    """The tiles that lie in the ranges are those with a live score, counted by brute force."""
    where = torch.tensor([[bool(live(i, j)) for j in range(N)] for i in range(N)])
    met, expected = 0, 0
    for first in range(0, N, rows):
        last = min(first + rows, N) - 1
        low = 0 if mask.key_lo is None else max(0, _value(mask.key_lo, i0=first, i1=last))
        high = N if mask.key_hi is None else min(N, _value(mask.key_hi, i0=first, i1=last))
        for key in range(0, N, columns):
            met += low < min(key + columns, N, high) and high > max(key, low)
            expected += bool(where[first : last + 1, key : key + columns].any())
    assert met == expected


def _check_full(mask, score):
    """In the full range the simpler program is the score program."""
    if mask.full is None:
        return
    for first in range(0, N, 5):
        i, j = torch.meshgrid(torch.arange(first, min(first + 5, N)), torch.arange(N), indexing="ij")
        ends = {"i0": first, "i1": min(first + 4, N - 1)}
        low = 0 if mask.full_lo is None else max(0, _value(mask.full_lo, **ends))
        high = N if mask.full_hi is None else max(0, min(N, _value(mask.full_hi, **ends)))
        raw = torch.arange(i.numel(), dtype=torch.float32).reshape(i.shape)

        def leaf(part, i=i, j=j, raw=raw):
            return raw if part.op == "score" else {"i": i, "j": j}[str(part.attr)]

        whole, simple = (evaluate(e, leaf).expand(i.shape)[:, low:high] for e in (score, mask.full))
        assert torch.equal(whole, simple)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_is_understood(name):
    spec = _site(CAUSAL[name]).spec
    mask = spec.mask
    assert mask.live is apply("ile", J, I)
    assert str(mask.key_hi) == "i1 + 1"
    assert str(mask.full_hi) == "i0 + 1" and mask.full_lo is None
    assert mask.full is not None and not any(part.op == "coord" for part in walk(mask.full))
    _check_full(mask, spec.score)
    _check_tiles(mask, lambda i, j: j <= i)


@pytest.mark.parametrize("name", WINDOW)
def test_window_is_understood(name):
    mask = _site(WINDOW[name]).spec.mask
    assert (_value(mask.key_lo, i0=20, i1=24), _value(mask.key_hi, i0=20, i1=24)) == (14, 31)
    assert (_value(mask.full_lo, i0=20, i1=24), _value(mask.full_hi, i0=20, i1=24)) == (18, 27)
    _check_range(mask, lambda i, j: abs(i - j) < 7, N)
    _check_tiles(mask, lambda i, j: abs(i - j) < 7)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_understood(name):
    program, live = OTHERS[name]
    spec = _site(program).spec
    mask = spec.mask
    _check_range(mask, live, N)
    _check_tiles(mask, live)
    _check_full(mask, spec.score)
    assert (mask.full is None) == (name in ("dilated", "window by a minimum"))
    for i in range(0, N, 3):
        for j in range(N):
            got = evaluate(mask.live, lambda leaf, i=i, j=j: torch.tensor({"i": i, "j": j}[str(leaf.attr)]))
            assert bool(got) == live(i, j)


def test_padding_is_read_and_bounds_nothing():
    padding = torch.ones(2, 1, 1, N, dtype=torch.bool)
    padding[1, ..., 30:] = False

    def attend(q, k, v, padding):
        return torch.softmax((q @ k.mT).masked_fill(~padding, -math.inf), -1) @ v

    inputs = [*(torch.randn(2, 3, N, 8) for _ in range(3)), padding]
    report = fusion.explain(attend, *inputs)
    assert report.sites[0].spec.mask.key_hi is None
    assert str(report.sites[0].spec.describe(report.sites[0].spec.mask.live)) == "mask[b0, 0, 0, j]"


_terms = st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(-25, 25), st.sampled_from(["ile", "ilt", "ieq"]))


@hypothesis.given(st.lists(_terms, min_size=1, max_size=3), st.sampled_from([1, 2, 3, 7]), st.booleans())
@hypothesis.settings(max_examples=60)
def test_random_affine_predicates_bound_their_keys(terms, divisor, divide):
    """a * i + b * j + c (maybe over a divisor) compared with 0: brute force agrees that nothing outside is live."""
    live = TRUE
    for a, b, c, op in terms:
        row = integers.floordiv(I, divisor) if divide else I
        column = integers.floordiv(integers.add(J, 2), divisor) if divide else J
        value = integers.add(integers.mul(a, row), integers.mul(b, column), c)
        live = apply("and", live, apply(op, value, const(0)))
    bounds = {I: integers.integer(N), J: integers.integer(N)}
    simple = fold_comparisons(live, bounds)
    score = apply("where", simple, SCORE, const(-math.inf))
    mask = understand(score)
    i, j = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
    where = evaluate(live, lambda leaf: {"i": i, "j": j}[str(leaf.attr)]).expand(N, N)
    assert torch.equal(evaluate(simple, lambda leaf: {"i": i, "j": j}[str(leaf.attr)]).expand(N, N), where)
    if mask is not None and mask.live.op != "const":
        _check_range(mask, lambda i, j: bool(where[i, j]), N)
        _check_full(mask, score)


_affine = st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(-25, 25))


@hypothesis.given(_affine, _affine, _affine, st.sampled_from(["imax", "imin"]), st.integers(-2, 2), st.booleans())
@hypothesis.settings(max_examples=60)
def test_random_extrema_bound_their_keys(one, other, rest, extremum, factor, strict):
    """rest + factor * max(one, other) compared with 0, each affine in i and j."""
    one, other, rest = (integers.add(integers.mul(a, I), integers.mul(b, J), c) for a, b, c in (one, other, rest))
    value = integers.add(rest, integers.mul(factor, apply(extremum, one, other)))
    live = fold_comparisons(
        apply("ilt" if strict else "ile", value, const(0)), {I: integers.integer(N), J: integers.integer(N)}
    )
    score = apply("where", live, SCORE, const(-math.inf))
    mask = understand(score)
    if mask is not None and mask.live.op != "const":
        i, j = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
        where = evaluate(live, lambda leaf: {"i": i, "j": j}[str(leaf.attr)]).expand(N, N)
        _check_range(mask, lambda i, j: bool(where[i, j]), N)
        _check_full(mask, score)


@hypothesis.given(
    st.integers(-2, 2), st.sampled_from([-2, -1, 1, 2]), st.integers(-40, 40), st.sampled_from(["ile", "ilt"])
)
@hypothesis.settings(max_examples=60)
def test_tiles_of_random_affine_predicates_are_those_of_brute_force(a, b, c, op):
    """a * i + b * j + c <= 0. Where only the row counts nothing can be skipped: rows without a live key need all."""
    value = integers.add(integers.mul(a, I), integers.mul(b, J), c)
    live = fold_comparisons(apply(op, value, const(0)), {I: integers.integer(N), J: integers.integer(N)})
    mask = understand(apply("where", live, SCORE, const(-math.inf)))
    if mask is not None and mask.live.op != "const":
        _check_tiles(mask, lambda i, j: a * i + b * j + c < (op == "ile"))


@hypothesis.given(st.integers(-30, 30), st.integers(0, 40), st.booleans())
@hypothesis.settings(max_examples=30)
def test_tiles_of_random_bands_are_those_of_brute_force(shift, width, divided):
    """shift <= i - j <= shift + width, also of the numbers of chunks of 4."""
    row, column = (integers.floordiv(x, 4) if divided else x for x in (I, J))
    shift, width = (shift // 4, width // 4) if divided else (shift, width)
    low = apply("ile", integers.add(column, shift), row)
    high = apply("ile", row, integers.add(column, shift + width))
    live = fold_comparisons(apply("and", low, high), {I: integers.integer(N), J: integers.integer(N)})
    mask = understand(apply("where", live, SCORE, const(-math.inf)))
    if mask is not None and mask.live.op != "const":
        size = 4 if divided else 1
        _check_tiles(mask, lambda i, j: shift <= i // size - j // size <= shift + width)


def test_coordinates_of_blocks_are_the_only_ones_in_a_range():
    mask = _site(WINDOW["difference"]).spec.mask
    used = {leaf for e in (mask.key_lo, mask.key_hi) for leaf in (coord("i"), coord("j")) if leaf in (e, *e.args)}
    assert not used


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -math.inf])
@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0, 50.0, 1e4])
def test_rows_without_a_live_key_whatever_the_scale(scale, fill):
    """Eager gives them a plain mean over all keys, or NaN; padding on the left of a causal mask makes such rows."""
    padding = torch.ones(2, 1, 1, N, dtype=torch.bool)
    padding[1, ..., :3] = False

    def attend(q, k, v, padding):
        keep = (_positions()[1] <= _positions()[0]) & padding
        return torch.softmax(torch.where(keep, q @ k.mT * scale, fill), -1) @ v

    inputs = [*(torch.randn(2, 3, N, 8) for _ in range(3)), padding]
    with torch.no_grad():
        actual = torch.compile(attend, backend="fusion", options={"inner": "eager", "strict": True})(*inputs)
        eager, exact = attend(*inputs), attend(*(x.double() for x in inputs[:3]), padding)
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)


def test_the_report_says_the_mask_as_understood():
    def window(q, k, v):
        i, j = torch.arange(2048)[:, None], torch.arange(2048)[None, :]
        return torch.softmax((q @ k.mT).masked_fill((j > i) | (i - j >= 512), -math.inf), -1) @ v

    text = str(fusion.explain(window, *(torch.randn(1, 1, 2048, 16) for _ in range(3))))
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("mask ")]
    assert "causal" in line and "i - j < 512" in line, line
    live, computed = (
        int(line.partition(f" % {word}")[0].rpartition(" ")[2]) for word in ("of the scores live", "computed")
    )
    assert live == 22 and live < computed <= 30, line  # (512 * 513 / 2 + 1536 * 512) / 2048^2 = 21.9 %


def _times_zero(s, live, padding):
    return torch.where(padding, s.masked_fill(~live, -math.inf), s.masked_fill(~live, -math.inf) * 0 - 1e9)


def _times_the_mask(s, live, padding):
    return s.masked_fill(~live, -math.inf) * padding - 1e9 * ~padding


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("mask", [_times_zero, _times_the_mask])
def test_scores_masked_with_infinities_that_are_multiplied_are_nan(mask, emitter):
    """-inf * 0 is NaN in eager mode; it is no fill, and no tile that may hold it can be skipped."""

    def attend(q, k, v, padding):
        live = _positions(LENGTH, LENGTH)[1] <= _positions(LENGTH, LENGTH)[0]
        return torch.softmax(mask(q @ k.mT, live, padding[:, None, None]), -1) @ v

    inputs = padded(torch.float32, LENGTH)
    eager = attend(*inputs)
    assert eager.isnan().any() and eager.isfinite().any()
    (site,) = as_exact_as_eager(attend, inputs, emitter)
    assert site.fused


def _far(s):
    i, j = _positions(LENGTH, LENGTH)
    return (j > i) | (j < i - 9)


WITHOUT_SOFTMAX = {
    "sigmoid": lambda s: s.masked_fill(_far(s), -math.inf).sigmoid(),
    "sigmoid of a shifted score": lambda s: 1.5 * (s.masked_fill(_far(s), -math.inf) - 2).sigmoid(),
    "squared rectifier": lambda s: s.masked_fill(_far(s), -math.inf).relu().square(),
    "exponential": lambda s: s.masked_fill(_far(s), -1e30).exp(),
    "zeros behind it": lambda s: s.sigmoid().masked_fill(_far(s), 0.0),
}


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("name", WITHOUT_SOFTMAX)
def test_keys_without_weight_are_skipped_without_a_softmax(name, emitter):
    q, k, v, _ = padded(torch.float32, LENGTH)
    k[1, 0, 20, 0], k[2, 1, 30, 3] = math.nan, math.inf  # which rows before them do not read
    attend = lambda q, k, v: WITHOUT_SOFTMAX[name](q @ k.mT) @ v
    (site,) = as_exact_as_eager(attend, [q, k, v], emitter, gradients=True)
    assert (str(site.spec.mask.key_lo), str(site.spec.mask.key_hi)) == ("i0 - 9", "i1 + 1")


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", [torch.sigmoid, torch.relu, torch.tanh])
def test_scores_that_are_multiplied_by_zero_are_not_skipped(function, emitter):
    """NaN times 0 is NaN, in every row; and a function need not be 0 at -inf."""

    def attend(q, k, v):
        weights = function((q @ k.mT).masked_fill(_far(q), -math.inf)) if function is torch.tanh else function(q @ k.mT)
        return (weights if function is torch.tanh else weights * ~_far(q)) @ v

    q, k, v, _ = padded(torch.float32, LENGTH)
    k[1, 0, 30, 0] = math.nan
    (site,) = as_exact_as_eager(attend, [q, k, v], emitter)
    assert site.spec.mask is None or site.spec.mask.key_hi is None
