"""The text of a module is what runs, whatever its file holds."""

import linecache

import pytest
import torch

from benchmarks.offline.absent import absent, meta
from fusion import caching
from fusion.codegen.triton import launch, module
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.machine import of_target
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import case

TEXT = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    pass\n\n\nVALUE = 1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return caching.directory()


def test_the_file_is_for_people(folder):
    loaded = module.load(TEXT)
    (path,) = folder.iterdir()
    assert path.read_text() == TEXT and loaded.__file__ == str(path) and loaded.VALUE == 1
    path.write_text("raise SystemExit\n")
    again = module.load(TEXT)
    assert again.VALUE == 1 and path.read_text() == TEXT
    assert not [*folder.rglob("*.pyc")], "bytecode would be run unseen"


def test_what_triton_compiles_is_the_text(folder):
    loaded = module.load(TEXT)
    (path,) = folder.iterdir()
    path.write_text(TEXT.replace("pass", "raise SystemExit"))
    linecache.checkcache()
    assert "pass" in loaded.kernel.src and "pass" in module.load(TEXT).kernel.src


def test_a_folder_that_others_may_write_to_is_left_alone(folder):
    folder.chmod(0o777)
    loaded = module.load(TEXT)
    assert loaded.VALUE == 1 and "pass" in loaded.kernel.src and not [*folder.iterdir()]


@pytest.fixture
def precision():
    """torch's settings of the precision of float32 products on GPUs, which are restored."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def test_any_setting_of_torch_allows_tf32(precision):
    assert launch.precision("float32") == "ieee"
    precision.fp32_precision = "tf32"
    assert launch.precision("float32") == "tf32" and launch.precision("bfloat16") == "ieee"
    precision.fp32_precision = "ieee"
    assert launch.precision("float32") == "ieee"
    torch.set_float32_matmul_precision("high")
    assert launch.precision("float32") == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert launch.precision("float32") == "ieee"


def test_no_launch_contracts_products_with_sums():
    """A score is the same number wherever it is computed: in the maximum, in a weight and in the backward."""
    spec = case("causal", "float32", 16).spec
    tile = Tile(rows=16, keys=16, warps=4, stages=1)
    q, k, v = (meta(torch.empty(1, 1, 64, 16)) for _ in range(3))
    with absent(of_target("sm_80")) as launches:
        for splits in (1, 2):
            Kernel(spec, tile, splits=splits)([q, k, v], [1, 1, 64, 64])
        run = Differentiable(spec, tile)
        out, statistics = run.outputs([q, k, v], [1, 1, 64, 64])
        run.backward(out, out, statistics, [q, k, v], [1, 1, 64, 64], (True,) * 3)
    assert len({kernel.metadata.name for kernel in launches.kernels}) >= 5
    assert not any(kernel.metadata.enable_fp_fusion for kernel in launches.kernels)
