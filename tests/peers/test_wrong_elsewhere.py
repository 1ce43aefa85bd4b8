"""Programs for which Inductor's attention matcher is wrong, or crashes, on torch 2.13: right with us.

Each runs with the rest of the graph in plain torch and in Inductor, whose own matcher must not get hold of what we
leave alone. References are float64; rows without a live key are part of the inputs on purpose. Where eager's own result
is a plain average over the keys (`finfo.min`), so is ours.
"""

import math
from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fusion  # noqa: F401  registers the backend where it is not installed
from tests.numerics import assert_as_exact_as_eager

B, H, N, D = 2, 4, 40, 16
Program = Callable[..., torch.Tensor]


def _qkv(n: int = N, d: int = D) -> tuple[torch.Tensor, ...]:
    """Scores of standard deviation 2.25: far from uniform."""
    return tuple(1.5 * torch.randn(B, H, n, d) for _ in range(3))


def _check(program: Program, inner: str, *inputs: torch.Tensor, fused: bool | None) -> None:
    """Assert the numerics rule; `fused` says whether the site must be (None: either)."""
    eager = program(*inputs)
    exact = program(*(t.double() if t.is_floating_point() else t for t in inputs))
    counters.clear()
    with torch.no_grad():
        actual = torch.compile(program, backend="fusion", options={"inner": inner})(*inputs)
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
    if fused is not None:
        assert bool(counters["fusion"]["fused"]) == fused, dict(counters["fusion"])


both = pytest.mark.parametrize("inner", ["eager", "inductor"])


def ways(names: str, cases: Iterable[tuple], under_inductor: Callable[..., bool]) -> pytest.MarkDecorator:
    """Parameters in each of both; under Inductor those in the long set that repeat what others show."""
    return pytest.mark.parametrize(
        (*names.split(), "inner"),
        [
            pytest.param(
                *case, inner, marks=[pytest.mark.long] if inner == "inductor" and not under_inductor(*case) else []
            )
            for case in cases
            for inner in ("eager", "inductor")
        ],
    )


# --- softmax over another dimension than the keys (error up to 0.93) --------------------------------------------------


@ways("dim scaled", product([-2, 2, 1, 0], ["div", "mul", "none"]), lambda dim, scaled: dim == -2 or scaled == "div")
def test_softmax_over_another_dimension(dim: int, scaled: str, inner: str):
    scale = {"div": lambda s: s / math.sqrt(D), "mul": lambda s: s * D**-0.5, "none": lambda s: s * 1.0}[scaled]

    def program(q, k, v):
        return torch.softmax(scale(q @ k.transpose(-2, -1)), dim=dim) @ v

    _check(program, inner, *_qkv(), fused=None)


@both
def test_softmax_over_the_queries_of_a_product_written_the_other_way(inner: str):
    """k @ q^T with softmax over dim -2 is ordinary attention, transposed: fused or not, it must be that."""

    def program(q, k, v):
        weights = torch.softmax(k @ q.transpose(-2, -1) / math.sqrt(D), dim=-2)
        return weights.transpose(-2, -1) @ v

    _check(program, inner, *_qkv(), fused=None)


# --- masked_fill and where with finite values (0.22, with a dead row 0.55) --------------------------------------------


def _padding(dead_row: bool) -> torch.Tensor:
    mask = torch.rand(B, 1, N, N) < 0.6
    mask[..., 0] = True
    if dead_row:
        mask[:, :, 5] = False
    return mask


@ways("value dead_row", product([-1e9, -1e4, -20.0, -1.0, 0.0, 3.0], [False, True]), lambda value, dead_row: dead_row)
def test_masked_fill_with_a_finite_value(value: float, dead_row: bool, inner: str):
    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
        return torch.softmax(scores.masked_fill(mask == 0, value), dim=-1) @ v

    _check(program, inner, *_qkv(), _padding(dead_row), fused=True)


