"""One program, compiled and in eager mode: outputs, changed inputs and gradients by the house rule."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fusion.exactness import errors
from tests.fuzz.functions import MIXED_HEADS
from tests.fuzz.normalizers import RENORMALIZED, UNSHIFTED
from tests.fuzz.routes import Outcome, compiled, watching
from tests.fuzz.writer import Program
from tests.numerics import assert_as_exact_as_eager, leaves

Tensors = dict[str, torch.Tensor]
DRAWS = 8
"""How many draws of the inputs count together, where one draw is over the rule: the error of a few elements is luck."""
NUDGES = 32
"""In how many ways the inputs are changed in their last digits to see where a program is unstable. Each moves a tie
that rounding decides with probability 1/2; with 8 ways, a tensor with hundreds of ties kept some."""
NUDGED = 8
"""Changes by more than so many rounding errors of the largest element are instability."""
GROSS = 16
"""A result that is this many times over the rule, in several draws together, is wrong and not just inexact."""


class Verdict(enum.Enum):
    RIGHT = "right"
    INVALID = "invalid"
    """Eager mode does not run it."""
    LUCK = "luck"
    """Over the rule in one draw, and not in several together."""
    OVERFLOW = "overflow"
    """Eager leaves the range of its dtype, on the way or in its result; the compiled function has what float64 has, to
    rounding, which may be an infinity."""
    UNSTABLE = "unstable"
    """Over the rule only where float64 itself changes as much when the inputs change in their last digits."""
    REFERENCE = "reference only"
    """Over the rule in the reference emitter, not in kernels."""
    POISONED = "poisoned"
    """NaN or infinities stand elsewhere, where inputs have some, or have 1e30: which of them reach a result depends on
    what a kernel skips, and gradients of NaN differ between the operations of eager."""
    OVER = "over the rule"
    WRONG = "wrong"
    FAILED = "failed"
    """An exception reached the user."""


@dataclass
class Result:
    """What became of a program. sites: attentions that the compiler saw. share: error / bound of the worst tensor."""

    verdict: Verdict
    message: str = ""
    share: float = 0.0
    sites: int = 0
    fused: int = 0
    refusals: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)


class Wide(TorchDispatchMode):
    """Computes in float64 what a program computes in narrower floats, whatever dtypes its text names."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        args, kwargs = tree_map(lambda x: torch.float64 if x in narrow else x, (args, kwargs or {}))
        return function(*args, **kwargs)


class Sample:
    """One draw of a program's inputs, and what eager mode and float64 make of it."""

    def __init__(self, program: Program, seed: int, function: Callable[..., Any] | None = None):
        self.program, self.trained = program, program.trained
        self.function = function or loaded(program.text)["f"]
        torch.manual_seed(seed)
        self.given = loaded(program.text)["inputs"]()
        self.eager = self.run(self.function, self.given)
        self.exact = self.in_float64([x.double() if x.is_floating_point() else x for x in self.given])

    def in_float64(self, given: list[torch.Tensor]) -> Tensors:
        """What the program makes of these inputs in float64."""
        # Fills that swallow every score in float32 do so in float64 as well; only eager's range ends at the least one.
        text = re.sub(r"torch\.finfo\(s\.dtype\)\.min", "torch.finfo(torch.float32).min", self.program.text)
        exact = loaded(re.sub(r"\b1e9\b", "1e30", text))
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            with Wide():
                return self.run(exact["f"], given)
        finally:
            torch.set_default_dtype(before)

    def without_unstable(self) -> Tensors:
        """The float64 results, with NaN where they change by more than the rule allows when the inputs are rounded
        otherwise: at the jumps of a function, say."""
        found = {name: value.clone() for name, value in self.exact.items()}
        eps = torch.finfo(self.program.dtype).eps
        for number in range(NUDGES):
            draw = torch.Generator().manual_seed(number)
            nudged = [
                x.double() * (1 + eps * (4 * torch.rand(x.shape, generator=draw, dtype=torch.float64) - 2))
                if x.is_floating_point() else x
                for x in self.given
            ]  # fmt: skip
            for name, value in self.in_float64(nudged).items():
                if value.is_floating_point():
                    size = self.exact[name].abs().nan_to_num(0, 0, 0).amax() if value.numel() else 0.0
                    moved = (value - self.exact[name]).abs() > NUDGED * eps * size
                    found[name][moved.any(-1) if moved.dim() else moved] = torch.nan
        return found

    def run(self, function: Callable[..., Any], given: list[torch.Tensor]) -> Tensors:
        """Outputs, inputs after the call, and gradients, by name."""
        copies = [x.detach().clone() for x in given]
        wanted = [x.requires_grad_() for x in copies if self.trained and x.is_floating_point()]
        with torch.set_grad_enabled(self.trained):
            out = function(*copies)
        found = dict(leaves(out))
        if self.trained:
            total = torch.zeros([])
            for value in found.values():
                draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
                total = total + (value * draw.to(value.dtype)).sum()
            gradients = [None] * len(wanted)
            if total.requires_grad:
                gradients = torch.autograd.grad(total, wanted, allow_unused=True)
            zeros = map(torch.zeros_like, wanted)
            found |= {f"flow {n}": torch.tensor(g is not None) for n, g in enumerate(gradients)}
            found |= {
                f"gradient {n}": z if g is None else g for n, (g, z) in enumerate(zip(gradients, zeros, strict=True))
            }
        else:
            found |= {f"input {n}": x for n, x in enumerate(copies)}
        return {name: value.detach() for name, value in found.items()}

    def inputs(self) -> list[torch.Tensor]:
        return [x.detach().clone().requires_grad_(self.trained and x.is_floating_point()) for x in self.given]


