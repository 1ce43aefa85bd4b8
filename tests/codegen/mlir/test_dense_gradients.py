"""Gradients of biases with an element for every score, which batch elements or heads share, and of tables."""

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.training import TrainingKernel
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, assert_gradients_as_exact_as_eager, case, draw, on_threads
from tests.passes.exactness import as_exact_as_eager

B, H, N, M = 3, 2, 70, 150


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "dtype"), [("bias", "float32"), ("bias", "bfloat16"), ("half_bias", "float32"), ("brain_bias", "bfloat16")]
)
def test_batch_elements_are_added_up(name: str, target: str, dtype: str) -> None:
    c = case(name, dtype, 24, 16)
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    for batch in (1, 2, 3):
        operands, sizes = draw(c, {"B": batch, "H": H, "Nq": N, "Nk": M})
        out, statistics = run.outputs(operands, sizes)
        grad, needs = torch.randn_like(out), (True,) * len(operands)
        for found in on_threads(run.backward, grad, out, statistics, operands, sizes, needs):
            assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)
            assert found[3].dtype == operands[3].dtype


def normalized(score):
    return lambda q, k, v, *more: torch.softmax(score(q @ k.mT * 0.3, *more), -1) @ v


def causal(s, bias):
    return (s + bias).masked_fill(torch.ones(N, M, dtype=torch.bool).triu(81), -torch.inf)


PROGRAMS = {
    "of heads": (normalized(lambda s, a: s + a), [(H, N, M)]),
    "of all": (normalized(lambda s, a: s + a), [(N, M)]),
    "of batch elements": (normalized(lambda s, a: s + a), [(B, 1, N, M)]),
    "of both": (normalized(lambda s, a: s + a), [(B, H, N, M)]),
    "of heads, and of batch elements": (normalized(lambda s, a, b: s + a + b), [(H, N, M), (B, 1, N, M)]),
    "of heads, and of all": (normalized(lambda s, a, b: s * a + b), [(H, N, M), (N, M)]),
    "a part": (normalized(lambda s, a: s + a[:, 3 : N + 3, :M]), [(H, N + 5, M + 7)]),
    "keys outside": (normalized(lambda s, a: s + a.mT), [(H, M, N)]),
    "read twice": (normalized(lambda s, a: s * a[0] + a), [(H, N, M)]),
    "masked": (normalized(causal), [(H, N, M)]),
    "masked, of both": (normalized(causal), [(B, H, N, M)]),
    "no softmax": (lambda q, k, v, a: torch.sigmoid(q @ k.mT * 0.3 + a) @ v, [(H, N, M)]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_programs(name: str, dtype: torch.dtype) -> None:
    function, shapes = PROGRAMS[name]
    given = [torch.randn(B, H, length, 16, dtype=dtype) for length in (N, M, M)]
    given += [torch.randn(shape, dtype=dtype) for shape in shapes]
    (site,) = as_exact_as_eager(function, given, gradients=True)
    assert site.fused


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [501, 20001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_any_size(size: int, dtype: torch.dtype) -> None:
    """Threads have two copies of the gradient of a small one."""

    def function(q, k, v, table):
        i, j = torch.arange(N)[:, None], torch.arange(M)
        return torch.softmax(q @ k.mT * 0.3 + table[(i * i + j * j) % size], -1) @ v

    given = [torch.randn(B, H, length, 16, dtype=dtype) for length in (N, M, M)]
    (site,) = as_exact_as_eager(function, [*given, torch.randn(size, dtype=dtype)], gradients=True)
    assert site.fused
