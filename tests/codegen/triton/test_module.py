"""The text of a module is what runs, whatever its file holds."""

import linecache

import pytest

from fusion import disk_cache
from fusion.codegen.triton import module

TEXT = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    pass\n\n\nVALUE = 1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return disk_cache.directory()


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
