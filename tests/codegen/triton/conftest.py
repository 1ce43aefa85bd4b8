"""In these tests `torch.compile(..., backend="fusion")` runs GPU kernels on CPU tensors, in Triton's interpreter, also
where the CPU's own emitter is missing."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def gpu_kernels() -> Iterator[None]:
    from tests.emitters import interpreted

    with interpreted():
        yield


@pytest.fixture
def emits(gpu_kernels: None) -> Iterator[Callable[..., None]]:
    """A function of (spec -> kernel, spec -> what trains), whose kernels run from then on."""
    from tests.emitters import interpreted

    with contextlib.ExitStack() as stack:
        yield lambda make=None, train=None: stack.enter_context(interpreted(make, train))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for what is remembered between processes."""
    from fusion import disk_cache

    monkeypatch.setattr(disk_cache, "directory", lambda: tmp_path)
    return tmp_path