@both
@pytest.mark.parametrize("value", [-1e4, -1.0])
def test_masked_fill_before_scaling(value: float, inner: str):
    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask == 0, value)
        return torch.softmax(scores / math.sqrt(D), dim=-1) @ v

    _check(program, inner, *_qkv(), _padding(True), fused=True)


@both
@pytest.mark.parametrize("value", [-1e9, -20.0])
def test_where_with_a_finite_value(value: float, inner: str):
    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
        return torch.softmax(torch.where(mask, scores, value), dim=-1) @ v

    _check(program, inner, *_qkv(), _padding(True), fused=True)


@both
def test_masked_fill_with_minus_infinity_and_a_dead_row(inner: str):
    """Eager gives NaN in that row and nowhere else."""

    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
        return torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v

    _check(program, inner, *_qkv(), _padding(True), fused=True)


@both
def test_scaled_dot_product_attention_with_a_dead_row(inner: str):
    """The fused call's own rule is another: zero, not NaN."""

    def program(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v, mask = *_qkv(), _padding(True)
    expected = program(q, k, v, mask)
    assert (expected[:, :, 5] == 0).all()
    _check(program, inner, q, k, v, mask, fused=None)


# --- masks with values other than 0 and 1 (`mask == 0` read as `mask == 1`) -------------------------------------------


@ways(
    "dtype test",
    product([torch.float32, torch.int64, torch.uint8], ["== 0", "!= 1", "> 1", "== 2"]),
    lambda dtype, test: dtype is torch.float32 or test == "== 0",
)
def test_masks_with_values_other_than_zero_and_one(dtype: torch.dtype, test: str, inner: str):
    hidden = {
        "== 0": lambda m: m == 0,
        "!= 1": lambda m: m != 1,
        "> 1": lambda m: m > 1,
        "== 2": lambda m: m == 2,
    }[test]

    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
        return torch.softmax(scores.masked_fill(hidden(mask), float("-inf")), dim=-1) @ v

    mask = torch.randint(0, 4, (B, 1, N, N)).to(dtype)
    mask[..., 0] = 1
    _check(program, inner, *_qkv(), mask, fused=True)


# --- rows without a live key, filled with finfo.min (0.06 to 0.46) ----------------------------------------------------


def _left_padded_causal(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The additive mask of today's decoders for a batch padded on the left: whole rows of finfo.min."""
    padding = torch.ones(B, N, dtype=torch.bool)
    padding[1, :11] = False
    live = torch.ones(N, N, dtype=torch.bool).tril()[None, None] & padding[:, None, None, :]
    return torch.where(live, 0.0, torch.finfo(dtype).min).to(dtype)


@both
@pytest.mark.parametrize("scaled", ["div", "mul"])
def test_dead_rows_of_an_additive_mask(scaled: str, inner: str):
    """Eager averages all keys in such a row."""

    def program(q, k, v, mask):
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(D) if scaled == "div" else scores * D**-0.5
        return torch.softmax(scores + mask, dim=-1) @ v

    q, k, v = _qkv()
    mask = _left_padded_causal()
    averaged = program(q, k, v, mask)[1, :, 3]
    assert_as_exact_as_eager(averaged, v[1].mean(-2), v[1].double().mean(-2))
    _check(program, inner, q, k, v, mask, fused=True)


@both
def test_dead_rows_filled_in(inner: str):
    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) * D**-0.5
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1) @ v

    _check(program, inner, *_qkv(), _padding(True), fused=True)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dead_rows_in_half_precision(dtype: torch.dtype, inner: str):
    def program(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) * D**-0.5 + mask
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v

    q, k, v = (t.to(dtype) for t in _qkv())
    mask = _left_padded_causal(dtype)
    eager = program(q, k, v, mask)
    exact = torch.softmax(q.double() @ k.double().mT * D**-0.5 + mask.double(), -1) @ v.double()
    actual = torch.compile(program, backend="fusion", options={"inner": inner})(q, k, v, mask)
    assert_as_exact_as_eager(actual, eager, exact, dtype)


