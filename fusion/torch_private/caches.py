"""torch's cache directory, and the files that travel with `torch.compiler.save_cache_artifacts`.

Without the directory, compiled kernels would lie beside Inductor's and not follow TORCHINDUCTOR_CACHE_DIR; without the
artifacts, a process that loads those of another would compile the kernels again. And torch's structured log, without
which `tlparse` shows nothing of this package.
"""

from __future__ import annotations

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

__all__ = ["CacheArtifact", "CacheArtifactFactory", "CacheArtifactManager", "cache_dir", "is_tracing_log_on",
           "write_to_tracing_log"]  # fmt: skip


def cache_dir() -> str:
    """Directory of Inductor's files, created where it does not exist."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.cache_dir()


def is_tracing_log_on() -> bool:
    """Whether torch's structured log (TORCH_TRACE) is enabled."""
    return bool(torch._logging._internal.trace_log.handlers)


def write_to_tracing_log(name: str, text: str) -> None:
    """Add a text to the structured log, under a name. Does nothing where the log is not enabled."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text
    )
