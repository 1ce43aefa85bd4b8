"""The memory of a training step: linear in the length, but for gradients that are themselves quadratic."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion  # noqa: F401  (registers the backend)
from fusion.api.compare import peak_memory
from fusion.codegen.reference import derivatives

WIDTH, LENGTHS = 8, (512, 1024, 2048)


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(WIDTH)


def full(q, k, v):
    return torch.softmax(scores(q, k), -1) @ v


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dropped(q, k, v):
    return F.dropout(torch.softmax(scores(q, k), -1), 0.1) @ v


def sloped(q, k, v, slope):
    return (
        torch.softmax(scores(q, k) + slope * (torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]), -1) @ v
    )


def biased(q, k, v, bias):
    return torch.softmax(scores(q, k) + bias, -1) @ v


def entropic(q, k, v):
    """The output, with a statistic of the weights in it, through which gradients flow as well."""
    s = scores(q, k)
    w = torch.softmax(s, -1)
    entropy, log_sums = (w * torch.log(w + 1e-6)).sum(-1), torch.logsumexp(s, -1)
    return w @ v + (entropy + log_sums)[..., None] + w.sum(-2).square().mean()


def tangents(q, k, v):
    """As MeanFlow has it: the tangent is part of the target, through which no gradient flows."""
    out, moved, *_ = torch.func.jvp(full, (q, k, v), (v, q, k))
    return out - (v - moved).detach()


def differentiated_tangents(q, k, v):
    return torch.func.jvp(full, (q, k, v), (v, q, k))[1]


def penalty(q, k, v):
    return torch.func.grad(lambda x: full(x, k, v).float().sin().sum())(q)


EXTRA = {sloped: lambda n: [1], biased: lambda n: [1, 1, n, n]}


def inputs(function, n, dtype):
    shapes = [(1, 1, n, WIDTH)] * 3 + ([EXTRA[function](n)] if function in EXTRA else [])
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def step(function, tensors):
    torch.autograd.grad(function(*tensors).float().square().sum(), tensors)


def peaks(function, run, dtype):
    """Bytes that a step allocates at most, by length, less the gradient of a bias."""
    found = []
    for n in LENGTHS:
        tensors = inputs(function, n, dtype)
        step(run, tensors)  # compiles
        held = dtype.itemsize * sum(t.numel() for t in tensors[3:])
        found.append(peak_memory(lambda tensors=tensors: step(run, tensors)) - held)
    return found


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (causal, torch.bfloat16),
        (entropic, torch.float32),
        (tangents, torch.float32),
        *(
            pytest.param(function, dtype, marks=pytest.mark.long)
            for function, dtype in (
                (differentiated_tangents, torch.bfloat16),
                (penalty, torch.float32),
                (full, torch.float32),
                (full, torch.bfloat16),
                (causal, torch.float32),
                (dropped, torch.float32),
                (dropped, torch.bfloat16),
                (sloped, torch.bfloat16),
                (sloped, torch.float32),
                (biased, torch.bfloat16),
                (biased, torch.float32),
            )
        ),
    ],
)
def test_a_step_takes_memory_linear_in_the_length(function, dtype):
    """In a process of its own: what other tests leave in theirs is not to be measured."""
    command = [sys.executable, __file__, function.__name__, str(dtype).removeprefix("torch.")]
    places = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def takes_memory_linear_in_the_length(function, dtype):
    derivatives.BLOCK_ELEMENTS = 1 << 16  # blocks that are small beside these lengths
    options = {"inner": "aot_eager", "strict": True, "transforms": "always"}
    found = peaks(function, torch.compile(function, backend="fusion", options=options, dynamic=True), dtype)
    growth = [(b - a) / (n - m) for a, b, m, n in zip(found, found[1:], LENGTHS, LENGTHS[1:], strict=False)]
    assert 0 < growth[1] <= 1.2 * growth[0], f"bytes {found} at lengths {LENGTHS}"
    assert found[-1] < LENGTHS[-1] ** 2, f"{found[-1]} bytes would hold a matrix of scores in a byte each"


def test_the_measure_sees_what_eager_keeps():
    found = peaks(full, full, torch.float32)
    assert found[-1] > 3.5 * found[-2] > 0
    assert found[-1] > 4 * LENGTHS[-1] ** 2


@pytest.mark.parametrize("function", [full, causal, dropped, sloped, biased, entropic])
def test_nothing_but_operands_and_rows_is_kept_for_the_backward(function):
    """What autograd saves beside the inputs has elements by rows: the output and statistics."""
    n = 512
    tensors = inputs(function, n, torch.float32)
    run = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*tensors).sum().backward()
    own = {t.untyped_storage().data_ptr() for t in tensors}
    extra = sum(size for place, size in kept.items() if place not in own)
    numbers = 5 if function is entropic else 3  # a log-sum-exp's gradient reads the maximum and the sum
    assert 0 < extra <= 4 * n * (WIDTH + numbers) + 4 * n, f"{extra} bytes kept"


if __name__ == "__main__":
    takes_memory_linear_in_the_length(globals()[sys.argv[1]], getattr(torch, sys.argv[2]))
