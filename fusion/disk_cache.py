"""Files of ours under torch's cache directory; some of them travel with `torch.compiler.save_cache_artifacts`.

Any number of processes may share the directory. A file appears whole or not at all; what is kept with `store` is sealed
by a checksum. Whatever goes wrong with such a file (no permission, a full disk, a file cut off or changed) counts as
not having it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

log = logging.getLogger(__name__)

_SEAL = hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9A-Za-z_]+(\.[a-z]+)?")


def directory() -> Path:
    """`fusion/` in torch's cache directory; made where it does not exist. Raises OSError."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    path = Path(cache_dir()) / "fusion"
    path.mkdir(parents=True, exist_ok=True)
    return path


def enabled() -> bool:
    """Whether files of earlier processes may be used: torch's own switch (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)."""
    return not torch.compiler.config.force_disable_caches


def tag() -> str:
    """What the user wants keys to contain, to break with all that was cached (TORCH_COMPILE_CACHE_KEY_TAG)."""
    return torch.compiler.config.cache_key_tag


def write(path: Path, content: bytes) -> None:
    """Write a file aside and rename it, so that another process never reads half of it. Raises OSError."""
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def stored(name: str) -> bytes | None:
    """What was kept under a name, or None."""
    if not enabled():
        return None
    try:
        sealed = (directory() / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        log.debug("%s cannot be read: %s", name, problem)
        return None
    if (content := _opened(sealed)) is None:
        log.debug("%s is ignored: it is damaged", name)
        return None
    CacheArtifactManager.record_artifact(KernelArtifact.type(), name, sealed)
    return content


def store(name: str, content: bytes) -> None:
    """Keep something under a name, for later processes."""
    if enabled():
        sealed = hashlib.sha256(content).digest() + content
        CacheArtifactManager.record_artifact(KernelArtifact.type(), name, sealed)
        _put(name, sealed)


def _put(name: str, sealed: bytes) -> None:
    try:
        write(directory() / name, sealed)
    except OSError as problem:
        log.debug("%s was not kept: %s", name, problem)


def _opened(sealed: bytes) -> bytes | None:
    seal, content = sealed[:_SEAL], sealed[_SEAL:]
    return content if hashlib.sha256(content).digest() == seal else None


@CacheArtifactFactory.register
class KernelArtifact(CacheArtifact):
    """A stored file on its way to another process. key: its name. content: sealed."""

    def populate_cache(self) -> None:
        """Keep the file here, unless it is damaged or its name is not one of ours."""
        if enabled() and _NAME.fullmatch(self.key) and _opened(self.content) is not None:
            _put(self.key, self.content)

    @staticmethod
    def type() -> str:
        return "fusion"
