"""Traffic between devices: elements that each schedule of a sharded sequence sends, a lower bound, predicted times.

    P   devices, with N_q / P query rows and N_k / P keys each
    H   query heads of all batch elements together; G key heads
    d   columns of Q and K;  e of V

The formulas are those of equal shards; `Traffic` counts shards of any lengths, and dead blocks, which the ring leaves
out (s is the share of other processes' blocks that live). docs/sequences.md derives the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fusion.ir.parts import run_of
from fusion.machine import Machine

FORMULAS = {
    "gather": ("(P - 1)*G*N_k/P*(d + e)", "2*(P - 1)*G*N_k/P*(d + e)"),
    "ring": ("s*(P - 1)*G*N_k/P*(d + e)", "2*s*(P - 1)*G*N_k/P*(d + e)"),
    "all_to_all": ("(P - 1)/P*(H*N_q + G*N_k)/P*(d + e)", "2*(P - 1)/P*(H*N_q + G*N_k)/P*(d + e)"),
}
"""Elements that a device sends in the forward and in the backward, by schedule: the backward has K and V on their way
once more, and their gradients; with all_to_all also the output and its gradient, Q and its gradient."""

LINKS = {"gpu": 450e9, "cpu": 1e9}
"""bytes/s that a device sends, where nothing else is said: NVLink 4 in one direction (NVIDIA's data sheet of the H100);
the order of a socket between processes of one machine."""
LATENCY = {"gpu": 1e-5, "cpu": 1e-4}
"""Seconds until a message arrives, likewise: the order of it. It decides between schedules of short sequences only."""
PRODUCTS = {"gather": (2, 5), "ring": (2, 7), "all_to_all": (2, 5)}
"""Products of the size of the scores in the forward and the backward: the ring computes each block's weights anew."""


@lru_cache(maxsize=64)
def _compiled(formula: str) -> Callable[[Mapping[str, float]], float]:
    code = compile(formula, formula, "eval")
    return lambda values: float(eval(code, {}, values))  # the text is one of `FORMULAS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """An attention of a sequence over `parts` processes. live: for each process and each block of keys, whether it is
    computed; pairs: scores that each process computes of one head where rows are split. heads, key_heads: of all batch
    elements together."""

    parts: int
    n_q: int
    n_k: int
    heads: int
    key_heads: int
    d: int
    d_v: int
    live: tuple[tuple[bool, ...], ...]
    pairs: tuple[int, ...]
    element_bytes: int = 4

    def keys(self, part: int) -> int:
        """Elements of a process's K and V."""
        return run_of(self.n_k, self.parts, part)[1] * self.key_heads * (self.d + self.d_v)

    def ring(self) -> list[tuple[int, int]]:
        """Elements that each process sends in the forward and the backward of a ring, but for the one number by which
        all agree that rows are ordinary."""
        others = [[q for q in range(self.parts) if q != part] for part in range(self.parts)]
        sent = [sum(self.live[q][part] for q in others[part]) * self.keys(part) for part in range(self.parts)]
        back = [sum(self.live[part][q] * self.keys(q) for q in others[part]) for part in range(self.parts)]
        return [(forward, forward + backward) for forward, backward in zip(sent, back, strict=True)]

    def symbols(self) -> dict[str, float]:
        """Values of the formulas' symbols."""
        others = [self.live[a][b] for a in range(self.parts) for b in range(self.parts) if a != b]
        share = sum(others) / len(others) if others else 0.0
        return {"P": self.parts, "N_q": self.n_q, "N_k": self.n_k, "H": self.heads, "G": self.key_heads,
                "d": self.d, "e": self.d_v, "s": share}  # fmt: skip

    def sent(self, schedule: str) -> tuple[float, float]:
        """Elements that a device sends in the forward and the backward: for equal shards, the mean over devices."""
        forward, backward = (_compiled(formula)(self.symbols()) for formula in FORMULAS[schedule])
        return forward, backward

    def most(self, schedule: str) -> tuple[float, float]:
        """Elements that the device sends which sends most, as `sent` otherwise."""
        if schedule != "ring":
            return self.sent(schedule)
        forward, backward = zip(*self.ring(), strict=True)
        return float(max(forward)), float(max(backward))

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
        """Predicted time. K and V are gathered, and change hands, before the kernel runs; of a ring each step takes the
        longer of the two. The slowest process counts."""
        passes = range(2 if trained else 1)
        return sum(self._seconds(schedule, machine, dtype, link, n) for n in passes)

    def _seconds(self, schedule: str, machine: Machine, dtype: str, link: float, number: int) -> float:
        score = PRODUCTS[schedule][number] * (self.d + self.d_v) * self.heads / machine.flops(dtype)
        latency = LATENCY[machine.kind]
        moving = self.most(schedule)[number] * self.element_bytes / link
        if schedule == "all_to_all":
            return sum(self.pairs) / self.parts * score + moving + 4 * latency
        slowest = max(self.pairs, default=0) * score
        if schedule == "gather":
            return slowest + moving + latency
        steps = max(map(sum, self.live), default=1) or 1
        return max(slowest, moving) + min(slowest, moving) / steps + steps * latency


def rows(traffic: Traffic, machine: Machine, dtype: str, link: float | None = None) -> list[dict[str, Any]]:
    """For each schedule the bytes that the busiest device sends, and seconds, in the forward and in a step of training,
    the fastest in training first. link: bytes/s that a device sends."""
    by = link or LINKS[machine.kind]

    def row(name: str) -> dict[str, Any]:
        forward, backward = (n * traffic.element_bytes for n in traffic.most(name))
        times = [traffic.seconds(name, machine, dtype, by, trained) for trained in (False, True)]
        return {"schedule": name, "forward_bytes": forward, "backward_bytes": backward,
                "forward_seconds": times[0], "training_seconds": times[1]}  # fmt: skip

    heads = traffic.key_heads % traffic.parts == 0
    names = [name for name in FORMULAS if heads or name != "all_to_all"]
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


def cheapest(
    traffic: Traffic, schedules: Sequence[str], machine: Machine, dtype: str, link: float | None = None
) -> str:
    """The schedule with the least predicted time of a step of training. link: bytes/s that a device sends."""
    by = link or LINKS[machine.kind]
    return min(schedules, key=lambda name: traffic.seconds(name, machine, dtype, by, trained=True))
