"""torch's cache directory and its artifacts, and AMX, as fusion.torch_private.devices uses them."""

import platform
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from fusion.torch_private import devices


@pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="fusion"),
    reason="needs the package installed: without its entry point the backend is registered with Dynamo at import",
)
def test_the_package_is_imported_without_dynamo() -> None:
    """Dynamo takes a second to import, and fails where the cache directory cannot be made."""
    code = "import sys, torch, fusion; assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_directory_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    assert devices.cache_dir() == str(tmp_path / "here")


def test_artifacts_travel() -> None:
    arrived = []

    @devices.CacheArtifactFactory.register
    class FusionPrivateTest(devices.CacheArtifact):
        def populate_cache(self) -> None:
            arrived.append((self.key, self.content))

        @staticmethod
        def type() -> str:
            return "fusion_private_test"

    devices.CacheArtifactManager.record_artifact("fusion_private_test", "key", b"content")
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    torch.compiler.load_cache_artifacts(saved[0])
    assert ("key", b"content") in arrived


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_amx_is_asked_for() -> None:
    assert devices.init_amx() in (True, False)
    assert devices.init_amx() == devices.init_amx()
    assert devices.amx_has_float16() in (True, False)
