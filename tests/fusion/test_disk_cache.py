"""Files that processes share: found whole or not at all, and never a reason to fail."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from fusion import caching
from fusion.caching import KernelArtifact, store, stored

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fusion"


def process(code: str) -> subprocess.CompletedProcess:
    """Another process that runs a piece of code in the same cache folder."""
    command = [sys.executable, "-c", f"import os, signal\nfrom fusion import caching\n{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_another_process_finds_what_was_kept(folder: Path) -> None:
    assert stored("a.o") is None
    store("a.o", CONTENT)
    assert stored("a.o") == CONTENT and [path.name for path in folder.iterdir()] == ["a.o"]
    done = process("assert caching.stored('a.o') == bytes(range(256)) * 64; caching.store('b.o', b'theirs')")
    assert done.returncode == 0, done.stderr
    assert stored("b.o") == b"theirs"


@pytest.mark.parametrize(
    "damage",
    [
        lambda sealed: b"",
        lambda sealed: sealed[:20],
        lambda sealed: sealed[:-1],
        lambda sealed: sealed + b"\0",
        lambda sealed: sealed[:5000] + bytes([sealed[5000] ^ 1]) + sealed[5001:],
        lambda sealed: bytes(len(sealed)),
    ],
    ids=["empty", "cut in the seal", "cut off", "longer", "one bit", "zeros"],
)
def test_a_damaged_file_is_as_good_as_none(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    store("a.o", CONTENT)
    (folder / "a.o").write_bytes(damage((folder / "a.o").read_bytes()))
    assert stored("a.o") is None
    store("a.o", CONTENT)
    assert stored("a.o") == CONTENT, "and replaced"


@contextmanager
def _no_room() -> Iterator[None]:
    """Files end after 1,000 bytes, as on a disk that is full; the operating system says so in the middle of writing."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_keeps_nothing_and_leaves_nothing(folder: Path) -> None:
    with _no_room():
        store("a.o", CONTENT)
        with pytest.raises(OSError):
            caching.write(folder / "b.o", CONTENT)
    assert not list(folder.iterdir()) and stored("a.o") is None


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("step", ["mkdir", "mkstemp", "replace"])
def test_whatever_the_operating_system_refuses_is_no_error(monkeypatch, folder: Path, step: str, code: int) -> None:
    def refuse(*arguments, **keywords):
        raise OSError(code, os.strerror(code))

    owner = {"mkdir": Path, "mkstemp": caching.tempfile, "replace": os}[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, refuse)
        store("a.o", CONTENT)
        assert stored("a.o") is None
    assert not folder.exists() or not list(folder.iterdir())


def test_a_file_that_may_not_be_read_is_as_good_as_none(folder: Path) -> None:
    (folder / "a.o").mkdir(parents=True)
    assert stored("a.o") is None
    store("a.o", CONTENT)
    assert stored("a.o") is None


def test_a_process_that_is_killed_in_the_middle_leaves_no_half_file(folder: Path) -> None:
    kill = "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
    done = process(kill + "caching.store('a.o', b'half')")
    assert done.returncode == -signal.SIGKILL
    assert stored("a.o") is None
    store("a.o", CONTENT)
    assert stored("a.o") == CONTENT


def test_torch_s_switch_holds_here(folder: Path) -> None:
    store("a.o", CONTENT)
    with torch.compiler.config.patch(force_disable_caches=True):
        assert stored("a.o") is None
        store("b.o", CONTENT)
    assert stored("a.o") == CONTENT and stored("b.o") is None


def test_files_travel_with_torch_s_artifacts(folder: Path) -> None:
    with CacheArtifactManager.with_fresh_cache():
        store("kept.o", CONTENT)
        saved = torch.compiler.save_cache_artifacts()
    assert saved and saved[1].artifacts["fusion"] == ["kept.o"]
    with CacheArtifactManager.with_fresh_cache():
        assert stored("kept.o") == CONTENT
        read = torch.compiler.save_cache_artifacts()
    assert read and read[1].artifacts["fusion"] == ["kept.o"], "what was only read travels too"
    (folder / "kept.o").unlink()
    loaded = torch.compiler.load_cache_artifacts(saved[0])
    assert loaded and loaded.artifacts["fusion"] == ["kept.o"]
    assert stored("kept.o") == CONTENT


