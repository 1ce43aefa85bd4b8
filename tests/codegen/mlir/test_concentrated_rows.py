"""Rows whose deltas are summed over the keys: those with a large weight, few or many among others, and all where rows
of V have much in common."""

import functools
import math

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.backward import BackwardCall
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.backward.delta import ListedQueries
from fusion.exactness import errors
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, Case, beside_eager, case, draw
from tests.numerics import assert_as_exact_over_draws

SIZES = {"B": 2, "H": 2, "Nq": 331, "Nk": 150}
PROGRAMS = {
    "plain": {},
    "causal_last_key": {},
    "window": {},
    "left_padded": {},
    "bias": {},
    "half_bias": {},
    "brain_bias": {},
    "bool_mask": {},
    "alibi": {},
    "soft_cap": {},
    "row_gate": {},
    "documents": {},
    "plain with sinks": {"sinks": True},
    "plain by one more": {"off_by_one": True},
    "alibi with weights": {"weight": True},
    "causal of groups": {"group": 3},
}


def drawn(
    c: Case, run: TrainingKernel, share: float, common: float, marked: bool = True
) -> tuple[dict[str, torch.Tensor], ...]:
    """Gradients, eager's, and those in float64. Of the queries this share is long enough for one key to take most of
    the weight. common: what all rows of V have in common. marked: as the forward leaves them."""
    operands, sizes = draw(c, SIZES)
    long = torch.rand(operands[0].shape[:-1]) < share
    operands[0] = torch.where(long.unsqueeze(-1), operands[0] * 9, operands[0])
    operands[2] += common
    if len(operands) > 3 and operands[3].dtype is torch.bool and operands[3].dim() == 2:  # keys that are padding
        operands[2] *= operands[3][:, None, :, None]
    out, statistics = run.outputs(operands, sizes)
    assert 0 < (statistics[0] < 0).float().mean() < 1
    grad, needs = torch.randn_like(out), tuple(x.is_floating_point() for x in operands)
    if not marked:
        statistics[0].abs_()
    found = run.backward(grad, out, statistics, operands, sizes, needs)
    return beside_eager(found, c, operands, grad, needs)


WAYS = [(target, "float32") for target in TARGETS] + [("best", "bfloat16"), ("pairs", "bfloat16"), ("avx2", "float16")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(name: str, way: tuple[str, str]) -> None:
    target, dtype = way
    c = case(name.split()[0], dtype, 24, 16, **PROGRAMS[name])
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    for share, common in ((0.03, 0.5), (0.4, 0.5), (0.1, 3.0)):
        assert_as_exact_over_draws(
            functools.partial(drawn, c, run, share, common), getattr(torch, dtype), name="gradient", check_dtype=False
        )


def largest(c: Case, dtype: str, *how) -> float:
    """Error / bound of the worst gradient, of one draw."""
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS["multiply-add"]), TARGETS["multiply-add"])
    torch.manual_seed(0)
    ours, eager, exact = drawn(c, run, *how)
    return max(errors(ours[n], eager[n], exact[n], getattr(torch, dtype)).share for n in ours if n != "v")


def test_marked_rows_are_more_exact(monkeypatch) -> None:
    c = case("plain")
    monkeypatch.setattr(ListedQueries, "common_share", math.inf)
    assert largest(c, "float32", 0.9, 0.8) < largest(c, "float32", 0.9, 0.8, False)


@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", "float32"), ("left_padded", "float32"), ("bucket_table", "bfloat16")]
)
def test_rows_of_v_with_much_in_common(name: str, dtype: str, monkeypatch) -> None:
    c = case(name, dtype, 24, 16)
    found = largest(c, dtype, 0.01, 8.0)
    assert found < 1
    monkeypatch.setattr(BackwardCall, "_common", lambda self: 0)
    monkeypatch.setattr(ListedQueries, "common_share", math.inf)
    without = largest(c, dtype, 0.01, 8.0)
    assert found < without
