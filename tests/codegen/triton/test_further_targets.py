"""Kernels compiled for GPUs of which few or no facts are kept: they fit, multiply matrices, and loops do not spill."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from benchmarks.offline.facts import Facts, facts_of
from fusion.planning.gpu_facts import FEW_SPILLED
from tests.codegen.mlir.cases import case
from tests.codegen.triton.whole import whole

LONG = functools.partial(pytest.param, marks=pytest.mark.long)

MATRIX = {"sm_86": "mma", "sm_89": "mma", "sm_103": "tcgen05", "sm_120": "mma", "gfx950": "mfma", "gfx1100": "wmma"}
SPECS = [(name, d) for d in (64, 128) for name in ("plain", "causal", "soft_cap", "bias", "alibi")]
SPECS += [("plain", 256), ("causal", 256)]

QUERIES, KEYS = "backward_queries", "backward_keys"
SPILLING = {
    **{("gfx1100", name, 256, QUERIES): 0.10 for name in ("plain", "causal")},
    **{("gfx1100", name, 256, KEYS): 0.16 for name in ("plain", "causal")},
    **{("gfx1100", name, 128, QUERIES): 0.02 for name in ("plain", "causal", "alibi")},
    ("gfx1100", "plain", 64, KEYS): 0.03,
    **{(target, "alibi", 128, QUERIES): 0.02 for target in ("sm_86", "sm_89")},
    ("sm_103", "alibi", 64, QUERIES): 0.11,
}
"""(target, spec, columns, kernel): the share of its loop's instructions that may move registers. On gfx1100 both halves
of a wave hold a product's factor: 16 rows of Q and dO take all 256 registers at 256 columns, half of them at 128, where
the estimate is about right, and not above. Tiles of sm_80 and sm_100 are known from calls with numbers of queries that
16 divides; here nothing is known of these, and loops take more."""

TOO_LARGE = {
    ("sm_103", "plain", 128, KEYS),
    *(("sm_103", n, 256, k) for n in ("plain", "causal") for k in (QUERIES, KEYS)),
}
"""Kernels of Blackwell that fit in calls with numbers of queries that 16 divides, and otherwise need more shared or
tensor memory than there is: the launch takes the next smaller tile."""


def compiled(target: str, name: str, d: int, dtype: str = "bfloat16") -> list[Facts]:
    """The forward and training kernels."""
    spec = case(name, dtype, d).spec
    return facts_of(whole(spec) if name == "causal" else spec, target, training=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "d"), SPECS)
@pytest.mark.parametrize("target", MATRIX)
def test_chosen_tiles_fit_and_do_not_spill(target: str, name: str, d: int) -> None:
    check(target, name, d)


@pytest.mark.parametrize("target", ["sm_120", *(LONG(target) for target in MATRIX if target != "sm_120")])
def test_a_causal_mask_on_every_target(target: str) -> None:
    check(target, "causal", 64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("target", MATRIX)
def test_float32(target: str, name: str) -> None:
    """Without matrix units: products are exact."""
    for fact in compiled(target, name, 64, "float32"):
        assert fact.fits and not fact.lost and fact.spilled <= FEW_SPILLED, fact


def check(target: str, name: str, d: int) -> None:
    for fact in compiled(target, name, d):
        place = (target, name, d, fact.kernel.removeprefix("attention_"))
        if place in TOO_LARGE:
            assert not fact.fits, f"{place} is no exception any more"
            continue
        assert fact.fits and not fact.lost and not fact.warnings, fact
        assert fact.spilled <= SPILLING.get(place, FEW_SPILLED), (place, fact)
        assert fact.matrix[MATRIX[target]] or fact.kernel == "attention_backward_prepare", fact
