"""In these tests `torch.compile(..., backend="fusion")` runs GPU kernels on CPU tensors, in Triton's interpreter, also
where the CPU's own emitter is missing; with `--ptx TARGET` compiled for a GPU, in the emulator of `tests/ptx`. A kernel
that fails raises: behind torch.compile the reference interpreter would take its place, and the test pass without it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def gpu_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    from fusion.runtime.guards import failures_raised
    from tests.emitters import interpreted

    with contextlib.ExitStack() as stack:
        if target := request.config.getoption("--ptx"):
            from tests.ptx.emulated import emulated

            stack.enter_context(emulated(target))
        stack.enter_context(interpreted())
        stack.enter_context(failures_raised())
        yield


@pytest.fixture
def emits(gpu_kernels: None) -> Iterator[Callable[..., None]]:
    """A function of (spec -> kernel, spec -> what trains), whose kernels run from then on."""
    from tests.emitters import interpreted

    with contextlib.ExitStack() as stack:
        yield lambda make=None, train=None: stack.enter_context(interpreted(make, train))


@pytest.fixture
def interpreters_tiles(gpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are planned as for Triton's interpreter, also of kernels that run as PTX."""
    from fusion.codegen.triton import launch
    from fusion.machine import INTERPRETER

    monkeypatch.setattr(launch, "machine_of", lambda device: INTERPRETER)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for what is remembered between processes."""
    from fusion import caching

    monkeypatch.setattr(caching, "directory", lambda: tmp_path)
    return tmp_path
