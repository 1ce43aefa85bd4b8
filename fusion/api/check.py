"""One attention, alone, as fusion runs it and as eager does, against float64: what scripts of `fusion repro` call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.exactness import Errors, errors, is_float, widened
from fusion.refusals import Reason
from fusion.report.report import collect_reports

Function = Callable[..., Tensor]
DRAWS = 8
"""Upstream gradients that are compared together where the first is beyond the rule: by how much eager is off in a
gradient of few elements, that of a factor of all scores, say, is luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a comparison.

    errors: of the output, and of the gradients of inputs, by name.
    refusal: why fusion left the attention to eager, in which case nothing of ours has run.
    defect: whether that is since it would have computed something else.
    validated: what was compared before it was put in place (docs/validation.md).
    """

    errors: Mapping[str, Errors]
    refusal: str | None = None
    defect: bool = False
    validated: str | None = None

    @property
    def share(self) -> float:
        """The largest error / allowed error; at most 1 where all are allowed."""
        return max(error.share for error in self.errors.values())

    @property
    def wrong(self) -> bool:
        return self.defect or not self.share <= 1

    @property
    def judged(self) -> bool:
        """Whether the rule says something about every tensor."""
        return not any(error.apart for error in self.errors.values())

    def __str__(self) -> str:
        lines = [] if self.refusal is None else [f"not fused: {self.refusal}"]
        if lines and not self.wrong:
            return lines[0]
        lines = [f"WRONG  {line}" for line in lines]
        verdict = lambda error: "WRONG" if error.share > 1 else "?????" if error.apart else "right"
        lines += [f"{verdict(error)}  {name}: {error}" for name, error in self.errors.items()]
        return "\n".join(lines)


def check(
    attention: Function,
    values: Sequence[Any],
    *,
    floats: Sequence[str] = (),
    gradients: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run `attention(*values)` in eager mode, in float64 and through fusion, and compare by `fusion.exactness`.

    floats: dtypes that are keyword arguments of `attention`, which names its dtypes by them.
    gradients: the arguments to differentiate by.
    options: of the backend.
    """
    chosen = {"inner": "eager", **(options or {})}
    compiled = torch.compile(attention, backend="fusion", dynamic=False, fullgraph=True, options=chosen)
    named = dict(zip(inspect.signature(attention).parameters, values, strict=False))
    wide = {name: widened(value) for name, value in named.items()}
    coarse = max((t.dtype for t in filter(is_float, values)), key=lambda dtype: torch.finfo(dtype).eps, default=None)
    ways = (compiled, named, {}), (attention, named, {}), (attention, wide, dict.fromkeys(floats, torch.float64))

    def compared(draws: int) -> dict[str, Errors]:
        runs = [[_run(f, xs, ks, gradients, number) for number in range(draws)] for f, xs, ks in ways]
        ours, eager, exact = ({name: _together([draw[name] for draw in run]) for name in run[0]} for run in runs)
        return {name: errors(ours[name], eager[name], exact[name], coarse) for name in ours}

    with collect_reports() as reports:
        by_name = compared(1)
        if gradients and any(error.share > 1 for error in by_name.values()):
            by_name = compared(DRAWS)
    sites = [site for report in reports for site in report.sites]
    notes = [note for report in reports for note in report.notes]
    reasons = [site.reason for site in sites if not site.fused] if sites else notes
    return Outcome(
        errors=by_name,
        refusal=next(iter(reasons), None),
        defect=any(site.refusal is not None and site.refusal.kind is Reason.DEFECT for site in sites),
        validated=next((site.validated for site in sites), None),
    )


def main(attention: Function, values: Sequence[Any], **arguments: Any) -> int:
    """The end of a script: prints the comparison; returns its exit code, 1 where fusion is wrong."""
    outcome = check(attention, values, **arguments)
    print(outcome)
    return int(outcome.wrong)


def _together(draws: Sequence[Tensor]) -> Tensor:
    return draws[0] if len(draws) == 1 else torch.stack([t.values() if t.is_nested else t for t in draws])


def _run(
    function: Function, arguments: Mapping[str, Any], keywords: Mapping[str, Any], gradients: Sequence[str], number: int
) -> dict[str, Tensor]:
    """The output, and the gradients of the arguments named, all for one upstream gradient, that of a number."""
    leaves = {n: value.detach() if isinstance(value, Tensor) else value for n, value in arguments.items()}
    wanted = {name: leaves[name].requires_grad_() for name in gradients}
    with torch.set_grad_enabled(bool(wanted)):
        output = function(*leaves.values(), **keywords)
    results = {"output": output.detach()}
    if wanted:
        generator = torch.Generator().manual_seed(1 + number)
        upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        upstream = upstream.to(torch.bfloat16).to(output)  # the same in every dtype
        gradient = torch.autograd.grad(output, list(wanted.values()), upstream, materialize_grads=True)
        results |= {f"gradient of {name}": grad for name, grad in zip(wanted, gradient, strict=True)}
    return results
