"""Object files that LLVM wrote for x86-64 Linux, brought into memory without a linker.

A kernel is a few functions, constants, and calls of the C library. In LLVM's large code model, that of its
just-in-time compiler, each reference from one to another is an address of 64 bits: to load an object is to copy it and
to fill in the addresses. An object that holds anything else is refused.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_X86_64 = 62  # the machine, in the header
_SYMBOLS, _RELOCATIONS, _EMPTY, _UNWINDING = 2, 4, 8, 0x70000001  # kinds of sections
_WRITABLE, _IN_MEMORY, _CODE, _PER_THREAD = 0x1, 0x2, 0x4, 0x400  # flags of sections
_OUTSIDE, _FUNCTION = 0, 2  # in place of the section of a symbol; the kind of one
_RELATIVE = {1: False, 24: True}  # kinds of relocations, of 64 bits: whether to the place that is filled in

PERF_MAP = "/tmp/perf-{}.map"
"""The file of a process, by a rule of `perf`'s. It stays behind."""


class ObjectFileError(ValueError):
    """An object that cannot be brought into memory this way."""


class LoadedObject(NamedTuple):
    """memory: where the object lies; it must outlive every call. addresses: of its functions, by name; sizes: bytes of
    their code."""

    memory: mmap.mmap
    addresses: dict[str, int]
    sizes: dict[str, int]

    def write_perf_map(self, name: str) -> None:
        """Append the functions, of an object of this name, to the file in which `perf` looks for names of code that no
        file has. Raises OSError."""
        path, flags = PERF_MAP.format(os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "w") as file:
            for symbol, size in self.sizes.items():
                file.write(f"{self.addresses[symbol]:x} {size:x} fusion {symbol} {name}\n")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: str
    kind: int
    section: int
    value: int
    size: int


@functools.cache
def loadable() -> bool:
    """Whether objects can be loaded on this platform."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def load(content: bytes, find: Callable[[str], int]) -> LoadedObject:
    """Bring an object into memory. find: name of a function that is not in it -> its address, or ObjectFileError.
    Raises ObjectFileError."""
    try:
        return _load(content, find)
    except ObjectFileError:
        raise
    except (struct.error, LookupError, ValueError, OSError) as problem:
        raise ObjectFileError(f"the object cannot be loaded: {problem}") from problem


def _load(content: bytes, find: Callable[[str], int]) -> LoadedObject:
    sections = _sections(content)
    symbols = list(_symbols(content, sections))
    places, code, size = _layout(sections)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    addresses = {}
    for number, symbol in enumerate(symbols):
        if symbol.section in places:
            addresses[number] = base + places[symbol.section] + symbol.value
        elif symbol.section == _OUTSIDE and symbol.name:
            addresses[number] = find(symbol.name)
    for number, place in places.items():
        memory[place : place + sections[number].size] = _bytes(content, sections[number])
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in places:
            _fill_in(memory, base, places[section.info], _bytes(content, section), addresses)
    _protect(base, code, mmap.PROT_READ | mmap.PROT_EXEC)
    _protect(base + code, size - code, mmap.PROT_READ)
    sizes = {symbol.name: symbol.size for symbol in symbols if symbol.kind == _FUNCTION and symbol.size}
    return LoadedObject(memory, {symbols[number].name: address for number, address in addresses.items()}, sizes)


def _sections(content: bytes) -> list[_Section]:
    identity, kind, machine = struct.unpack_from("<16sHH", content)
    if identity[:6] != b"\x7fELF\x02\x01" or kind != 1 or machine != _X86_64:
        raise ObjectFileError("not an object of x86-64")
    (start,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    return [_Section(*struct.unpack_from("<IIQQQQIIQQ", content, start + size * number)) for number in range(count)]


def _bytes(content: bytes, section: _Section) -> bytes:
    result = content[section.offset : section.offset + section.size]
    if len(result) != section.size:
        raise ObjectFileError("an object that is cut off")
    return result


def _symbols(content: bytes, sections: Sequence[_Section]) -> Iterator[_Symbol]:
    for table in sections:
        if table.kind == _SYMBOLS:
            names = _bytes(content, sections[table.link])
            for name, kind, _, section, value, size in struct.iter_unpack("<IBBHQQ", _bytes(content, table)):
                yield _Symbol(names[name : names.index(0, name)].decode(), kind & 0xF, section, value, size)


def _layout(sections: Sequence[_Section]) -> tuple[dict[int, int], int, int]:
    """Layout of an object in memory: the offset of each section by its number, the bytes of the code, which comes
    first, and the bytes of everything. Both sizes are whole pages. Tables for unwinding frames are left out: nothing
    is thrown through a kernel."""
    kept = {n: s for n, s in enumerate(sections) if s.flags & _IN_MEMORY and s.kind != _UNWINDING}
    places, ends = {}, [0]
    for code in (_CODE, 0):
        end = ends[-1]
        for number, section in kept.items():
            if section.flags & (_WRITABLE | _PER_THREAD) or section.kind == _EMPTY:
                raise ObjectFileError("an object with variables")
            if section.flags & _CODE == code:
                places[number] = end + -end % max(section.alignment, 1)
                end = places[number] + section.size
        ends.append(end + -end % mmap.PAGESIZE)
    return places, ends[1], ends[2]


def _fill_in(memory: mmap.mmap, base: int, place: int, relocations: bytes, addresses: dict[int, int]) -> None:
    """Write the addresses of symbols, by number, where the section at `place` refers to them."""
    for offset, info, addend in struct.iter_unpack("<QQq", relocations):
        if (relative := _RELATIVE.get(info & 0xFFFFFFFF)) is None:
            raise ObjectFileError(f"an object with relocations of kind {info & 0xFFFFFFFF}")
        value = addresses[info >> 32] + addend - relative * (base + place + offset)
        struct.pack_into("<Q", memory, place + offset, value % (1 << 64))


def _protect(address: int, size: int, mode: int) -> None:
    if size and ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