def loaded(text: str) -> dict[str, Any]:
    """The names that a program's text defines."""
    names: dict[str, Any] = {"torch": torch, "math": math, "F": torch.nn.functional}
    exec(compile(text, "<program>", "exec"), names)
    return names


def check(program: Program, seed: int = 0, verify: bool = True) -> Result:
    """Compile a program, run it and compare; where the reference emitter fails, with kernels again.

    verify: whether specs are validated. A refusal by that is told in the result's `defects`, as what it hid: a wrong
    result, or nothing (a false alarm).
    """
    result = _check(program, seed, verify)
    if result.defects and verify:
        hidden = _check(program, seed, False)
        result.defects.append(f"without validation: {hidden.verdict.value}: {hidden.message}")
    if result.verdict in (Verdict.OVER, Verdict.WRONG) and program.emitter == "reference":
        again = _check(replace(program, emitter="auto"), seed, verify)
        if again.verdict not in (Verdict.OVER, Verdict.WRONG, Verdict.FAILED):
            result.verdict = Verdict.REFERENCE
    return result


def _check(program: Program, seed: int, verify: bool) -> Result:
    try:
        sample = Sample(program, seed)
        if not sample.eager:
            return Result(Verdict.INVALID, "no tensors come out")
    except Exception as problem:
        return Result(Verdict.INVALID, f"{type(problem).__name__}: {problem}")
    try:
        with torch.set_grad_enabled(program.trained):
            outcome = compiled(sample.function, sample.inputs(), program.route, program.emitter, verify)
        with watching(outcome):
            result = _compared(program, sample, outcome, seed)
    except Exception as problem:
        return Result(Verdict.FAILED, f"{type(problem).__name__}: {problem}")
    result.sites = sum(len(report.sites) for report in outcome.reports)
    result.fused, result.refusals, result.defects = outcome.fused, outcome.refusals, outcome.defects
    return result