@pytest.mark.parametrize("name", ["../a.o", "{outside}/a.o", "", ".", "a/b.o", "a.o\n"])
def test_an_artifact_with_a_name_that_is_not_ours_is_left_out(folder: Path, name: str) -> None:
    name = name.format(outside=folder.parent)
    store("good.o", CONTENT)
    KernelArtifact(name, (folder / "good.o").read_bytes()).populate_cache()
    KernelArtifact("bad.o", CONTENT).populate_cache()
    files = [path.name for path in folder.parent.rglob("*") if path.is_file()]
    assert files == ["good.o"]


def _given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file that of another user."""
    if os.geteuid() == 0:
        os.chown(path, 4321, 4321, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


ELSEWHERE = {
    "the file may be written by all": lambda folder, _: (folder / "a.o").chmod(0o666),
    "the file may be written by a group": lambda folder, _: _group_may_write(folder / "a.o"),
    "the file is another user's": lambda folder, patch: _given_away(folder / "a.o", patch),
    "the folder may be written by all": lambda folder, _: folder.chmod(0o777),
    "the folder may be written by all, but not renamed in": lambda folder, _: folder.chmod(0o1777),
    "the folder is another user's": lambda folder, patch: _given_away(folder, patch),
    "the folder above may be written by all": lambda folder, _: folder.parent.chmod(0o777),
    "the folder above is another user's": lambda folder, patch: _given_away(folder.parent, patch),
}


def _group_may_write(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, -1, 4321)
        path.chmod(0o664)
    else:
        path.chmod(0o666)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_others_may_have_written_is_ignored_and_that_said_once(folder, monkeypatch, caplog, name) -> None:
    store("a.o", CONTENT)
    caching._warn.cache_clear()
    try:
        ELSEWHERE[name](folder, monkeypatch)
        assert [stored("a.o") for _ in range(3)] == [None] * 3
        with pytest.raises(caching.Distrusted):
            caching.read("a.o")
    finally:
        os.chmod(folder.parent, 0o700)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "fusion.caching"]
    assert "files of the cache are not used" in told and str(folder.parent) in told


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    store("a.o", CONTENT)
    os.replace(folder / "a.o", tmp_path / "b.o")
    (folder / "a.o").symlink_to(tmp_path / "b.o")
    assert stored("a.o") is None


def test_a_link_in_the_place_of_the_folder_is_looked_at_behind(folder, monkeypatch, tmp_path: Path) -> None:
    store("a.o", CONTENT)
    there = tmp_path / "there" / "fusion"
    there.parent.mkdir()
    os.replace(folder, there)
    folder.symlink_to(there)
    assert stored("a.o") == CONTENT
    there.parent.chmod(0o777)
    assert stored("a.o") is None


def test_a_pipe_in_the_place_of_a_file_does_not_wait_for_its_writer(folder: Path) -> None:
    store("b.o", CONTENT)
    os.mkfifo(folder / "a.o", 0o600)
    assert stored("a.o") is None


def test_nothing_is_exchanged_between_the_check_and_the_reading(folder, monkeypatch, tmp_path: Path) -> None:
    """Another folder takes the place of ours once ours was checked."""
    store("a.o", CONTENT)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.o").write_bytes((folder / "a.o").read_bytes()[:-1])
    check = caching._check

    def exchanging(handle, path, sticky=False):
        check(handle, path, sticky)
        if path == folder and not (tmp_path / "kept").exists():
            os.replace(folder, tmp_path / "kept")
            os.replace(other, folder)

    monkeypatch.setattr(caching, "_check", exchanging)
    assert stored("a.o") == CONTENT


def test_a_folder_for_all_in_which_nobody_replaces_what_is_not_theirs_will_do(folder: Path) -> None:
    """As the system's temporary directory."""
    store("a.o", CONTENT)
    folder.parent.chmod(0o1777)
    assert stored("a.o") == CONTENT
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_group_that_is_the_users_own_may_write(folder: Path, monkeypatch) -> None:
    """As with the mask 002, which systems that make a group for each user have."""
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.getpwuid(os.geteuid())
    store("a.o", CONTENT)
    folder.chmod(0o770)
    os.chown(folder, -1, user.pw_gid)
    own = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    for group, expected in (
        (own, CONTENT),
        (grp.struct_group((user.pw_name, "x", user.pw_gid, [user.pw_name, "another"])), None),
        (grp.struct_group(("staff", "x", user.pw_gid, [])), None),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        assert stored("a.o") == expected
    monkeypatch.setattr(grp, "getgrgid", lambda _: own)
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    assert stored("a.o") is None