@both
def test_two_minima_add_up_to_minus_infinity(inner: str):
    """Two additive masks that both hide a key overflow; a row in which all keys overflow is NaN in eager."""

    def program(q, k, v, first, second):
        return torch.softmax((q @ k.transpose(-2, -1)) / math.sqrt(D) + first + second, dim=-1) @ v

    smallest = torch.finfo(torch.float32).min
    first = torch.where(torch.rand(B, 1, 1, N) < 0.3, smallest, 0.0)
    second = torch.where(torch.ones(N, N, dtype=torch.bool).tril(), 0.0, smallest)
    first[..., 0] = 0.0
    first[1, ..., :3] = smallest
    q, k, v = _qkv()
    eager = program(q, k, v, first, second)
    actual = torch.compile(program, backend="fusion", options={"inner": inner})(q, k, v, first, second)
    exact = program(q.double(), k.double(), v.double(), (first + second).double(), torch.zeros(()))
    assert_as_exact_as_eager(actual, eager, exact)


@both
@pytest.mark.parametrize("spelling", ["masked_fill", "additive", "sdpa"])
def test_dead_rows_backward(spelling: str, inner: str):
    """Gradients with `finfo.min` in whole rows, where peers are off by a factor of 6 to 7.

    `scaled_dot_product_attention` itself is wrong there on a CPU, so the reference is written out in float64.
    """
    mask = _left_padded_causal()

    def written_out(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
        if spelling == "masked_fill":
            scores = scores.masked_fill(mask != 0, torch.finfo(torch.float32).min)
        else:
            scores = scores + mask
        return torch.softmax(scores, dim=-1) @ v

    def program(q, k, v, mask):
        if spelling == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return written_out(q, k, v, mask)

    inputs = _qkv()
    seed = torch.randn(B, H, N, D)

    def gradients(function: Program, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.to(dtype).clone().requires_grad_() for t in inputs]
        function(*leaves, mask.to(dtype)).backward(seed.to(dtype))
        return tuple(t.grad for t in leaves if t.grad is not None)

    actual = gradients(torch.compile(program, backend="fusion", options={"inner": inner}), torch.float32)
    eager = gradients(written_out, torch.float32)
    assert_as_exact_as_eager(actual, eager, gradients(written_out, torch.float64))


# --- permutations of K that are not what the product needs (0.5, or a crash) ------------------------------------------


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ((B, N, H, D), (0, 2, 3, 1)),  # right: [B, H, d, N]
        ((B, H, N, D), (0, 1, 3, 2)),  # right, written as a permutation
        ((B, H, D, N), (0, 1, 2, 3)),  # right already
        ((B, D, N, N), (0, 3, 1, 2)),  # the sizes agree, the dimensions do not mean what they seem to
    ],
    ids=str,
)
@pytest.mark.parametrize("scaled", ["div", "mul"])
def test_permuted_keys(layout: tuple[int, ...], order: tuple[int, ...], scaled: str, inner: str):
    heads = layout[order[1]]

    def program(q, k, v):
        scores = q @ k.permute(order)
        scores = scores / math.sqrt(D) if scaled == "div" else scores * D**-0.5
        return torch.softmax(scores, dim=-1) @ v

    q, k, v = 1.5 * torch.randn(B, heads, N, D), 1.5 * torch.randn(layout), torch.randn(B, heads, N, D)
    _check(program, inner, q, k, v, fused=True)


@both
@pytest.mark.parametrize("square", [True, False], ids=["N=d", "N!=d"])
def test_keys_permuted_from_batch_heads_length_width(square: bool, inner: str):
    """`k.permute(0, 2, 3, 1)` of [B, N, H, d] and of a tensor whose sizes hide the difference (H = N = d)."""
    n = H if square else 12

    def program(q, k, v):
        return torch.softmax(q @ k.permute(0, 2, 3, 1) / 2.0, dim=-1) @ v

    q, v = torch.randn(B, H, n, H), torch.randn(B, H, n, H)
    k = torch.randn(B, n, H, H)
    _check(program, inner, q, k, v, fused=True)


