"""The sweep over M: its numbers, and that a plot comes out."""

import builtins

import numpy as np
import pytest

from examples.io_model import plots
from fusion.errors import MissingPackageError
from fusion.planning.problem import Problem

PROBLEM = Problem(n_q=256, n_k=256, d=16, d_v=16)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_io_falls_with_m_and_stays_above_the_bounds(direction):
    found = plots.sweep(PROBLEM, direction=direction, points=12)
    lowest = np.min([np.nan_to_num(io, nan=np.inf) for io in found.io.values()], axis=0)
    for name, io in found.io.items():
        fits = io[~np.isnan(io)]
        assert len(fits) and (np.diff(fits) <= 0).all(), name
    for lower in found.bounds.values():
        assert (lowest >= lower * 0.999).all()
    assert found.capacities[0] <= 16 * 16 / 4 and found.capacities[-1] >= 256 * 16


def test_a_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = plots.plot_sweep(plots.sweep(PROBLEM, points=6), tmp_path / "io.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    text = plots.plot_sweep(plots.sweep(PROBLEM, points=6), tmp_path / "io.svg").read_text()
    assert "<svg" in text


def test_without_matplotlib_there_is_a_clear_error(monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        plots.figure()
