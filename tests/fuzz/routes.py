"""How a program reaches the compiler: traced here and handed to `fuse`, or through torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.backend import fuse
from fusion.options import Options
from fusion.report.report import Report

Function = Callable[..., Any]


@dataclass
class Outcome:
    """What the compiler made of a program.

    call: the compiled function. reports: what it said. defects: failures of ours that it kept from the user.
    """

    call: Function
    reports: list[Report] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(report.fused for report in self.reports)

    @property
    def refusals(self) -> list[str]:
        return [str(site.reason) for report in self.reports for site in report.sites if not site.fused]


class _Defects(logging.Handler):
    """Collects what the compiler logs as a failure of its own: a kernel that fell back, an analysis that raised, a
    spec that validation found to be wrong."""

    def __init__(self, found: list[str]):
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        about = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        text = (record.getMessage() + about)[:300]
        ours = about or record.levelno >= logging.ERROR or "could not validate" in text
        if ours and text not in self.found:
            self.found.append(text)


@contextmanager
def watching(outcome: Outcome) -> Iterator[None]:
    """Collects what the compiler reports and logs into `outcome`, and keeps it off the screen."""
    logger, handler = logging.getLogger("fusion"), _Defects(outcome.defects)
    propagated, logger.propagate = logger.propagate, False
    before, logger.handlers = logger.handlers, [handler]
    try:
        with fusion.collect_reports() as reports:
            yield
        outcome.reports += reports
    finally:
        logger.handlers, logger.propagate = before, propagated


def compiled(function: Function, given: Sequence[torch.Tensor], route: str, emitter: str, verify: bool) -> Outcome:
    """The function as compiled; by torch.compile at its first call, which belongs within `watching`, too."""
    options = {"inner": "eager", "emitter": emitter, "verify": verify}
    if route != "trace":
        torch._dynamo.reset()
        return Outcome(torch.compile(function, backend="fusion", options=options, dynamic=route == "dynamic" or None))
    outcome = Outcome(function)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in given]
    module = make_fx(function, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    for node, fake in zip((n for n in module.graph.nodes if n.op == "placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    with watching(outcome):
        outcome.call, report = fuse(module, list(given), Options.parse(options))
    outcome.reports = [report]
    return outcome
