"""Random attentions whose calls can be cut: the rows of a call computed with others, or alone, or with more keys in
memory, on any number of threads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import AttentionSpec, Normalizer, integers
from fusion.ir.expr import Expr, I, J, const, loads, size, substitute
from fusion.ir.ops import apply, where
from fusion.lowering.backward_plan import unsupported
from fusion.machine import Machine
from fusion.passes.specify.masks import understand
from fusion.planning.cpu_planner import CpuPlanner
from fusion.planning.register_tiles import target_for, tilings_for
from tests.fuzz import specs

NEWER = {"avx2": ("avx512", "amx"), "avx512": ("avx512_bf16", "amx"), "pairs": ("amx",)}
"""Instruction sets, and how the names of those begin that are left out for each."""
FIRST, ROWS, LIVE = map(size, ("First", "Rows", "Live"))
"""Sizes of a call: the number of its first row, of all rows that there are, and of the live keys."""


def machine_with(name: str) -> Machine:
    """This machine, with nothing newer than an instruction set."""
    here = Machine.detect()
    return replace(here, isa=frozenset(isa for isa in here.isa if not isa.startswith(NEWER[name])))


def divisible(spec: AttentionSpec) -> AttentionSpec:
    """The spec of calls with some of the rows, from number `First` on, and more keys than are live."""
    moved: dict[Expr, Expr] = {I: integers.add(I, FIRST), specs.NQ: ROWS, specs.NK: LIVE}
    change = lambda expr: substitute(expr, moved)
    score = where(apply("ilt", J, LIVE), change(spec.score), const(float("-inf")))
    if spec.normalizer is Normalizer.NONE:
        score = where(apply("ilt", J, LIVE), change(spec.score), const(0.0))
    return replace(
        spec, sizes=(*spec.sizes, "First", "Rows", "Live"), score=score, mask=understand(score, spec.normalizer),
        weight=change(spec.weight), sinks=tuple(map(change, spec.sinks)), q=spec.q,
        row_scale=spec.row_scale and change(spec.row_scale),
        aux_outputs=tuple(replace(aux, value=change(aux.value)) for aux in spec.aux_outputs),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call: batch elements and rows of those that there are, padded keys, threads."""

    batch: tuple[int, int]
    rows: tuple[int, int]
    padded: int
    threads: int


class Problem:
    """A spec, and the operands and sizes of the call of all rows, with as many keys again as are live."""

    def __init__(self, drawn: specs.Drawn, rng: random.Random, n_q: int, n_k: int, batch: int = 3, kv: int = 2):
        self.spec = divisible(drawn.spec)
        self.paged = drawn.paged
        heads = kv * drawn.group
        self.batch, self.n_q, self.n_k, self.heads = batch, n_q, n_k, heads
        n = {"B": batch, "H": heads, "Nq": n_q, "Nk": 2 * n_k}
        d, d_v = drawn.spec.d.integer, drawn.spec.d_v.integer
        shapes = ((heads, n_q, d), (kv, 2 * n_k, d), (kv, 2 * n_k, d_v))
        qkv = [torch.randn(batch, *shape).mul(rng.choice([1.0, 3.0])) for shape in shapes]
        for number in (0, 1, 2):
            if number in drawn.paged:
                pages = batch * -(-n["Nk"] // specs.PAGE)
                qkv[number] = torch.randn(pages, kv, specs.PAGE, qkv[number].shape[-1])
            own = drawn.spec.operands[number].torch_dtype
            whole = not own.is_floating_point
            ends = (torch.iinfo(own).min, torch.iinfo(own).max + 1) if whole else (0, 1)
            qkv[number] = torch.randint(*ends, qkv[number].shape, dtype=own) if whole else qkv[number].to(own)
        self.operands = [*qkv, *(make(n) for make in drawn.extras)]
        self.places = {
            (part.operand, dim): index
            for part in loads(*self.spec.expressions()) for dim, index in enumerate(part.args)
        }  # fmt: skip
        for number, access in enumerate((self.spec.q, self.spec.k, self.spec.v)):
            self.places |= {(number, dim): index for dim, index in enumerate(access)}

    def given(self, call: Call) -> tuple[list[torch.Tensor], list[int]]:
        """Operands and sizes of a call."""
        (low, high), (first, last), keys = call.batch, call.rows, self.n_k + call.padded
        operands = list(self.operands)
        for (number, dim), index in self.places.items():
            if index is specs.B0:
                operands[number] = operands[number].narrow(dim, low, high - low)
            elif index is J:
                operands[number] = operands[number].narrow(dim, 0, keys)
            elif index is I and number == 0:
                operands[number] = operands[number].narrow(dim, first, last - first)
        sizes = [high - low, self.heads, last - first, keys, first, self.n_q, self.n_k]
        return operands, sizes

    @property
    def whole(self) -> Call:
        """The call of all rows, on one thread."""
        return Call(batch=(0, self.batch), rows=(0, self.n_q), padded=0, threads=1)

    def calls(self, rng: random.Random, count: int) -> Iterator[Call]:
        """Calls of part of the rows, in part of the batch."""
        for _ in range(count):
            low = rng.randrange(self.batch)
            length = min(self.n_q, rng.choice([1, 1, 2, 3, 5, 8, 9, 17, 33, 64, 100, self.n_q]))
            first = rng.randrange(self.n_q - length + 1)
            yield Call(
                batch=(low, rng.randint(low + 1, self.batch)), rows=(first, first + length),
                padded=min(self.n_k, rng.choice([0, 0, 1, 7, 64, self.n_k])), threads=rng.randint(1, 8),
            )  # fmt: skip


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Context with so many threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def part(result: torch.Tensor, call: Call, batch: int = 0, rows: int = 2) -> torch.Tensor:
    """Rows of a result of the whole call that a call has. batch, rows: the dimensions of these."""
    (low, high), (first, last) = call.batch, call.rows
    return result.narrow(batch, low, high - low).narrow(rows, first, last - first)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, whatever those of a NaN are."""
    integers_ = {2: torch.int16, 4: torch.int32}[x.element_size()]
    x, y = x.contiguous(), y.contiguous()
    return bool(((x.view(integers_) == y.view(integers_)) | (x.isnan() & y.isnan())).all())


def kernel_of(spec: AttentionSpec, machine: Machine) -> Kernel:
    """The kernel of a spec for a machine."""
    target = target_for(spec, machine)
    return Kernel(spec, tilings_for(spec, target), target, CpuPlanner(spec, machine))


def training_of(spec: AttentionSpec, machine: Machine) -> TrainingKernel | None:
    """The kernels that train with a spec; None where it has no backward kernel."""
    target = target_for(spec, machine)
    return None if unsupported(spec) else TrainingKernel(spec, tilings_for(spec, target), target, machine)
