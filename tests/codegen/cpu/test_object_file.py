"""Objects that are refused, with the reason; `test_compile` runs those that are loaded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import machine_code
from fusion.machine import object_file
from fusion.machine.object_file import ObjectFileError, load
from tests.codegen.cpu.test_machine_code import VARIABLE, text

pytestmark = pytest.mark.skipif(not object_file.loadable(), reason="objects are loaded on x86-64 Linux alone")


def object_of(source: str, path: Path) -> bytes:
    """What LLVM makes of a text."""
    machine_code._engine(source).dump_to_object_file(str(path))
    return path.read_bytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return object_of(text(), tmp_path_factory.mktemp("object") / "good.o")


def changed(content: bytes, offset: int, form: str, value: int) -> bytes:
    copy = bytearray(content)
    struct.pack_into(form, copy, offset, value)
    return bytes(copy)


def other_relocations(content: bytes) -> bytes:
    """The first relocation is of a kind that we do not know: 10, 32 bits."""
    section = next(s for s in object_file._sections(content) if s.kind == 4)
    (info,) = struct.unpack_from("<Q", content, section.offset + 8)
    return changed(content, section.offset + 8, "<Q", info >> 32 << 32 | 10)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"MZ" + content[2:], "not an object of x86-64"),
        (lambda content: changed(content, 18, "<H", 183), "not an object of x86-64"),
        (lambda content: changed(content, 16, "<H", 3), "not an object of x86-64"),
        (lambda content: b"", "the object cannot be loaded"),
        (lambda content: content[:-100], "the object cannot be loaded"),
        (
            lambda content: changed(content, 40, "<Q", len(content) - 64) + bytes(640),
            "an object that is cut off|cannot",
        ),
        (other_relocations, "an object with relocations of kind 10"),
    ],
)
def test_what_is_no_object_of_a_kernel_is_refused(good: bytes, damage: Callable, message: str) -> None:
    assert "_mlir_f" in load(good, machine_code._function).addresses
    with pytest.raises(ObjectFileError, match=message):
        load(damage(good), machine_code._function)


def test_a_section_beyond_the_end_is_refused(good: bytes) -> None:
    (start,) = struct.unpack_from("<Q", good, 40)
    for number, section in enumerate(object_file._sections(good)):
        if section.kind == 1 and section.flags & 2 and section.size:
            with pytest.raises(ObjectFileError, match="an object that is cut off"):
                load(changed(good, start + 64 * number + 24, "<Q", len(good)), machine_code._function)


def test_variables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ObjectFileError, match="an object with variables"):
        load(object_of(VARIABLE, tmp_path / "variable.o"), machine_code._function)


def test_names_that_are_missing(good: bytes, tmp_path: Path) -> None:
    with pytest.raises(ObjectFileError, match="an object without the function _mlir_g"):
        machine_code._from_object(good, "g", "good.o")
    with pytest.raises(ObjectFileError, match="an object that calls nowhere, which is in no library"):
        machine_code._function("nowhere")
