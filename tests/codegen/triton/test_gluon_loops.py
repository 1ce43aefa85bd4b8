"""Hand-written loops in Gluon compile for Hopper; warps with roles, theirs and Triton's, are read rightly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="kernels need triton")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
SHARED_MEMORY = 232448
SPILLING = {("Gluon ahead", 128), ("Gluon ahead, in turns", 128)}
"""By name and keys, at 128 columns: those of tiles with too many scores."""


@pytest.fixture
def gluon_static():
    from benchmarks.offline import gluon_static

    return gluon_static


@pytest.mark.skipif(not KNOWN, reason="Gluon's names change from version to version")
@pytest.mark.parametrize("loops", ["loops_of_the_forward", "loops_of_latent_attention"])
def test_loops(loops: str) -> None:
    """In a process of its own: what Triton's interpreter leaves of its language in others, Gluon does not compile."""
    places = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    command = [sys.executable, __file__, loops]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def loops_of_the_forward(gluon_static) -> None:
    """Groups are told apart, products are not serialised, and weights of the tile before are multiplied beside
    exponentials wherever the loop has those alone in flight."""
    for kernel in gluon_static.forwards():
        facts = gluon_static.static_facts(kernel.compiled(), gluon_static.of_target("sm_90"))
        roles = kernel.constants["ROLES"]
        assert (facts.groups, facts.warps, len(facts.loops)) == ((2, 8, 2) if roles else (1, 8, 1)), kernel
        assert facts.shared <= SHARED_MEMORY and not facts.serialised, kernel
        every, under = facts.loops[0].exponentials
        assert "late" not in kernel.name or every == under, kernel
        if kernel.columns[0] == 64 or (kernel.name, kernel.trip) not in SPILLING:
            assert not facts.spills, kernel


def loops_of_latent_attention(gluon_static) -> None:
    """No score is computed twice: the products of a trip are as large as its tile."""
    for kernel in gluon_static.latents():
        facts = gluon_static.static_facts(kernel.compiled(), gluon_static.of_target("sm_90"))
        assert facts.shared <= SHARED_MEMORY and not facts.serialised, kernel
        made = sum(m * n * k for i in facts.main.body if i.asynchronous for m, n, k in [i.product])
        assert made * 2 == 64 * kernel.trip * (576 + 512), kernel


def test_specialised_programs_of_our_emitter(gluon_static) -> None:
    """Two groups of four warps multiply; the metadata's twelve are all groups'."""
    device = gluon_static.of_target("sm_90")
    cell = gluon_static.Cell(name="full", d=64)
    name = gluon_static.Forward.name
    tile = gluon_static.Tile(rows=128, keys=64, warps=4, stages=2, specialized=True)
    facts = gluon_static.compiled(cell, device, [name], {name: tile})[name]
    assert (facts.groups, facts.warps, facts.residents) == (2, 8, 1)


if __name__ == "__main__":
    from benchmarks.offline import gluon_static as compiled_loops

    globals()[sys.argv[1]](compiled_loops)
