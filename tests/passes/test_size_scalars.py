"""Numbers that follow from sizes (1 / n, log2 n) are expressions of sizes: a new length does not compile again.

Dynamo itself makes a number of `math.log(n)` and of the scale of `scaled_dot_product_attention`, for every backend.
"""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager


def over_length(q, k, v):
    return torch.softmax(q @ k.mT * (1.0 / k.shape[-2]), -1) @ v


def over_root(q, k, v):
    return torch.softmax(q @ k.mT * k.shape[-2] ** -0.5, -1) @ v


def by_root(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(k.shape[-2]), -1) @ v


def logarithm(q, k, v):
    return torch.softmax(q @ k.mT * (math.log2(k.shape[-2]) / 9.0) / 4.0, -1) @ v


def of_queries(q, k, v):
    return torch.softmax((q * math.log2(k.shape[-2]) * 0.1) @ k.mT, -1) @ v


def threshold(q, k, v):
    s = q @ k.mT
    return torch.softmax(torch.where(s > 1.0 / k.shape[-2], s, s * 0.5), -1) @ v


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("function", [over_length, over_root, by_root, logarithm, of_queries, threshold])
def test_a_new_length_does_not_compile_again(function, emitter):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})
    with fusion.collect_reports() as reports:
        for n in (33, 65, 129, 70):
            torch.manual_seed(n)
            inputs = [torch.randn(2, 2, n, 16) for _ in range(3)]
            exact = function(*(x.double() for x in inputs))
            assert_as_exact_as_eager(compiled(*inputs), function(*inputs), exact)
    assert [report.fused for report in reports] == [1, 1], "one compilation for the first length, one for all others"


def test_gradients_with_a_symbolic_scale():
    torch._dynamo.reset()
    compiled = torch.compile(over_root, backend="fusion", options={"inner": "eager"}, dynamic=True)

    def gradients(function, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs).square().sum(), inputs)

    for n in (40, 77):
        torch.manual_seed(n)
        inputs = [torch.randn(1, 2, n, 16) for _ in range(3)]
        exact = gradients(over_root, [x.double() for x in inputs])
        assert_as_exact_as_eager(gradients(compiled, inputs), gradients(over_root, inputs), exact)


def test_what_is_no_size_is_guarded():
    """A float of the user's is compiled in; another value compiles again and is right."""
    torch._dynamo.reset()

    def scaled(q, k, v, scale):
        return torch.softmax(q @ k.mT * scale, -1) @ v

    compiled = torch.compile(scaled, backend="fusion", options={"inner": "eager"}, dynamic=True)
    for scale in (0.25, 0.5):
        torch.manual_seed(0)
        inputs = [torch.randn(1, 2, 20, 16) for _ in range(3)]
        exact = scaled(*(x.double() for x in inputs), scale)
        assert_as_exact_as_eager(compiled(*inputs, scale), scaled(*inputs, scale), exact)


@pytest.mark.parametrize("packed", [(2, 20, 24), (2, 33, 22)], ids=["even pieces", "a shorter last piece"])
def test_a_head_dimension_that_follows_from_another_size_is_made_static(packed):
    """A third of a dynamic size, rounded up: that it is 8 does not say what it is a third of."""
    torch._dynamo.reset()

    def attend(x):
        q, k, v = x.chunk(3, -1)
        return torch.softmax(q @ k.mT, -1) @ v

    x = torch.randn(packed)
    with fusion.collect_reports() as reports:
        compiled = torch.compile(attend, backend="fusion", options={"inner": "eager"}, dynamic=True)
        assert_as_exact_as_eager(compiled(x), attend(x), attend(x.double()))
    assert [report.fused for report in reports] == [1]


def shifted_thirds(i, j, w):
    return (i + w) // 3 < j - w


def remainders(i, j, w):
    return (i * w) % 5 == j % 5


def products(i, j, w):
    return j > i * max(w, 0) + 3


def distances(i, j, w):
    return (j - i).abs() > w


@pytest.mark.parametrize("dead", [shifted_thirds, remainders, products, distances])
def test_integers_that_are_no_sizes(dead):
    """A Python int that Dynamo makes dynamic may be negative, or larger than any size."""
    torch._dynamo.reset()

    def attend(q, k, v, w):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return torch.softmax((q @ k.mT * 0.25).masked_fill(dead(i, j, w), -math.inf), -1) @ v

    inputs = [torch.randn(1, 2, 37, 16) for _ in range(3)]
    options = {"strict": True, "inner": "eager"}
    compiled = torch.compile(attend, backend="fusion", options=options, dynamic=True)
    with fusion.collect_reports() as reports:
        for w in (5, 3, -5, -2, 10**9, -(10**12), 4):
            exact = attend(*(x.double() for x in inputs), w)
            assert_as_exact_as_eager(compiled(*inputs, w), attend(*inputs, w), exact)
    assert len(reports) <= 5  # 5, 3 and 4 are one


def test_an_integer_that_divides_becomes_zero():
    """Python raises an error, and so does the compiled function; a kernel that divided would end the process."""
    torch._dynamo.reset()

    def attend(q, k, v, w):
        dead = torch.arange(k.shape[-2]) >= 24 // w
        return torch.softmax((q @ k.mT * 0.25).masked_fill(dead, -math.inf), -1) @ v

    inputs = [torch.randn(1, 2, 37, 16) for _ in range(3)]
    compiled = torch.compile(attend, backend="fusion", options={"strict": True, "inner": "eager"}, dynamic=True)
    for w in (3, 5, 2):
        assert_as_exact_as_eager(compiled(*inputs, w), attend(*inputs, w), attend(*(x.double() for x in inputs), w))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        compiled(*inputs, 0)


def test_integers_that_tensors_hold():
    """`capture_scalar_outputs` makes sizes of them, whose values no shape has."""
    torch._dynamo.reset()

    def attend(q, k, v, held):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return torch.softmax((q @ k.mT * 0.25).masked_fill(shifted_thirds(i, j, held.item()), -1e4), -1) @ v

    inputs = [torch.randn(1, 2, 37, 16) for _ in range(3)]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="fusion", options={"strict": True, "inner": "eager"})
        for w in map(torch.tensor, (30, 5, -12)):
            assert_as_exact_as_eager(compiled(*inputs, w), attend(*inputs, w), attend(*(x.double() for x in inputs), w))