@both
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 3, 2, 1), (0, 1, 3, 2)], ids=str)
def test_permuted_queries_keys_and_values_of_equal_sizes(order: tuple[int, ...], inner: str):
    """With all inner sizes equal every permutation runs; only the right numbers tell them apart."""
    n = 8

    def program(q, k, v):
        q, k, v = (t.permute(order) for t in (q, k, v))
        weights = torch.softmax(q @ k.permute(0, 1, 3, 2) / math.sqrt(n), dim=-1)
        return (weights @ v).permute(0, 2, 1, 3)

    _check(program, inner, *(1.5 * torch.randn(B, n, n, n) for _ in range(3)), fused=True)


@both
def test_keys_not_transposed(inner: str):
    """q @ k with N = d is a product too, and its softmax runs over the width of k."""

    def program(q, k, v):
        return torch.softmax(q @ k / math.sqrt(D), dim=-1) @ v

    _check(program, inner, *_qkv(n=D), fused=True)


@both
def test_values_transposed(inner: str):
    def program(q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(D), dim=-1) @ v.mT

    _check(program, inner, *_qkv(n=D), fused=True)


# --- what makes peers crash -------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("shape", [(N,), (1,), (), (N, 1), (H, 1, 1), (B, 1, 1, N), (N, N)], ids=str)
def test_additive_masks_of_every_broadcast_shape(shape: tuple[int, ...], inner: str):
    def program(q, k, v, mask):
        return torch.softmax((q @ k.transpose(-2, -1)) / math.sqrt(D) + mask, dim=-1) @ v

    mask = torch.where(torch.rand(shape) < 0.3, -8.0, torch.randn(shape))
    _check(program, inner, *_qkv(), mask, fused=True)


@ways(
    "how shape",
    product(["mul", "div", "on q", "on k", "sqrt of a size"], [(), (1,)]),
    lambda how, shape: shape == () or how == "mul",
)
def test_scales_held_in_tensors(how: str, shape: tuple[int, ...], inner: str):
    def program(q, k, v, scale):
        if how == "on q":
            q = q * scale
        if how == "on k":
            k = k / scale
        scores = q @ k.transpose(-2, -1)
        if how == "mul":
            scores = scores * scale
        if how == "div":
            scores = scores / scale
        if how == "sqrt of a size":
            scores = scores / torch.sqrt(torch.tensor(k.shape[-1], dtype=scores.dtype)) * scale
        return torch.softmax(scores, dim=-1) @ v

    _check(program, inner, *_qkv(), torch.full(shape, 0.7), fused=True)


# --- what is not attention, or not only -------------------------------------------------------------------------------


@both
def test_weights_that_are_returned(inner: str):
    def program(q, k, v):
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1)
        return weights @ v, weights

    _check(program, inner, *_qkv(), fused=True)


@both
def test_heads_that_mix(inner: str):
    """Talking heads: a product over the heads between scores and softmax."""

    def program(q, k, v, mix):
        scores = torch.einsum("bhij,gh->bgij", q @ k.transpose(-2, -1) / math.sqrt(D), mix)
        return torch.softmax(scores, dim=-1) @ v

    _check(program, inner, *_qkv(), torch.randn(H, H), fused=None)


@both
def test_two_attentions_in_a_chain(inner: str):
    """The second one's queries are the first one's output: two sites, both counted once."""

    def program(q, k, v):
        first = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v
        return torch.softmax(first @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v

    _check(program, inner, *_qkv(), fused=True)
    assert counters["fusion"]["sites"] == counters["fusion"]["fused"] == 2
