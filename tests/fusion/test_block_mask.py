"""Block-sparse attention by option: the model's attentions under the user's mask, or an error, never a dense result."""

import math

import pytest
import torch

import fusion
from fusion.errors import BlockMaskError, OptionError
from fusion.options import Options
from tests.numerics import assert_as_exact_as_eager

N = 256


def attend(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def causal(q, k, v):
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf), -1) @ v


def dense(keep, n=N, heads=3):
    axes = [torch.arange(e).reshape([-1 if k == a else 1 for k in range(4)]) for a, e in enumerate((2, heads, n, n))]
    return keep(*axes).expand(2, heads, n, n)


def under(function, keep):
    """What eager computes with the mask written out."""

    def masked(q, k, v):
        scores = q @ k.mT * (0.25 if function is attend else 1)
        live = keep & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if function is causal else keep
        return torch.softmax(scores.masked_fill(~live, -math.inf), -1) @ v

    return masked  # fmt: skip


documents = (torch.arange(N) // 100)[None].repeat(2, 1)
CALLABLES = {
    "local and global": lambda b, h, i, j: ((i - j).abs() < 40) | (j < 16),
    "dilated but for one head": lambda b, h, i, j: ((i - j) % 3 == 0) | (h == 0),
    "captured": lambda b, h, i, j: documents[b, i] == documents[b, j],
    "by batch": lambda b, h, i, j: (b == 0) | (i >= j),
}


def run(function, mask, n=N, **options):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, n, 16) for _ in range(3)]
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True, "block_mask": mask, "tile_maps": "always"} | options
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options=options)(*inputs)
    return inputs, actual, reports[0].sites[0].spec


@pytest.mark.parametrize("function", [attend, causal])
@pytest.mark.parametrize("name", CALLABLES)
def test_a_callable_is_the_mask_of_every_attention(name, function):
    inputs, actual, spec = run(function, CALLABLES[name])
    reference = under(function, dense(CALLABLES[name]))
    exact = reference(*(x.double() for x in inputs))
    assert_as_exact_as_eager(actual, reference(*inputs), exact, torch.float32)
    assert any(o.name != "tiles" for o in spec.operands[3:]) == (name == "captured")


def test_a_callable_of_positions_gives_closed_form_ranges():
    _, _, spec = run(attend, lambda b, h, i, j: (j <= i) & (i - j < 64))
    assert str(spec.mask.key_lo) == "i0 - 63" and str(spec.mask.key_hi) == "i1 + 1"


@pytest.mark.parametrize("shape", [(4, 4), (3, 8, 2), (2, 3, 4, 4), (2, 1, 4, 4)])
def test_a_tensor_says_which_blocks_meet(shape):
    blocks = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.5
    blocks[..., 0] = True
    blocks[..., 1, :] = torch.arange(shape[-1]) < 0  # a row of blocks without keys: NaN, as eager has it
    inputs, actual, spec = run(attend, blocks)
    keep = blocks.repeat_interleave(N // shape[-2], -2).repeat_interleave(N // shape[-1], -1)
    reference = under(attend, keep)
    exact = reference(*(x.double() for x in inputs))
    assert_as_exact_as_eager(actual, reference(*inputs), exact, torch.float32)
    assert spec.mask.tile_live is not None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(5, 4, dtype=torch.bool), "5 blocks for 256 queries"),
        (torch.ones(7, 4, 4, dtype=torch.bool), "has 3 where it has 7"),
        (lambda b, h, i, j: i - j, "return a bool tensor"),
        (lambda i, j: i >= j, "cannot be called"),
        (lambda b, h, i, j: (i - j) % (h + 1) == 0, "cannot be followed"),
        (lambda b, h, i, j: (i >= j) & (i < i.shape[2] - 1), "not a pointwise function"),
    ],
    ids=["blocks", "heads", "dtype", "arguments", "operation", "shapes"],
)
def test_a_mask_that_does_not_fit_is_an_error(mask, message):
    with pytest.raises(Exception, match=message) as raised:
        run(attend, mask, strict=False)
    assert BlockMaskError.__name__ in str(raised.value)


def test_an_attention_that_is_left_alone_is_an_error():
    def escaping(q, k, v):
        weights = torch.softmax(q @ k.mT, -1)
        return weights @ v, weights

    with pytest.raises(Exception, match="block_mask was asked for"):
        run(escaping, CALLABLES["by batch"], strict=False)


@pytest.mark.parametrize("value", [3, torch.ones(4, 4), torch.ones(4, dtype=torch.bool)])
def test_other_values_are_refused(value):
    with pytest.raises(OptionError, match="block_mask"):
        Options.parse({"block_mask": value})
