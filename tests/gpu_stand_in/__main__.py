"""Runs the tests of this folder on a GPU that is not there: `python -m tests.gpu_stand_in [options of pytest]`.

The interpreter's torch is a wheel for CUDA 13; `make test-gpu` has one. g++ builds runtime.cpp with the headers that
came with torch and Triton; preloaded, it takes the place of CUDA's own libraries.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SETTINGS = {
    "STAND_IN_DEVICES": "2",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # Inductor would time its kernels otherwise
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",  # which knows no PTX
}


def build(folder: Path) -> Path:
    """The library, under the driver's names."""
    (triton,) = importlib.util.find_spec("triton").submodule_search_locations  # pyright: ignore
    headers = [Path(triton).parent / "nvidia" / "cu13" / "include", Path(triton) / "backends" / "nvidia" / "include"]
    if missing := [path for path in headers if not path.exists()]:
        raise SystemExit(f"no headers of CUDA 13 at {missing[0]}: use a Python whose torch is a wheel for CUDA 13")
    library = folder / "libcuda.so.1"
    include = [f"-I{path}" for path in headers]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *include, HERE / "runtime.cpp", "-o", library]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        environment = os.environ | SETTINGS | {
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder,
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{folder}/cache"),
        }  # fmt: skip
        arguments = sys.argv[1:] or ["-q"]
        return subprocess.run([sys.executable, "-m", "pytest", HERE, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
