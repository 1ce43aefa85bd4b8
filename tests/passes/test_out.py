"""Products that are written into a tensor that is given (`out=`): the tensor holds them afterwards, whatever is
fused."""

import pytest
import torch

from tests.numerics import assert_as_exact_as_eager


def weights(q, k):
    return torch.softmax(q @ k.mT / 4, -1)


def into_an_input(q, k, v, out):
    torch.bmm(weights(q, k), v, out=out)
    return out * 2


def into_a_view(q, k, v, out):
    torch.matmul(weights(q, k), v, out=out.unsqueeze(0)[0])
    return out


def into_new_memory(q, k, v, out):
    held = torch.zeros_like(out).repeat(2, 1, 1)
    torch.bmm(weights(q, k), v, out=held[: len(out)])
    return held + out.repeat(2, 1, 1)


def into_what_is_seen_elsewhere(q, k, v, out):
    flat = out.view(-1)
    torch.bmm(weights(q, k), v, out=out)
    out.add_(1)
    return flat


def scores_into_an_input(q, k, v, out):
    held = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    torch.bmm(q, k.mT, out=held)
    return torch.softmax(held / 4, -1) @ v + out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [into_an_input, into_a_view, into_new_memory, into_what_is_seen_elsewhere, scores_into_an_input],
    ids=lambda f: f.__name__,
)
def test_products_into_given_tensors(function, dynamic):
    torch._dynamo.reset()
    q, k, v = (torch.randn(6, 37, 16) for _ in range(3))
    runs = (
        torch.compile(function, backend="fusion", dynamic=dynamic, options={"inner": "aot_eager"}),
        function,
        function,
    )
    results = []
    for run, dtype in zip(runs, (torch.float32, torch.float32, torch.float64), strict=True):
        out = torch.ones(6, 37, 16, dtype=dtype)
        with torch.no_grad():
            results.append((run(q.to(dtype), k.to(dtype), v.to(dtype), out), out))
    assert_as_exact_as_eager(*results)
