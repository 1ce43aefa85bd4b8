"""What runs beside AMX tile products: a loop of four of them with n vector instructions of one kind behind each, all
between registers.

    python -m benchmarks.cpu.tile_unit

Prints cycles per product, where a product alone takes 16: `max(16, n)` says that one unit of two takes the
instructions, `max(16, n / 2)` that both do.
"""

import ctypes
import time
from collections.abc import Callable

import numpy

from fusion.codegen.mlir.builder import PTR, Builder, Value
from fusion.codegen.mlir.compile import compile_text
from fusion.codegen.mlir.x86 import F32, WORDS, TileUnit
from fusion.machine import Machine

COUNTS = (0, 8, 16, 24, 32, 48)
ACCUMULATORS, PRODUCTS, TRIPS = 24, 4, 20_000
CYCLES = 16  # of one product, which the clock is taken from
KINDS: dict[str, tuple[str, Callable[[Builder, Value, Value], Value]]] = {
    "float multiply-adds": (F32, lambda b, x, y: b.fma(y, 0.5, x)),
    "integer additions": (WORDS, lambda b, x, y: b.add(x, y)),
}


def loop(kind: str, count: int) -> Callable[[], None]:
    """The loop, compiled."""
    type_, write = KINDS[kind]
    b = Builder()
    memory = Value("%memory", PTR)
    unit = TileUnit(b)
    start = [b.load(b.at(memory, 1024 + 64 * n, "i8"), type_) for n in range(ACCUMULATORS)]
    left, right = unit.load(memory, "left"), unit.load(memory, "right")
    sums = [unit.load(memory, "sum") for _ in range(PRODUCTS)]
    with b.carry(0, TRIPS, 1, [*sums, *start]) as (body, _, values):
        tiles, vectors, done = list(values[:PRODUCTS]), list(values[PRODUCTS:]), 0
        for n in range(PRODUCTS):
            tiles[n] = unit.product(left, right, tiles[n])
            for _ in range(count):
                at = done % ACCUMULATORS
                vectors[at] = write(b, vectors[at], vectors[(at + 1) % ACCUMULATORS])
                done += 1
        body.yields(*tiles, *vectors)
    for n, value in enumerate(body.results):
        if n < PRODUCTS:
            unit.store(value, memory)
        else:
            b.store(value, b.at(memory, 1024 + 64 * (n - PRODUCTS), "i8"))
    code = compile_text(f"module {{\nfunc.func @f(%memory: {PTR}) {{\n{b.text()}\n  return\n}}\n}}\n", "f")
    space = numpy.zeros(16384, numpy.uint8)
    address = ctypes.c_void_p(space.ctypes.data)
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
    return lambda kept=(space, code): run(ctypes.addressof(packed))


def seconds(run: Callable[[], None]) -> float:
    """The least of several calls, per product."""
    found = []
    for _ in range(30):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found) / TRIPS / PRODUCTS


def main() -> None:
    machine = Machine.detect()
    if "amx_bf16" not in machine.isa:
        raise SystemExit(f"{machine.name} has no AMX tiles")
    print(f"{machine.name}; cycles per tile product\n")
    print(f"| beside each product | {' | '.join(map(str, COUNTS))} |\n|---|{'---:|' * len(COUNTS)}")
    for kind in KINDS:
        alone = seconds(loop(kind, 0))
        cycles = [CYCLES * seconds(loop(kind, count)) / alone for count in COUNTS]
        print(f"| {kind} | {' | '.join(f'{x:.1f}' for x in cycles)} |", flush=True)


if __name__ == "__main__":
    main()
