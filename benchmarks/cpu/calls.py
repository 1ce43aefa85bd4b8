"""What a call of a compiled attention costs, step by step: one query over 64 keys of one head, of which the kernel has
little to do.

    python -m benchmarks.cpu.calls

Times in microseconds, of turns in which every step runs 500 times (least and median), and of single calls after as much
other data was read as a layer of a small model has weights: what a model sees, whose calls find nothing in the caches
(median). Steps contain those below them.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from fusion.codegen.cpu import calling, launch
from fusion.codegen.cpu.calling import ThreadMemory, memory
from fusion.runtime import kernels
from fusion.runtime.specialized import specialized_attention

CALLS, TURNS, SINGLE = 500, 40, 300
WEIGHTS = 1 << 24  # bytes


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT / 8, -1) @ v


def steps() -> dict[str, Callable[[], object]]:
    """A call of each step."""
    q, k, v = operands = [torch.randn(1, 1, rows, 64) for rows in (1, 64, 64)]
    run = torch.compile(attend, backend="fusion", dynamic=False, options={"emitter": "mlir"})  # so few keys else stay
    other = torch.compile(lambda q, k, v: q + 1, dynamic=False)
    run(q, k, v)
    ((spec, device, request), guarded), sizes = next(iter(kernels._forward.items())), [1, 1, 1, 64]
    bound, kernel = specialized_attention(spec, device, request), guarded.kernel
    start, shape, strides = next(iter(kernel._calls.values()))
    out = calling.empty_strided(shape, strides, torch.float32)
    (variant,), before, apart = kernel._variants.values(), memory.own, ThreadMemory()
    memory.own = apart
    addresses = [x.data_ptr() for x in (*operands, out)]
    start(addresses)
    memory.own = before
    code = variant.function.on(1)

    def key() -> None:
        kernel._calls.get((torch.get_num_threads(), *sizes, *map(launch.stride, operands)))

    def work() -> None:
        apart.counters[:] = calling.COUNTERS
        code(apart.packed)

    return {
        "the compiled function": lambda: run(q, k, v),
        "a compiled q + 1, for comparison": lambda: other(q, k, v),
        "the operator, which Inductor's code would call": lambda: torch.ops.fusion.attention_below_autograd.default(
            operands, sizes, spec, request
        ),
        "the bound function, which it calls": lambda: bound(operands, sizes),
        "the kernel object": lambda: kernel(operands, sizes),
        "  finding what was derived for these sizes and strides": key,
        "  the output tensor": lambda: calling.empty_strided(shape, strides, torch.float32),
        "  the rest: workspace, parameters, machine code and its work": lambda: start(
            (*map(calling.address, operands), calling.address(out))
        ),
        "    machine code and its work": work,
    }


def timed(call: Callable[[], object], times: int) -> float:
    """Microseconds of a call, of so many in a row."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    calls, weights = steps(), torch.ones(WEIGHTS // 4)
    gc.disable()
    turns = [[timed(call, CALLS) for call in calls.values()] for _ in range(TURNS)]
    singles = []
    for _ in range(SINGLE):
        singles.append([])
        for call in calls.values():
            weights.sum()
            singles[-1].append(timed(call, 1))
    print(" least median single")
    for name, times, single in zip(calls, zip(*turns, strict=True), zip(*singles, strict=True), strict=True):
        print(f"{min(times):6.2f} {statistics.median(times):6.2f} {statistics.median(single):6.2f}  {name}")


if __name__ == "__main__":
    main()
