"""One attention variant at one size on a GPU: its competitors, their times in turns, and the plan's predicted time."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fusion
from benchmarks.common.rows import GPU_ROWS, Problem, Row, flex_call, sdpa_call
from benchmarks.gpu.device import Device
from fusion.planning.plan import plan

log = logging.getLogger("benchmarks.gpu")
SDPA = ("flash", "cudnn", "efficient")
COMPILED = ("fusion", "flex")  # what takes long to compile and holds no score matrix
COMPETITORS = ("fusion", *(f"sdpa {kind}" for kind in SDPA), "sdpa math", "flex", "inductor")
MOST_SCORES = 1 << 32  # elements of a score matrix that a competitor may have to hold

Operands = tuple[Tensor, ...]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is measured: a row of `rows`, a direction, and sizes."""

    row: str
    direction: str
    B: int
    H: int
    N: int
    d: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.row} {self.direction} {self.B} x {self.H} x {self.N} x {self.d}"

    @property
    def definition(self) -> Row:
        return GPU_ROWS[self.row]

    @property
    def problem(self) -> Problem:
        return Problem(B=self.B, H=self.H, N=self.N, d=self.d, dtype=getattr(torch, self.dtype))

    @property
    def decoding(self) -> bool:
        return self.definition.queries is not None

    @property
    def scores(self) -> int:
        """Elements of the score matrix, live or not."""
        return self.B * self.H * (self.definition.queries or self.N) * self.N


@dataclass(slots=True, kw_only=True)
class Cell:
    """What came of a place. flop: of the products over live pairs; backward counts 2.5 times the forward's.
    bytes: q, k, v, extras and the output, once each.
    seconds: median on the device, by competitor.
    host: median until the host had queued the call.
    notes: why a competitor has no time.
    predicted: the plan's, s.
    """

    place: Place
    flop: float
    bytes: float
    seconds: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    predicted: float | None = None

    @property
    def best_peer(self) -> float | None:
        return min((s for name, s in self.seconds.items() if name != "fusion"), default=None)

    def ratio(self, *peers: str) -> float | None:
        """The best of these peers' times over fusion's: above 1, fusion is faster. None where one has no time."""
        theirs = [self.seconds[name] for name in peers if name in self.seconds]
        return min(theirs) / self.seconds["fusion"] if theirs and "fusion" in self.seconds else None


def brief(failure: Exception) -> str:
    """The class and the first lines of what was raised, of the cause where Dynamo wraps it; without `|`, which ends
    cells of tables. The traceback goes to the log."""
    log.error("%s", type(failure).__name__, exc_info=failure)
    failure = getattr(failure, "inner_exception", failure)
    text = " ".join(line.strip() for line in str(failure).splitlines() if line.strip())
    return f"{type(failure).__name__}: {text[:200]}".replace("|", "/")


def operands_of(place: Place, device: Device) -> Operands:
    """On the device; in a backward those whose gradients are wanted require one."""
    row = place.definition
    operands = place.problem.tensors(row, device=device.kind)
    if place.direction == "backward":
        trained = len(operands) if row.learned else 2 if row.latent else 3
        operands = tuple(x.requires_grad_(at < trained) for at, x in enumerate(operands))
    return operands


def competitors(place: Place, operands: Operands, device: Device) -> Iterator[tuple[str, Callable[[], Call | None]]]:
    """(name, maker of a call)."""
    row = place.definition

    def plainly(backend: str) -> Call:
        call = device.compiled(row.plain, backend)
        return lambda: call(*operands)

    yield "fusion", lambda: plainly("fusion")
    for kind in SDPA:
        yield f"sdpa {kind}", lambda kind=kind: sdpa(row, operands, kind)
    if place.scores <= MOST_SCORES:
        yield "sdpa math", lambda: sdpa(row, operands, "math")
    yield "flex", lambda: None if row.stored else flex_call(row, operands, compiled=not device.rehearsal)
    if place.scores <= MOST_SCORES:
        yield "inductor", lambda: plainly("inductor")


def sdpa(row: Row, operands: Operands, kind: str) -> Call | None:
    """A call of one kernel of `scaled_dot_product_attention`; None where it cannot say the variant."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
               "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}[kind]  # fmt: skip
    with torch.device(operands[0].device):
        call = sdpa_call(row, operands)
    if call is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def backward_of(call: Call, operands: Operands) -> Call:
    """The gradients of what requires one, of a call that is made here once."""
    out = call()
    assert isinstance(out, Tensor)
    grad = torch.randn_like(out)
    wanted = [x for x in operands if x.requires_grad]
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def prepare(cell: Cell, operands: Operands, device: Device, only: Collection[str] = COMPETITORS) -> dict[str, Call]:
    """The competitors that run, each called once; the others' reasons go into the cell's notes."""
    torch._dynamo.reset()  # once: what is compiled below must stay
    calls: dict[str, Call] = {}
    for name, make in competitors(cell.place, operands, device):
        if name not in only:
            continue
        if name in device.absent:
            cell.notes[name] = "needs a GPU"
            continue
        if name == "sdpa math" and any(f"sdpa {kind}" in calls for kind in SDPA):
            continue  # nobody's choice where a kernel takes it
        try:
            call = make()
            if call is None:
                cell.notes[name] = "cannot express it"
                continue
            if cell.place.direction == "backward":
                call = backward_of(call, operands)
            device.seconds(call)
            calls[name] = call
        except Exception as failure:  # a peer's failure is a result
            cell.notes[name] = brief(failure)
            device.free()
    return calls


def take_turns(cell: Cell, calls: dict[str, Call], device: Device, seconds: float) -> None:
    """Fill in the medians: every competitor runs once in each turn, the first turn is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    least, most = (2, 2) if device.rehearsal else (6, 200)
    stop, turn = time.monotonic() + seconds, 0
    while calls and (turn < least or time.monotonic() < stop) and turn < most:
        for name, call in calls.items():
            found[name].append(device.seconds(call))
        turn += 1
    for name, times in found.items():
        cell.seconds[name], cell.host[name] = map(statistics.median, zip(*times[1:], strict=True))


def measure(place: Place, device: Device, seconds: float = 0.3) -> Cell:
    """One cell; seconds: of timing, all competitors together."""
    operands = operands_of(place, device)
    row, problem = place.definition, place.problem
    output = place.B * place.H * (row.queries or place.N) * row.width(place.d)
    size = sum(x.numel() * x.element_size() for x in operands) + output * operands[0].element_size()
    cell = Cell(place=place, flop=row.flop(problem) * (2.5 if place.direction == "backward" else 1), bytes=size)
    with torch.no_grad() if place.direction == "forward" else contextlib.nullcontext():
        take_turns(cell, prepare(cell, operands, device), device, seconds)
    cell.predicted = predicted(place, operands, device)
    return cell


def predicted(place: Place, operands: Operands, device: Device) -> float | None:
    """The plan's time on this device, s; None where the device is not known, the plan fails, or for gradients."""
    if device.machine is None or place.direction == "backward":
        return None
    try:
        torch._dynamo.reset()
        site = fusion.explain(place.definition.plain, *operands).sites[0]
        return plan(site.specs[0], device.machine, sizes=site.sizes[0]).time
    except Exception:  # a missing prediction must not stop a measurement
        return None
