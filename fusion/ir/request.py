"""Requests to the kernels of a spec. Inside the process a request is a record; as text it crosses the op's boundary."""

from __future__ import annotations

import functools
from dataclasses import dataclass

TUNED, UNPROVED = "/tuned", "/unproved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximation:
    """An approximation that is allowed. method: "polynomial". epsilon: the error that attention
    weights may have, relative to a row's sum."""

    method: str
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Properties that are requested of the kernels of a spec.

    emitter: the name of one that is registered (`fusion.codegen.emitter`), or "auto" for the device's own.
    tuned: whether tiles are measured at the first call, by emitters that can.
    approximation: the approximation that may replace exact attention, or None.
    proved: whether kernels prove themselves before their first use.
    across: the schedule across processes of a sharded sequence (`fusion.sequences`); "auto" for the fastest.
    """

    emitter: str = "auto"
    tuned: bool = False
    approximation: Approximation | None = None
    proved: bool = True
    across: str = "auto"

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Request:
        """Request that `str` wrote: an emitter, "/tuned", "/unproved", "+method:epsilon" where an approximation is
        allowed, "@schedule" where one across processes was chosen."""
        text, _, across = text.partition("@")
        text, separator, allowed = text.partition("+")
        proved, text = not text.endswith(UNPROVED), text.removesuffix(UNPROVED)
        method, _, epsilon = allowed.partition(":")
        return Request(
            emitter=text.removesuffix(TUNED),
            tuned=text.endswith(TUNED),
            approximation=Approximation(method=method, epsilon=float(epsilon)) if separator else None,
            proved=proved,
            across=across or "auto",
        )

    def __str__(self) -> str:
        allowed = self.approximation
        ways = f"{TUNED * self.tuned}{UNPROVED * (not self.proved)}"
        approximation = f"+{allowed.method}:{allowed.epsilon!r}" if allowed else ""
        return f"{self.emitter}{ways}{approximation}" + (f"@{self.across}" if self.across != "auto" else "")


PLAIN = Request()
"""The device's own emitter, exact, in the tiles that are planned."""
