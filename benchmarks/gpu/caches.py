"""What was compiled on a device's machine, taken home and brought back: a folder of files of a few MiB each.

Every process of benchmarks/gpu keeps what torch, Triton and fusion compile in one folder of one name, since torch's
files are found again only where they were.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PIECE = 15 << 20  # bytes of a file
MOST = 45 << 20  # bytes of all files; what was not used for the longest time is left behind
TEXTS = (".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn", ".source")  # of Triton's kernels, which run without them


def folder() -> Path:
    """Where everything is kept that this run compiles; the environment of this process and its children says so."""
    place = Path(
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "fusion-gpu-caches")))
    )
    os.environ.setdefault("TRITON_CACHE_DIR", str(place / "triton"))
    place.mkdir(parents=True, exist_ok=True)
    return place


def bring(pieces: Path) -> int:
    """Unpack what `take` packed into `pieces`, beside what is there; the number of files."""
    whole = b"".join(path.read_bytes() for path in sorted(pieces.glob("caches-*.part")))
    if not whole:
        return 0
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        known: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4, 3.10.12
        archive.extractall(folder(), **known)
        return len(archive.getnames())


def take(pieces: Path) -> int:
    """Pack the caches into `pieces`, in place of what it holds; the number of files."""
    kept = folder()
    files = [path for path in kept.rglob("*") if path.is_file() and path.suffix not in TEXTS]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=4) as archive:
        count = 0
        for path in sorted(files, key=lambda path: -path.stat().st_mtime):
            if packed.tell() > MOST:
                break
            archive.add(path, path.relative_to(kept))
            count += 1
    pieces.mkdir(parents=True, exist_ok=True)
    for old in pieces.glob("caches-*.part"):
        old.unlink()
    for at, start in enumerate(range(0, len(whole := packed.getvalue()), PIECE)):
        (pieces / f"caches-{at:02}.part").write_bytes(whole[start : start + PIECE])
    return count
