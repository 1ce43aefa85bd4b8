"""Traffic between devices: elements that each schedule of a sharded sequence sends, a lower bound, predicted times.

    P   devices, with N_q / P query rows and N_k / P keys each
    H   query heads of all batch elements together; G key heads
    d   columns of Q and K;  e of V

    s   share of other processes' blocks of keys that live;  z in the zig-zag layout, where the share x of a shard moves
    o   1 where the backward needs the output again, 0 where results are narrow
    R   groups of P/R processes of a mesh;  m  share of other groups' keys that live;  w  elements as wide as a sum

The formulas are those of equal shards; `Traffic` counts shards of any lengths. docs/sequences.md derives the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.ir.parts import run_of
from fusion.machine import Machine
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.planning.schedules import elements

if TYPE_CHECKING:
    from fusion.ir import AttentionSpec
    from fusion.sequences.transfers import Ring

FORMULAS = {
    "gather": ("(P - 1)*G*N_k/P*(d + e)", "2*(P - 1)*G*N_k/P*(d + e)"),
    "ring": ("s*(P - 1)*G*N_k/P*(d + e)", "2*s*(P - 1)*G*N_k/P*(d + e)"),
    "zigzag": ("(z*(P - 1)*G*N_k + x*(H*N_q + G*N_k))/P*(d + e)",
               "(2*z*(P - 1)*G*N_k + 2*x*G*N_k)/P*(d + e) + x*H*N_q/P*(2*d + (1 + o)*e)"),
    "all_to_all": ("(P - 1)/P*(H*N_q + G*N_k)/P*(d + e)", "2*(P - 1)/P*(H*N_q + G*N_k)/P*(d + e)"),
    "mesh": ("m*(R - 1)*H*N_q/P*(d + w*(e + 2)) + (P/R - 1)*G*N_k/P*(d + e)",
             "m*(R - 1)*H*N_q/P*(2*d + e + 4*w) + 2*(P/R - 1)*G*N_k/P*(d + e)"),
}  # fmt: skip
"""Elements that a device sends in the forward and in the backward, by schedule: the backward has K and V on their way
once more, and their gradients; with all_to_all and zigzag also the output and its gradient, Q and its gradient; with a
mesh Q, the gradient of the output and four numbers a row, and the gradient of Q."""

LINKS = {"gpu": 450e9, "cpu": 1e9}
"""bytes/s that a device sends, where nothing else is said: NVLink 4 in one direction (NVIDIA's data sheet of the H100);
the order of a socket between processes of one machine."""
LATENCY = {"gpu": 1e-5, "cpu": 5e-4}
"""Seconds until a message arrives, likewise: the order of it. It decides between schedules of short sequences only."""
CALL = {"gpu": 5e-5, "cpu": 1e-3}
"""Seconds of a call of kernels on one block beside its products, likewise: ten launches; on CPUs this and the
latency are fitted to what short sequences take (docs/sequences.md)."""
PRODUCTS = {"gather": (2, 5), "ring": (2, 7), "zigzag": (2, 7), "all_to_all": (2, 5), "mesh": (2, 7)}
"""Products of the size of the scores in the forward and the backward: the ring computes each block's weights anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Runs of the rows and keys of each process of a ring. needed: whether a process computes with a run of keys,
    [process, run]; owner, keys: of a run; pairs: scores of one head that each process computes; blocks: numbers of live
    ones, of a run of rows and one of keys; moved: share of its shard that changes hands before and after."""

    needed: np.ndarray
    owner: np.ndarray
    keys: np.ndarray
    pairs: np.ndarray
    blocks: np.ndarray
    moved: np.ndarray

    @staticmethod
    def of(ring: Ring, spec: AttentionSpec, sizes: Mapping[str, int]) -> Layout:
        live, parts, numbers = np.array(ring.live(spec, sizes)), range(ring.parts), range(ring.parts * ring.runs)
        owner = np.empty(len(numbers), int)
        for part in parts:
            owner[ring.runs_of(part)] = part
        stay = [sum(holder == part for _, holder, _ in ring.moves(part)) / 2 for part in parts]
        return Layout(
            needed=np.array([live[ring.runs_of(part)].any(0) for part in parts]), owner=owner,
            keys=np.array([ring.keys_of(run)[1] for run in numbers]), pairs=np.array(ring.pairs(spec, sizes)),
            blocks=np.array([live[ring.runs_of(part)].sum() for part in parts]),
            moved=np.array([1 - share if ring.runs > 1 else 0.0 for share in stay]),
        )  # fmt: skip

    def _others(self) -> np.ndarray:
        """Keys that processes compute with and do not have, [process, run]."""
        strange = self.owner != np.arange(len(self.needed))[:, None]
        return self.needed * strange * self.keys

    def sent(self) -> np.ndarray:
        """Numbers of keys that each process sends in the forward, and of keys whose gradients it returns, [2, P]."""
        others = self._others()
        forward = np.array([others[:, self.owner == part].sum() for part in range(len(others))])
        return np.stack([forward, others.sum(1)])

    def share(self) -> float:
        """Share of other processes' keys that a process computes with, on average."""
        everything = (len(self.needed) - 1) * self.keys.sum()
        return float(self._others().sum() / everything) if everything else 0.0

    def steps(self) -> int:
        """Most processes that one computes with the keys of."""
        return max([1, *(len({*self.owner[needed]}) for needed in self.needed)])


class Work(NamedTuple):
    """Work of the slowest process in a pass. before: elements that move before and after; pairs: scores of one head;
    blocks: that kernels are called for; steps: in which the rest moves; messages: beside those of the steps."""

    before: float
    pairs: float
    blocks: int
    steps: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """An attention of a sequence over `parts` processes. layouts: of the ring and of zigzag. heads, key_heads: of all
    batch elements together. narrow: whether results are rounded to less than the sums."""

    parts: int
    n_q: int
    n_k: int
    heads: int
    key_heads: int
    d: int
    d_v: int
    layouts: Mapping[str, Layout]
    element_bytes: int = 4
    narrow: bool = False

    def of_ring(self, schedule: str) -> np.ndarray:
        """Elements that each process sends in the forward and the backward of a ring, [2, P], but for the one number by
        which all agree that rows are ordinary."""
        layout, width = self.layouts[schedule], self.d + self.d_v
        forward, returned = layout.sent() * self.key_heads * width
        of_rows, of_keys = layout.moved * self.heads * self.n_q / self.parts, layout.moved * self.key_heads * self.n_k
        of_keys = of_keys / self.parts * width
        again = 2 * self.d + (2 - self.narrow) * self.d_v
        return np.stack([forward + of_rows * width + of_keys, forward + returned + of_rows * again + 2 * of_keys])

    def of_mesh(self, groups: int) -> np.ndarray:
        """Elements that each process sends in the forward and the backward of a mesh, [2, P], as for a ring."""
        d, e, w, width, live = self.d, self.d_v, self._sum_width(), self.parts // groups, self._others(groups)
        of_rows, of_keys = self._shards(self.n_q) * self.heads, self._shards(self.n_k) * self.key_heads * (d + e)
        rows = live.sum(1) * of_rows
        sums = (live * of_rows[:, None]).reshape(groups, width, groups).sum(0).T.ravel()
        returned = of_keys.reshape(groups, width).sum(1).repeat(width) - of_keys
        again = (width - 1) * of_keys
        return np.stack([rows * d + sums * w * (e + 2) + again, rows * (d + e + 4 * w) + sums * d + again + returned])

    def each(self, schedule: str) -> np.ndarray:
        """Elements that each process sends by a ring or the mesh, [2, P]."""
        return self.of_mesh(self.groups) if schedule == "mesh" else self.of_ring(schedule)

    def _shards(self, count: int) -> np.ndarray:
        """Lengths of the shards of a sequence."""
        return np.array([run_of(count, self.parts, part)[1] for part in range(self.parts)])

    def _seen(self, groups: int) -> np.ndarray:
        """Number of each group's shards of keys that the rows of a process see, [P, R]."""
        return self.layouts["ring"].needed.reshape(self.parts, groups, -1).sum(2)

    def _others(self, groups: int) -> np.ndarray:
        """Groups but its own whose keys the rows of a process see, [P, R]."""
        own = np.arange(self.parts)[:, None] * groups // self.parts
        return (self._seen(groups) > 0) & (np.arange(groups) != own)

    def _sum_width(self) -> float:
        return 4 / self.element_bytes if self.narrow else 1.0

    def symbols(self, groups: int | None = None) -> dict[str, float]:
        """Values of the formulas' symbols, for a mesh of so many groups."""
        ring, zigzag, groups = self.layouts["ring"], self.layouts["zigzag"], groups or self.groups
        others = self._others(groups).sum() / (self.parts * max(1, groups - 1))
        return {
            "P": self.parts, "N_q": self.n_q, "N_k": self.n_k, "H": self.heads, "G": self.key_heads, "d": self.d,
            "e": self.d_v, "s": ring.share(), "z": zigzag.share(), "x": float(zigzag.moved.mean()),
            "o": int(not self.narrow), "R": groups, "m": others, "w": self._sum_width(),
        }  # fmt: skip

    @property
    def groups(self) -> int:
        """Groups of the mesh that sends least: at least two, where there are as many processes."""
        most = lambda groups: self.of_mesh(groups).max(1).sum()
        return min((n for n in range(min(2, self.parts), self.parts + 1) if self.parts % n == 0), key=most)

    def sent(self, schedule: str) -> tuple[float, float]:
        """Elements that a device sends in the forward and the backward: for equal shards, the mean over devices."""
        symbols = self.symbols()
        forward, backward = (elements(formula, symbols) for formula in FORMULAS[schedule])
        return forward, backward

    def most(self, schedule: str) -> tuple[float, float]:
        """Elements that the device sends which sends most, as `sent` otherwise."""
        if schedule not in (*self.layouts, "mesh"):
            return self.sent(schedule)
        forward, backward = self.each(schedule).max(1)
        return float(forward), float(backward)

    def bound(self) -> float | None:
        """Elements that some device must receive in the forward, whatever the schedule, from shards of the sequence
        without a mask; None with grouped heads or two lengths, for which it is not derived."""
        if self.heads != self.key_heads or self.n_q != self.n_k:
            return None
        p, h, width = self.parts, self.heads, self.d + self.d_v
        if h >= p:
            return 2 * self.n_q * width * (1 - 1 / p) * h / (p + 1)
        return 2 * self.n_q * width * (math.sqrt(h / p) - h / p)

    def seconds(self, schedule: str, machine: Machine, dtype: str, link: float, trained: bool) -> float:
        """Predicted time. K and V are gathered, and change hands, before the kernel runs, their gradients return after
        it, each a message; of a ring each step takes the longer of the two. The slowest process counts."""
        passes = range(2 if trained else 1)
        return sum(self._seconds(schedule, machine, dtype, link, n) for n in passes)

    def _score_seconds(self, schedule: str, machine: Machine, dtype: str, number: int) -> float:
        """Seconds for a score of all heads in a pass: on a GPU by the planned kernel of one block of the schedule, as
        `plan` predicts it, and in proportion to the products; on a CPU by the products at the machine's rate."""
        products, p = PRODUCTS[schedule][number], self.parts
        if machine.kind == "cpu" or machine.interpreted:
            return products * (self.d + self.d_v) * self.heads / machine.flops(dtype)
        if not self.key_heads * self.n_q * self.n_k:
            return 0.0
        shares = {"gather": (p, 1, 1), "zigzag": (2 * p, 2 * p, 1), "all_to_all": (1, 1, p)}
        of_rows, of_keys, of_heads = shares.get(schedule, (p, p, 1))
        n_q, n_k, groups = -(-self.n_q // of_rows), -(-self.n_k // of_keys), max(1, self.key_heads // of_heads)
        heads = groups * (self.heads // self.key_heads)
        d, d_v = max(1, self.d), max(1, self.d_v)
        block = Problem(n_q=n_q, n_k=n_k, d=d, d_v=d_v, heads=heads, heads_kv=groups, dtype=dtype)
        return products / 2 * _kernel_seconds(block, machine) / (n_q * n_k) * self.heads / heads

    def _seconds(self, schedule: str, machine: Machine, dtype: str, link: float, number: int) -> float:
        score = self._score_seconds(schedule, machine, dtype, number)
        latency, call, pairs = LATENCY[machine.kind], CALL[machine.kind], self.layouts["ring"].pairs
        second = self.element_bytes / link
        moving = self.most(schedule)[number] * second
        if schedule == "all_to_all":
            return float(pairs.mean() * score + moving + 4 * latency + call)
        if schedule == "gather":
            return float(pairs.max(initial=0)) * score + moving + (2 + 2 * number) * latency + call
        work = self._of_tiles() if schedule == "mesh" else self._of_blocks(schedule)
        before = (1 + number) * work.before * second
        moving, slowest = max(0.0, moving - before), work.pairs * score + (1 + number) * work.blocks * call
        apart = min(slowest, moving) / work.steps  # of the first step, or the last
        return before + max(slowest, moving) + apart + (work.steps + work.messages) * latency

    def _of_blocks(self, schedule: str) -> Work:
        layout, width = self.layouts[schedule], self.d + self.d_v
        before = float(layout.moved.max()) / self.parts * (self.heads * self.n_q + self.key_heads * self.n_k) * width
        pairs, blocks = float(layout.pairs.max(initial=0)), int(layout.blocks.max(initial=0))
        return Work(before, pairs, blocks, layout.steps(), 4 * bool(before))

    def _of_tiles(self) -> Work:
        """Scores of a process's rows are taken to be spread evenly over the shards of keys that these see."""
        groups, seen = self.groups, self._seen(self.groups)
        pairs = seen * (self.layouts["ring"].pairs / seen.sum(1).clip(1))[:, None]
        of_process = [each.reshape(groups, -1, groups).sum(0).max() for each in (pairs, seen > 0)]
        before = (self.parts // groups - 1) * self.key_heads * self.n_k / self.parts * (self.d + self.d_v)
        return Work(before, float(of_process[0]), int(of_process[1]), groups, 2)


@lru_cache(maxsize=1024)
def _kernel_seconds(block: Problem, machine: Machine) -> float:
    """Predicted seconds of one device's forward kernel, without its launch, of which `CALL` has more."""
    try:
        return plan(block, machine).time - machine.launch
    except NoFittingTileError:  # the launch makes tiles smaller, or the kernel says that it cannot
        return 2 * block.heads * block.n_q * block.n_k * (block.d + block.d_v) / machine.flops(block.dtype)


def rows(traffic: Traffic, machine: Machine, dtype: str, link: float | None = None) -> list[dict[str, Any]]:
    """For each schedule the bytes that the busiest device sends, and seconds, in the forward and in a step of training,
    the fastest in training first. link: bytes/s that a device sends."""
    by = link or LINKS[machine.kind]

    def row(name: str) -> dict[str, Any]:
        forward, backward = (n * traffic.element_bytes for n in traffic.most(name))
        times = [traffic.seconds(name, machine, dtype, by, trained) for trained in (False, True)]
        return {"schedule": name, "forward_bytes": forward, "backward_bytes": backward,
                "forward_seconds": times[0], "training_seconds": times[1]}  # fmt: skip

    possible = {"all_to_all": traffic.key_heads, "zigzag": math.gcd(traffic.n_q, traffic.n_k) // 2}
    names = [name for name in FORMULAS if possible.get(name, traffic.parts) % traffic.parts == 0]
    return sorted(map(row, names), key=lambda row: row["training_seconds"])


def table(traffic: Traffic, machine: Machine, dtype: str, link: float | None = None) -> str:
    """`rows` as text, with the lower bound."""
    by, bound = link or LINKS[machine.kind], traffic.bound()
    lines = [f"across     {traffic.parts} devices, {by / 1e9:g} GB/s from each; bytes that the busiest sends"]
    lines += [f"{'':11}{'schedule':12}{'forward':>11}{'backward':>11}{'forward':>12}{'training':>12}"]
    for row in rows(traffic, machine, dtype, link):
        sent = f"{row['forward_bytes']:11.3e}{row['backward_bytes']:11.3e}"
        lines.append(
            f"{'':11}{row['schedule']:12}{sent}{row['forward_seconds']:10.3e} s{row['training_seconds']:10.3e} s"
        )
    if bound is not None:
        lines.append(f"{'':11}{'bound':12}{bound * traffic.element_bytes:11.3e}  received, without a mask")
    return "\n".join(lines)


def cheapest(traffic: Traffic, schedules: Sequence[str], machine: Machine, dtype: str) -> str:
    """The schedule with the least predicted time of a step of training."""
    by = LINKS[machine.kind]
    return min(schedules, key=lambda name: traffic.seconds(name, machine, dtype, by, trained=True))