def _compared(program: Program, sample: Sample, outcome: Outcome, seed: int) -> Result:
    samples, ours = [sample], [sample.run(outcome.call, sample.given)]
    first = found = _judged(samples, ours, [sample.eager], [sample.exact])
    if first.verdict is Verdict.OVER or (first.verdict is Verdict.WRONG and math.isfinite(first.share)):
        samples += [Sample(program, seed + 1 + n, sample.function) for n in range(DRAWS - 1)]
        ours += [one.run(outcome.call, one.given) for one in samples[1:]]
        found = _judged(samples, ours, [one.eager for one in samples], [one.exact for one in samples])
        if found.verdict is Verdict.RIGHT:
            return Result(Verdict.LUCK, first.message, first.share)
    if found.verdict in (Verdict.OVER, Verdict.WRONG):
        stable = [one.without_unstable() for one in samples]
        eager = [_finite_where_unstable(*one) for one in zip(samples, ours, stable, strict=True)]
        if _judged(samples, ours, eager, stable).verdict in (Verdict.RIGHT, Verdict.OVERFLOW):
            return Result(Verdict.UNSTABLE, found.message, found.share)
    if found.verdict is Verdict.WRONG and math.isinf(found.share) and any(map(_is_poisoned, sample.given)):
        return Result(Verdict.POISONED, found.message)
    return found


def _is_poisoned(given: torch.Tensor) -> bool:
    return given.is_floating_point() and bool((~(given.abs() < 1e20)).any())


def _finite_where_unstable(sample: Sample, ours: Tensors, stable: Tensors) -> Tensors:
    """Eager's results, with ours in the place of infinities and NaN where float64 has an unstable number: rounding
    errors that a large fill multiplies, of which eager's leave the range of its dtype and ours do not."""
    found = dict(sample.eager)
    for name, exact in sample.exact.items():
        if exact.is_floating_point() and name in ours and ours[name].shape == exact.shape:
            noise = exact.isfinite() & stable[name].isnan() & ours[name].isfinite() & ~found[name].isfinite()
            found[name] = torch.where(noise, ours[name], found[name])
    return found


def _judged(samples: list[Sample], ours: list[Tensors], eager: list[Tensors], exact: list[Tensors]) -> Result:
    """The verdict on all draws together. Eager's overflows may also be missing where exponentials have no maximum, in
    the place of which the fused softmax has one. A draw with such overflows shows nothing where heads are mixed, whose
    sums are in an order of the library's choice, or weights are divided by their sum, which may have no reciprocal."""
    program = samples[0].program
    largest = max((magnitude(x) for one in samples for x in one.given if x.is_floating_point()), default=1.0)
    kinds = program.kinds
    elsewhere = MIXED_HEADS in kinds or RENORMALIZED in kinds
    return allowing_overflow(ours, eager, exact, program.dtype, largest, UNSHIFTED in kinds, elsewhere)


def allowing_overflow(
    ours: list[Tensors],
    eager: list[Tensors],
    exact: list[Tensors],
    dtype: torch.dtype,
    largest: float = 1.0,
    unshifted: bool = False,
    elsewhere: bool = False,
) -> Result:
    """The verdict, where eager's overflows may be missing: those that float64 does not have. elsewhere: whether others
    may be there in their place."""
    first = verdict(ours, eager, exact, dtype, largest)
    if first.verdict is not Verdict.WRONG:
        return first
    if elsewhere and any(_overflows(e[n], x[n]) for e, x in zip(eager, exact, strict=True) for n in e):
        return Result(Verdict.OVERFLOW, first.message)
    within = [
        {n: _without_overflow(a[n], e[n], x[n], unshifted) if n in a else (e[n], x[n]) for n in e}
        for a, e, x in zip(ours, eager, exact, strict=True)
    ]
    eager, exact = ([{n: pair[side] for n, pair in one.items()} for one in within] for side in (0, 1))
    again = verdict(ours, eager, exact, dtype, largest)
    return again if again.verdict is not Verdict.RIGHT else Result(Verdict.OVERFLOW, first.message)


