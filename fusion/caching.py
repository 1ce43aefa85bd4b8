"""Caches: of the process, and files under torch's cache directory, some of which travel with
`torch.compiler.save_cache_artifacts`.

Any number of processes may share the directory. A file appears complete or not at all; the content of `store` is sealed
by a checksum. A file with any problem (no permission, a full disk, a file cut off or changed) counts as missing.

Files are code, or decide about code. So one is read only where nobody but this user and root can have written it
(`read`). Directories above torch's cache directory are not checked: a user who may rename it has no other directory to
put in its place that belongs to this user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusion.torch_private.devices import CacheArtifact, CacheArtifactFactory, CacheArtifactManager, cache_dir

log = logging.getLogger(__name__)

_SEAL = hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9A-Za-z_]+(\.[a-z]+)?")


class Distrusted(PermissionError):
    """Another user may have written the file."""


def directory() -> Path:
    """`fusion/` in torch's cache directory; created where it does not exist. Raises OSError."""
    path = Path(cache_dir()) / "fusion"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def enabled() -> bool:
    """Whether files of earlier processes may be used: torch's own switch (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)."""
    return not torch.compiler.config.force_disable_caches


def tag() -> str:
    """Text that the user adds to keys, so as to ignore earlier caches (TORCH_COMPILE_CACHE_KEY_TAG)."""
    return torch.compiler.config.cache_key_tag


def write(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it, so that another process never reads half of it. Raises OSError."""
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def read(name: str) -> bytes:
    """Content of a file in `directory()`. Raises OSError; or, with one warning in the log, `Distrusted` where anybody
    but this user and root may have written it, or put it there."""
    with _trusted() as folder, _opened_in(folder, name, os.O_NONBLOCK) as handle:
        _check(handle, directory() / name)
        with open(handle, "rb", closefd=False) as file:
            return file.read()


def save(name: str, content: bytes) -> None:
    """Write a file into `directory()`, where `read` finds it. Raises OSError."""
    with _trusted():
        write(directory() / name, content)


@contextlib.contextmanager
def _trusted() -> Iterator[int]:
    """Handle of `directory()`. The opened directory is the one that is checked, and each name is looked up in the
    checked one: nobody can exchange it in between."""
    path = Path(os.path.realpath(directory()))
    with _opened_in(None, path.parent, os.O_DIRECTORY) as root:
        _check(root, path.parent, sticky=True)
        with _opened_in(root, path.name, os.O_DIRECTORY) as folder:
            _check(folder, path)
            yield folder


@contextlib.contextmanager
def _opened_in(folder: int | None, name: str | Path, flags: int) -> Iterator[int]:
    if not hasattr(os, "geteuid"):
        raise Distrusted("who wrote a file is not known on this system")
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


def _check(handle: int, path: Path, sticky: bool = False) -> None:
    """Raise `Distrusted` where others may write. sticky: a directory in which nobody may replace another user's files.
    Others may write to it, since those files are checked, too."""
    info = os.fstat(handle)
    if info.st_uid not in (0, os.geteuid()):
        _distrust(f"{path} belongs to user {info.st_uid}")
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        _distrust(f"{path} is no file")
    others = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_alone_in(info.st_gid, handle))
    if others and not (sticky and info.st_mode & stat.S_ISVTX):
        _distrust(f"others may write to {path} (mode {stat.S_IMODE(info.st_mode):o})")


def _is_alone_in(group: int, handle: int) -> bool:
    """Whether a group is this user's own, as systems create one per user, and no access list gives rights to others."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        listed = "system.posix_acl_access" in getattr(os, "listxattr", lambda _: ())(handle)
    except (KeyError, OSError):
        return False
    own = entry.gr_name == user.pw_name and user.pw_gid == group
    return own and not {*entry.gr_mem} - {user.pw_name} and not listed


def _distrust(reason: str) -> None:
    _warn(reason)
    raise Distrusted(reason)


@functools.lru_cache(maxsize=64)
def _warn(reason: str) -> None:
    log.warning("files of the cache are not used, and kernels are compiled in each process: %s", reason)


def stored(name: str) -> bytes | None:
    """Content that was stored under a name, or None."""
    if not enabled():
        return None
    try:
        sealed = read(name)
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
    """Store content under a name, for later processes."""
    if enabled():
        sealed = hashlib.sha256(content).digest() + content
        CacheArtifactManager.record_artifact(KernelArtifact.type(), name, sealed)
        _put(name, sealed)


def _put(name: str, sealed: bytes) -> None:
    try:
        save(name, sealed)
    except OSError as problem:
        log.debug("%s was not kept: %s", name, problem)


def _opened(sealed: bytes) -> bytes | None:
    seal, content = sealed[:_SEAL], sealed[_SEAL:]
    return content if hashlib.sha256(content).digest() == seal else None


@CacheArtifactFactory.register
class KernelArtifact(CacheArtifact):
    """A stored file on its way to another process. key: its name. content: sealed."""

    def populate_cache(self) -> None:
        """Store the file in this cache, unless it is damaged or its name is not one of fusion's."""
        if enabled() and _NAME.fullmatch(self.key) and _opened(self.content) is not None:
            _put(self.key, self.content)

    @staticmethod
    def type() -> str:
        return "fusion"


class Records:
    """Measured choices on disk: entries by name, in one file for a header, which has all that they depend on."""

    def __init__(self, kind: str, header: Mapping[str, Any]):
        self.header = dict(header)
        self.file = f"{kind}_{hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:16]}.json"

    def read(self, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
        """The sound entries; none from a file that cannot be read or has another header."""
        try:
            content = json.loads(read(self.file))
            if self.header.items() <= content.items():
                return {name: entry for name, entry in content["choices"].items() if is_sound(entry)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as problem:
            log.debug("%s is ignored: %s", self.file, problem)
        return {}

    def write(self, entries: Mapping[str, Any]) -> None:
        """Write the file anew, with these entries."""
        try:
            save(self.file, json.dumps(self.header | {"choices": entries}, indent=1).encode())
        except OSError as problem:
            log.info("what was measured is not remembered: %s", problem)


T = TypeVar("T")


class BoundedCache(dict):
    """Cache with at most `most` results; a new one replaces the oldest."""

    def __init__(self, most: int = 4096):
        super().__init__()
        self.most = most
        self._lock = threading.RLock()

    def __setitem__(self, key: Hashable, value: Any) -> None:
        with self._lock:
            if len(self) >= self.most and key not in self:
                del self[next(iter(self))]
            super().__setitem__(key, value)

    def store(self, key: Hashable, value: T) -> T:
        self[key] = value
        return value


class OncePerKey(BoundedCache):
    """Objects that are created once, at their first use, whichever threads ask for them."""

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        if (result := self.get(key)) is None:
            with self._lock:
                if (result := self.get(key)) is None:
                    result = self.store(key, make())
        return result
