"""In these tests `torch.compile(..., backend="fusion")` runs GPU kernels on CPU tensors, in Triton's interpreter, also
where the CPU's own emitter is missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from fusion.codegen import triton
    from fusion.runtime import executor as runtime

    monkeypatch.setattr(runtime, "unsupported", lambda spec, device: triton.supports(spec))
    monkeypatch.setattr(runtime, "_compile", lambda spec, device: triton.compile(spec))
    monkeypatch.setattr(runtime, "_compile_training", lambda spec, device: triton.Differentiable(spec))
    monkeypatch.setattr(runtime, "_executors", {})
    monkeypatch.setattr(runtime, "_differentiables", {})
    yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for what is remembered between processes."""
    from fusion.codegen.triton import module

    monkeypatch.setattr(module, "directory", lambda: tmp_path)
    return tmp_path
