"""Facts about processors, stated once: see `fusion.machine.processors`."""

from fusion.machine.processors import (
    GIB,
    KIB,
    MIB,
    NAMED,
    Machine,
    MemoryLevel,
    dtype_bytes,
    dtype_name,
    machine,
    with_cores,
)

__all__ = [
    "GIB", "KIB", "MIB", "NAMED", "Machine", "MemoryLevel", "dtype_bytes", "dtype_name", "machine", "with_cores"
]  # fmt: skip