def _overflows(eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether eager mode is not finite where float64 is."""
    return eager.shape == exact.shape and bool((exact.isfinite() & ~eager.isfinite()).any())


def _without_overflow(
    ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, unshifted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(eager, float64), where eager alone is not finite: what float64 has; where neither is, or float64's number is at
    the end of the dtype's range, where rounding decides: nothing to compare. An infinity has the sign of float64's
    number, unless eager has NaN: terms of both signs overflowed there, of which one is enough for either infinity."""
    if not ours.is_floating_point() or ours.shape != eager.shape:
        return eager, exact
    missing = ours.isfinite() & ~eager.isfinite()
    as_exact = (missing & exact.isfinite()) | (~eager.isfinite() & (ours == exact))  # the latter: infinities
    eager = torch.where(as_exact, exact.to(eager.dtype), eager)
    limits = torch.finfo(ours.dtype)
    rounding = GROSS * limits.eps * magnitude(exact)
    at_the_end = exact.isfinite() & (exact.abs() + rounding > limits.max)
    both = exact.isfinite() & ours.isinf() & ~eager.isfinite()
    beyond = ((ours.sign() == exact.sign()) & (at_the_end | both)) | (both & eager.isnan())
    if unshifted:  # of weights, a key that overflows makes the whole row NaN, eager's only at the key itself
        overflown = ~eager.isfinite().all(-1, keepdim=True)
        beyond |= exact.isfinite() & ~ours.isfinite() & overflown
    eager, exact = torch.where(beyond, ours, eager), exact.masked_fill(beyond, torch.nan)
    if unshifted:
        eager, exact = torch.where(missing, ours, eager), exact.masked_fill(missing & ~exact.isfinite(), torch.nan)
    return eager, exact


def verdict(
    actual: list[Tensors], expected: list[Tensors], wide: list[Tensors], dtype: torch.dtype, largest: float = 1.0
) -> Result:
    """The rule on all draws together, and again on the rows where eager itself is near float64. largest: of the
    inputs' magnitudes."""
    ours, eager, exact = (
        {name: torch.stack([one[name] for one in way]) for name in way[0]} for way in (actual, expected, wide)
    )
    if dtype is torch.float64:  # nothing here is more exact than that; a wrong formula shows all the same
        dtype = torch.float32
    rounding = GROSS * torch.finfo(dtype).eps * max(map(magnitude, exact.values()), default=0.0) * max(1.0, largest)
    sized = {name for name in exact if not _vanishes(name, ours, exact, rounding)}
    ours, eager, exact = ({name: way[name] for name in way if name in sized} for way in (ours, eager, exact))
    try:
        assert_as_exact_as_eager(ours, eager, exact, dtype)
        sharp = {name: _without_unstable(eager[name], value) for name, value in exact.items()}
        assert_as_exact_as_eager(ours, eager, sharp, dtype, name="stable")
    except AssertionError as problem:
        message = str(problem)
        inexact = "error" in message and "exceeds" in message
        share = _share(ours, eager, sharp if "stable" in message else exact, dtype) if inexact else math.inf
        far = max((magnitude(ours[n].double() - e) for n, e in exact.items() if e.is_floating_point()), default=0.0)
        gross = share > GROSS and not (inexact and far <= rounding)
        return Result(Verdict.WRONG if gross else Verdict.OVER, message, share)
    return Result(Verdict.RIGHT)


def _vanishes(name: str, ours: Tensors, exact: Tensors, rounding: float) -> bool:
    """Whether a gradient is zero, but for rounding, as that of a bias of rows is: it has no size of its own that
    rounding could be measured by, so that of the largest tensor is taken, times the largest input."""
    small = "gradient" in name and magnitude(exact[name]) <= rounding / 1e3
    return small and bool((ours[name].abs() <= rounding).all())


def magnitude(value: torch.Tensor) -> float:
    """Of the largest finite element."""
    return float(value.double().nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0


def _share(ours: Tensors, eager: Tensors, exact: Tensors, dtype: torch.dtype) -> float:
    floats = [name for name, value in eager.items() if value.is_floating_point()]
    return max(errors(ours[name], eager[name], exact[name], dtype).share for name in floats)


def _without_unstable(eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The reference, with NaN in rows where eager is far from it, which would loosen the bound of all others."""
    if not eager.is_floating_point():
        return exact
    finite = eager.isfinite() & exact.isfinite()
    size = exact[finite].abs().max() if finite.any() else 0.0
    far = (eager.double() - exact).abs() > 1000 * torch.finfo(eager.dtype).eps * size
    return exact.masked_fill(far.any(-1, keepdim=True) if far.dim() else far, torch.nan)
