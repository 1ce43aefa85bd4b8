"""`torch.nn.attention.varlen_attn` on CPUs, where torch has no kernel for it: against a loop over the sequences."""

import inspect

import pytest
import torch
from torch.nn.attention import varlen

import fusion
from tests.numerics import assert_as_exact_as_eager

pytestmark = pytest.mark.skipif(
    not {"enable_gqa", "seqused_k"} <= inspect.signature(varlen.varlen_attn).parameters.keys(),
    reason="this torch's varlen_attn takes fewer arguments",
)
QUERIES, KEYS = (0, 30, 30, 100, 164), (0, 50, 60, 130, 210)
"""Where sequences begin: the second has no query, the third as many queries as keys."""
WINDOWS = [(-1, -1), (-1, 0), (20, 0), (5, 7), (-1, 3)]


def of_each_sequence(q, k, v, window, used, scale):
    """(outputs, log-sum-exps) as FlashAttention defines them: a window is aligned with the last key."""
    outputs, sums = [], []
    for sequence in range(len(QUERIES) - 1):
        first = KEYS[sequence]
        last = KEYS[sequence + 1] if used is None else first + int(used[sequence])
        rows = q[QUERIES[sequence] : QUERIES[sequence + 1]].transpose(0, 1)
        keys, values = (x[first:last].transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (k, v))
        distance = torch.arange(last - first) - torch.arange(rows.shape[1])[:, None] - (last - first - rows.shape[1])
        live = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            live &= distance >= -window[0]
        if window[1] >= 0:
            live &= distance <= window[1]
        scores = (rows @ keys.mT * scale).masked_fill(~live, -torch.inf)
        outputs.append((torch._safe_softmax(scores, -1) @ values).transpose(0, 1))
        sums.append(torch.where(live.any(-1), scores.float().logsumexp(-1), torch.inf))
    return torch.cat(outputs), torch.cat(sums, 1)


def compiled(q, k, v, window, used, scale, aux=None):
    def call(q, k, v, cu_q, cu_k):
        return varlen.varlen_attn(
            q, k, v, cu_q, cu_k, 70, 80, window_size=window, enable_gqa=True, seqused_k=used, scale=scale,
            return_aux=aux,
        )  # fmt: skip

    starts = (torch.tensor(begin, dtype=torch.int32) for begin in (QUERIES, KEYS))
    with fusion.collect_reports() as reports:
        result = torch.compile(call, backend="fusion", options={"inner": "eager"})(q, k, v, *starts)
    assert [report.fused for report in reports] == [1]
    return result


def operands(dtype=torch.float32, heads_of_keys=2, trained=False):
    shapes = ((164, 4, 16), (210, heads_of_keys, 16), (210, heads_of_keys, 16))
    return [torch.randn(shape, dtype=dtype, requires_grad=trained) for shape in shapes]


def wide(tensors):
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [None, (40, 10, 3, 33)])
@pytest.mark.parametrize("window", WINDOWS)
def test_outputs(window, used, dtype):
    given = operands(dtype)
    used = None if used is None else torch.tensor(used, dtype=torch.int32)
    actual = compiled(*given, window, used, 0.3)
    assert actual.dtype is dtype and actual.shape == given[0].shape
    eager, exact = (of_each_sequence(*tensors, window, used, 0.3)[0] for tensors in (given, wide(given)))
    assert_as_exact_as_eager(actual, eager, exact)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_log_sums_and_queries_without_a_key(window):
    given, used = operands(heads_of_keys=4), torch.tensor([40, 10, 0, 33], dtype=torch.int32)
    out, sums = compiled(*given, window, used, 0.25, varlen.AuxRequest(lse=True))
    eager, exact = (of_each_sequence(*tensors, window, used, 0.25) for tensors in (given, wide(given)))
    assert (sums[:, 30:100] == torch.inf).all() and (out[30:100] == 0).all()
    assert_as_exact_as_eager((out, sums), eager, exact, torch.float32)


@pytest.mark.parametrize("window", [(-1, -1), (5, 7)])
def test_gradients(window):
    given = operands(trained=True)
    towards = torch.randn(164, 4, 16)
    reference = wide(given)
    results = [compiled(*given, window, None, 0.25)]
    results += [of_each_sequence(*tensors, window, None, 0.25)[0] for tensors in (given, reference)]
    gradients = [
        torch.autograd.grad(out, tensors, towards.to(out))
        for out, tensors in zip(results, (given, given, reference), strict=True)
    ]
    assert_as_exact_as_eager(*gradients)


def test_pages_stay_torchs():
    """A cache in pages has no form here, and torch says that it has no kernel."""
    q, pool = torch.randn(2, 4, 16), torch.randn(8, 4, 2, 16)
    table, used = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)

    def call(q, pool):
        return varlen.varlen_attn(q, pool, pool, starts, None, 1, 8, enable_gqa=True, seqused_k=used, block_table=table)

    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        torch.compile(call, backend="fusion", options={"inner": "eager"})(q, pool)
