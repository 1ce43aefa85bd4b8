"""Times of products by MKL and oneDNN on this processor, measured once and stored, and the choice between them."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from fusion import caching
from fusion.caching import OncePerKey
from fusion.linear import products
from fusion.machine import cpu, machine
from fusion.torch_private import devices

log = logging.getLogger(__name__)

ROWS = (1, 8, 64, 256)
SIZES = ((64, 64), (256, 256), (384, 1024))
"""The products that are measured: m, and (k, n) by their product."""
MARGIN = 1.1
"""Factor by which oneDNN has to be faster."""
APPROXIMATIONS = ("none", "tanh")
"""GELU, with erf and with tanh, by torch's names."""
LEAST = 32
"""Least k and n of a product that goes to oneDNN; narrower ones are not measured."""
SECONDS = 0.9
"""The longest that a measurement takes: half of it by the clock, and on a busy machine half of it of a processor."""
ALIKE, ENOUGH = 1.25, 3
"""A time counts once so many runs took at most that many times the shortest: on a busy machine few runs are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds of products by MKL and oneDNN, by rows and then by sizes, and of the copy of an element. In bfloat16,
    where torch's own products are oneDNN's, there are none.

    sweep: seconds per element of a pass that does little; apart: of passes with erf and sigmoid, which are what GELU
    after a product takes; inside: what GELU with each of them adds to a product. turned: seconds per element of a
    weight in columns that it adds more: with GELU oneDNN may copy such a weight. threads: number of threads that ran
    them.
    """

    mkl: tuple[float, ...]
    onednn: tuple[float, ...]
    copy: float
    sweep: float
    apart: tuple[float, float]
    inside: tuple[float, float]
    turned: float
    threads: int

    def seconds(self, times: Sequence[float], m: int, k: int, n: int) -> float:
        """The time of a product, interpolated by the logarithms of m and k * n; proportional beyond the largest."""
        sizes = [a * b for a, b in SIZES]
        scale = max(1.0, m / ROWS[-1]) * max(1.0, k * n / sizes[-1])
        (row, above), (size, right) = _place(ROWS, m), _place(sizes, k * n)
        corners = [math.log(times[(row + a) * len(sizes) + size + b]) for a in (0, 1) for b in (0, 1)]
        low, high = (corners[a] * (1 - right) + corners[a + 1] * right for a in (0, 2))
        return scale * math.exp(low * (1 - above) + high * above)

    def onednn_pays(self, m: int, k: int, n: int, copied: int) -> bool:
        """Whether oneDNN is faster by the margin. copied: elements that are copied for it."""
        if min(k, n) < LEAST or not m or products.stays(m):
            return False
        width = products.width(k)
        own = k / width * self.seconds(self.onednn, m, width, n) + copied * self.copy
        return self.seconds(self.mkl, m, k, n) > MARGIN * own

    def gelu_pays(self, approximate: str, is_read_elementwise: bool, turned: float = 0.0) -> bool:
        """Whether GELU is faster in a product than after it, in a pass that there may be anyway. turned: elements of a
        weight in columns, for each element of the result."""
        which = APPROXIMATIONS.index(approximate)
        inside = self.inside[which] + turned * self.turned
        return MARGIN * inside < self.apart[which] - is_read_elementwise * self.sweep

    @property
    def ever_pays(self) -> bool:
        """Whether oneDNN is faster for some of the measured products, or GELU in one where there are none."""
        if not self.mkl:
            return any(self.gelu_pays(approximate, False) for approximate in APPROXIMATIONS)
        return any(self.onednn_pays(*sizes, 0) for sizes in _measured())

    def rates(self) -> tuple[float, float]:
        """flop/s of MKL and oneDNN in the largest measured product."""
        flops = 2 * ROWS[-1] * math.prod(SIZES[-1])
        return flops / self.mkl[-1], flops / self.onednn[-1]

    def __str__(self) -> str:
        mkl, own = (f"{rate / 1e9:.0f}" for rate in self.rates())
        return f"oneDNN {own} GFLOP/s, MKL {mkl}" + (", measured with one thread" if self.threads == 1 else "")


_ONES = (1.0,) * (len(ROWS) * len(SIZES))
UNKNOWN = Speeds(
    mkl=_ONES, onednn=_ONES, copy=1.0, sweep=1.0, apart=(1.0, 1.0), inside=(1.0, 1.0), turned=1.0, threads=0
)
"""Speeds in a dtype that oneDNN does not have here: nothing pays."""


def _place(grid: Sequence[int], at: int) -> tuple[int, float]:
    """Interval of a grid that a number lies in, and its position in it, by logarithms."""
    at = min(max(at, grid[0]), grid[-1])
    low = max(0, next(i for i, value in enumerate(grid) if value >= at) - 1)
    return low, math.log(at / grid[low]) / math.log(grid[low + 1] / grid[low])


@functools.lru_cache(65536)
def onednn_pays(m: int, k: int, n: int, copied: int, threads: int) -> bool:
    """Whether a product in float32 goes to oneDNN; measured if that was never done for this number of threads."""
    return of_threads(threads).onednn_pays(m, k, n, copied)


known = OncePerKey()
"""The speeds that this process has asked for, by the number of threads and the dtype."""


def of_threads(threads: int, dtype: torch.dtype = torch.float32) -> Speeds:
    """Speeds of this machine with a number of threads, which must be that of this thread."""
    return known.get_or_make((threads, dtype), functools.partial(_read_or_measured, threads, dtype))


