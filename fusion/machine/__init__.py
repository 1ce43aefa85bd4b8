"""Facts about processors, stated once: `processors` says what is known of one, `cpu` and `gpus` have the facts."""

from fusion.machine.find import machine
from fusion.machine.gpus import INTERPRETER, NAMED, of_device, of_target
from fusion.machine.memory import GIB, KIB, MIB, MemoryLevel
from fusion.machine.processors import Machine, dtype_bytes, dtype_name, with_cores

__all__ = [
    "GIB", "INTERPRETER", "KIB", "MIB", "NAMED", "Machine", "MemoryLevel", "dtype_bytes", "dtype_name", "machine",
    "of_device", "of_target", "with_cores",
]  # fmt: skip
