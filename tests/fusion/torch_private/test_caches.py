"""torch's cache directory and its artifacts, as fusion.torch_private.dynamo uses them."""

import torch

from fusion.torch_private import dynamo as caches


def test_the_directory_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    assert caches.cache_dir() == str(tmp_path / "here")


def test_artifacts_travel() -> None:
    arrived = []

    @caches.CacheArtifactFactory.register
    class FusionPrivateTest(caches.CacheArtifact):
        def populate_cache(self) -> None:
            arrived.append((self.key, self.content))

        @staticmethod
        def type() -> str:
            return "fusion_private_test"

    caches.CacheArtifactManager.record_artifact("fusion_private_test", "key", b"content")
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    torch.compiler.load_cache_artifacts(saved[0])
    assert ("key", b"content") in arrived
