"""Decoding kernels alone, without a compiled function around them, beside a loop that reads K and V and does nothing
else, and beside the memory's bandwidth.

    python -m benchmarks.cpu.decode_kernels

Least and median times in microseconds of turns, each after running untimed; shares are those of the medians. Calls
repeat: keys and values that fit a cache come from there, as in a model of one layer, and may come faster than memory.
"""

import statistics
import time

import torch

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import peak
from benchmarks.common.rows import decode
from fusion.runtime import kernels

TURNS, SETTLE, SAMPLES = 20, 3e-3, 10
CELLS = [  # query heads, key heads, keys
    (1, 1, 16384), (1, 1, 65536), (2, 2, 16384), (4, 4, 8192), (8, 8, 16384), (4, 1, 16384), (8, 2, 16384),
    (32, 8, 2048), (8, 8, 65536), (32, 8, 65536),
]  # fmt: skip
FAR = 2**29
"""Bytes that no cache holds."""


def bandwidth() -> float:
    """Bytes a second at which memory is read."""
    read = peak.reading([torch.ones(FAR // 4)], torch.get_num_threads())
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return FAR / statistics.median(times)


def measure(heads: int, kv_heads: int, keys: int, dtype: torch.dtype, memory: float) -> str:
    """A line of the table; head dimension 64. memory: bytes a second."""
    torch._dynamo.reset()
    kernels.forget()
    operands = [torch.randn(1, h, n, 64).to(dtype) for h, n in ((heads, 1), (kv_heads, keys), (kv_heads, keys))]
    torch.compile(decode, backend="fusion", dynamic=False)(*operands)
    (run,) = kernels._forward.values()
    sizes = list(next(reversed(run.kernel._calls))[1 : 1 + len(run.spec.sizes)])
    calls = {"kernel": lambda: run(operands, sizes), "reading": peak.reading(operands[1:], torch.get_num_threads())}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            ready = time.perf_counter() + SETTLE
            while time.perf_counter() < ready:
                call()
            for _ in range(SAMPLES):
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e6)
    found = {name: statistics.median(samples) for name, samples in times.items()}
    told = "  ".join(f"{name} {min(samples):7.1f} {found[name]:7.1f}" for name, samples in times.items())
    choice = run.kernel.choice(sizes)
    what = f"{heads}/{kv_heads} heads, {keys} keys, {str(dtype).removeprefix('torch.')}, {choice.splits} parts"
    rate = sum(x.nbytes for x in operands[1:]) / found["kernel"] * 1e6
    return f"{what:45} {told}  {found['reading'] / found['kernel']:.0%} of reading, {rate / memory:.0%} of memory"


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    memory = bandwidth()
    print(f"memory: {memory / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for cell in CELLS:
            print(measure(*cell, dtype, memory), flush=True)


if __name__ == "__main__":
    main()
