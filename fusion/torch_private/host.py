"""torch's cache directory and the files that travel with `torch.compiler.save_cache_artifacts`; AMX's tile registers.

Without the directory, compiled kernels would lie beside Inductor's and not follow TORCHINDUCTOR_CACHE_DIR; without the
artifacts, a process that loads those of another would compile the kernels again. Not part of `dynamo`: `import fusion`
needs this module, and Dynamo takes a second to import, and fails where the directory cannot be made.
"""

from __future__ import annotations

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

__all__ = ["CacheArtifact", "CacheArtifactFactory", "CacheArtifactManager", "cache_dir", "init_amx"]


def cache_dir() -> str:
    """Directory of Inductor's files, created where it does not exist."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.cache_dir()


def init_amx() -> bool:
    """Ask the operating system for AMX's tile registers; False where it refuses. Without it, matrix kernels of CPUs
    with AMX would end the process."""
    return bool(torch.cpu._init_amx())