def _read_or_measured(threads: int, dtype: torch.dtype) -> Speeds:
    if not devices.onednn_has(dtype):
        return UNKNOWN
    name = _name(threads, dtype)
    if (content := caching.stored(name)) is not None:
        result: dict[str, Any] = json.loads(content)
        tuples: dict[str, Any] = {key: tuple(value) for key, value in result.items() if isinstance(value, list)}
        return Speeds(**result | tuples)
    started = time.perf_counter()
    speeds = measured(SECONDS / 2, dtype) or _measured_by_one_thread(dtype)
    log.info("measured products in %.2f s: %s", time.perf_counter() - started, asdict(speeds))
    caching.store(name, json.dumps(asdict(speeds)).encode())
    return speeds


def _measured_by_one_thread(dtype: torch.dtype) -> Speeds:
    """Speeds on a machine that is so busy that several threads wait for each other: the ratio of the libraries is the
    same there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speeds = measured(SECONDS / 2, dtype, alone=True)
    finally:
        torch.set_num_threads(threads)
    assert speeds is not None
    return speeds


_SWITCHES = ("MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_")


def _name(threads: int, dtype: torch.dtype) -> str:
    """File name of the speeds, with everything that they depend on."""
    switches = sorted(item for item in os.environ.items() if item[0].startswith(_SWITCHES))
    host = machine()
    facts = [cpu.identity(), host.name, sorted(host.isa), host.cores, threads, str(dtype), torch.__version__]
    form = [field.name for field in fields(Speeds)], ROWS, SIZES, products.CHAIN, "sigmoid"
    key = json.dumps([*facts, switches, *form, caching.tag()])
    return f"products_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def measured(seconds: float, dtype: torch.dtype = torch.float32, alone: bool = False) -> Speeds | None:
    """Speeds measured now, with the threads of this thread; None where runs are disturbed all the time. alone: this is
    the only thread, so that its processor time counts, on which other programs have no influence."""
    taken: list[list[float]] = []
    clock = time.thread_time if alone and os.name != "nt" else time.perf_counter  # Windows counts in ticks of 16 ms
    deadline = clock() + seconds
    with products.plainly():
        contests = [_passes(dtype), _gelus(dtype), _gelus(dtype, APPROXIMATIONS[:1], in_columns=True)]
        contests += [_product(*sizes) for sizes in _measured() if dtype is torch.float32]
        for number, functions in enumerate(contests):
            now = clock()
            times, alike = _shortest(functions, clock, now + (deadline - now) / (len(contests) - number))
            if not alike and not alone:
                return None
            taken.append(times)
    (copy, sweep, *apart), (plain, *within), (columns, gelu), *times = taken
    mkl, own = zip(*times, strict=True) if times else ((), ())
    per_element = 1 / (ROWS[-1] * SIZES[-1][1])
    return Speeds(
        mkl=mkl, onednn=own, copy=copy * per_element, sweep=sweep * per_element,
        apart=(apart[0] * per_element, apart[1] * per_element), threads=torch.get_num_threads(),
        inside=((within[0] - plain) * per_element, (within[1] - plain) * per_element),
        turned=max(0.0, gelu - columns - (within[0] - plain)) / math.prod(SIZES[-1]),
    )  # fmt: skip


def _measured() -> Iterator[tuple[int, int, int]]:
    """Sizes of the products that are measured."""
    return ((m, k, n) for m in ROWS for k, n in SIZES)


Call = Callable[[], object]


def _matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, columns), 0.5, dtype=dtype, device="cpu")


def _product(m: int, k: int, n: int) -> list[Call]:
    """A product by MKL as Inductor calls it, and by oneDNN."""
    x, w, bias, out = _matrix(m, k), _matrix(n, k), _matrix(1, n)[0], _matrix(m, n)
    return [lambda: torch.addmm(bias, x, w.t(), out=out), lambda: torch.ops.fusion.linear(x, w, bias, "", True)]


def _passes(dtype: torch.dtype) -> list[Call]:
    """Passes over as many elements as the largest product has: a copy, one that does little, and one with each of the
    functions of GELU, which is computed with a sigmoid for tanh."""
    x, out = _matrix(SIZES[-1][1], ROWS[-1], dtype), _matrix(SIZES[-1][1], ROWS[-1], dtype)
    functions = (torch.neg, torch.erf, torch.sigmoid)
    return [x.t().contiguous, *(functools.partial(function, x, out=out) for function in functions)]


def _gelus(dtype: torch.dtype, approximations: Sequence[str] = APPROXIMATIONS, in_columns: bool = False) -> list[Call]:
    """The largest product, without and with each GELU inside. in_columns: its weight is stored so."""
    k, n = SIZES[-1]
    x, w = _matrix(ROWS[-1], k, dtype), _matrix(k, n, dtype).t() if in_columns else _matrix(n, k, dtype)
    return [functools.partial(torch.ops.fusion.linear, x, w, None, gelu, True) for gelu in ("", *approximations)]


def _shortest(functions: list[Call], clock: Callable[[], float], deadline: float) -> tuple[list[float], bool]:
    """The shortest times of functions, called in turns until enough runs of all come near them, or the deadline; and
    whether they did."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    while not (alike := all(map(_settled, times))) and not (times[0] and clock() > deadline):
        for function, taken in zip(functions, times, strict=True):
            start = clock()
            function()
            taken.append(clock() - start)
    return [min(taken) for taken in times], alike


def _settled(times: list[float]) -> bool:
    return len(times) >= 2 * ENOUGH and sorted(times)[ENOUGH - 1] <= ALIKE * min(times)
