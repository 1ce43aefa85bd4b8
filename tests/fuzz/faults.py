"""Faults put into the compiler on purpose, and how many random functions (for those of `kernel_faults`: specs) it takes
until each is found.

A fault is a context manager that patches one function of a pass, or one field of every spec that passes make. `measure`
writes the first seed that finds each.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from fusion.ir import AttentionSpec, Expr, Normalizer, integers
from fusion.ir.expr import ONE, I, J, const, coord, node, rebuild, substitute, walk
from fusion.ir.ops import apply, where
from fusion.passes import marks
from fusion.passes.pullback import casts, pointwise, pullback, views
from fusion.passes.recognize import softmaxes
from fusion.passes.specify import calls
from fusion.passes.trace import inplace
from tests.fuzz import kernel_faults
from tests.fuzz.campaign import BAD, Record
from tests.fuzz.check import check
from tests.fuzz.functions import program

aten = torch.ops.aten
Change = Callable[[AttentionSpec], AttentionSpec]
Fault = Callable[[], Any]
FAULTS: dict[str, Fault] = {}


def _in_specs(name: str) -> Callable[[Change], Change]:
    """A fault that is a change of specs."""

    def register(change: Change) -> Change:
        made = calls.specify

        def specify(*arguments: Any) -> Any:
            found = made(*arguments)
            return replace(found, spec=change(found.spec))

        FAULTS[name] = lambda: mock.patch.object(calls, "specify", specify)
        return change

    return register


def _score(change: Callable[[Expr], Expr]) -> Change:
    return lambda spec: replace(spec, score=change(spec.score), mask=None)


def _constants(change: Callable[[float], float]) -> Callable[[Expr], Expr]:
    def leaf(part: Expr) -> Expr | None:
        return const(change(part.value)) if part.op == "const" and isinstance(part.attr, float) else None

    return lambda expr: rebuild(expr, leaf)


def _shifted_keys(expr: Expr) -> Expr:
    """Predicates of positions are those of the next key."""
    return rebuild(expr, lambda part: _shifted(part) if part.op in ("ile", "ilt", "ieq") else None)


def _shifted(part: Expr) -> Expr:
    return node(part.op, tuple(substitute(a, {J: integers.add(J, 1)}) for a in part.args), part.kind)


_in_specs("mask off by one")(_score(_shifted_keys))
_in_specs("fill of -inf becomes finite")(_score(_constants(lambda x: -3.0e38 if x == -math.inf else x)))
_in_specs("fill of finfo.min becomes -inf")(_score(_constants(lambda x: -math.inf if x < -1e30 else x)))
_in_specs("weights after the softmax dropped")(lambda spec: replace(spec, weight=ONE))
_in_specs("sinks dropped")(lambda spec: replace(spec, sinks=()))
_in_specs("sum of rows without what is added to it")(lambda spec: replace(spec, row_scale=None))
_in_specs("dead rows give zero")(
    lambda spec: replace(spec, normalizer=Normalizer.SAFE_SOFTMAX if spec.row_scale is None and not spec.sinks
                         and spec.normalizer is Normalizer.SOFTMAX else spec.normalizer)
)  # fmt: skip


@_in_specs("first dimension of V's index ignored")
def _one_batch_of_values(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, v=tuple(substitute(e, {coord("b0"): const(0)}) for e in spec.v))


@_in_specs("heads that share keys, the wrong ones")
def _heads(spec: AttentionSpec) -> AttentionSpec:
    def other(part: Expr) -> Expr | None:
        return integers.mod(*part.args) if part.op == "floordiv" and part.args[0].op == "coord" else None

    return replace(spec, k=tuple(rebuild(e, other) for e in spec.k))


@_in_specs("a loaded bias is read at the wrong row")
def _rows_of_bias(spec: AttentionSpec) -> AttentionSpec:
    def other(part: Expr) -> Expr | None:
        if part.op != "load" or I not in part.args:
            return None
        return node("load", tuple(const(0) if a is I else a for a in part.args), part.kind, part.attr)

    return replace(spec, score=rebuild(spec.score, other))


@contextmanager
def _scales(change: Callable[[Expr], Expr]) -> Iterator[None]:
    product = pullback.PullBack.product

    def changed(self: Any, found: Any) -> Expr:
        return product(self, replace(found, scale=change(found.scale)))

    with mock.patch.object(pullback.PullBack, "product", changed):
        yield


FAULTS["scale twice"] = lambda: _scales(lambda scale: apply("fmul", scale, scale))
FAULTS["scale of operands dropped"] = lambda: _scales(lambda scale: ONE)


def _builder(packet: Any, change: Callable[[casts.Call], Expr | None]) -> Fault:
    return lambda: mock.patch.dict(pointwise.BUILDERS, {packet: change})


def _without_loads(call: casts.Call) -> Expr | None:
    """The sum without a bias that is read."""
    left, right = call.args[:2]
    read = isinstance(right, Expr) and any(part.op == "load" for part in walk(right))
    return left if read and isinstance(left, Expr) else _ADD(call)


_ADD = pointwise.BUILDERS[aten.add]
FAULTS["bias dropped"] = _builder(aten.add, _without_loads)
FAULTS["alpha of an addition ignored"] = _builder(
    aten.add, lambda call: _ADD(replace(call, kwargs={k: v for k, v in call.kwargs.items() if k != "alpha"}))
)
FAULTS["comparison without equality"] = _builder(aten.le, pointwise.BUILDERS[aten.lt])
FAULTS["operands of a difference swapped"] = _builder(
    aten.rsub, lambda call: pointwise.BUILDERS[aten.sub](call)
)  # fmt: skip
FAULTS["tanh for sigmoid"] = _builder(aten.sigmoid, pointwise.BUILDERS[aten.tanh])


@contextmanager
def _rounded_to_float16() -> Iterator[None]:
    """Constants in the range of float16 in any program. (Those that are not rounded at all are those of float64, which
    is no fault: where eager is infinite for its rounding, float64 may stand in its place.)"""
    rounded = casts.round_constants
    with contextlib.ExitStack() as stack:
        for module in (casts, pointwise):
            narrow = mock.patch.object(module, "round_constants", lambda value, dtype: rounded(value, torch.float16))
            stack.enter_context(narrow)
        yield


def _swallowed(value: Expr, mask: Expr, dtype: torch.dtype) -> Expr | None:
    """The sum with a selection, as if a score were lost in every constant below -10."""
    if mask.op != "where":
        return None
    condition, *arms = mask.args
    return where(condition, *(arm if arm.is_const and arm.value < -10 else value + arm for arm in arms))


FAULTS["constants are rounded to float16"] = _rounded_to_float16
FAULTS["every negative constant swallows scores"] = lambda: mock.patch.object(casts, "_add_hard_mask", _swallowed)


def _rule(packet: Any, change: Callable[..., Any]) -> Fault:
    return lambda: mock.patch.dict(views._RULES, {packet: change})


def _late_slice(node: Any, args: dict[str, Any], index: Any, bounds: Any) -> Any:
    found: Any = _SLICE(node, args, index, bounds)
    dim = args["dim"] % len(found)
    return found if found[dim] is index[dim] else (*found[:dim], integers.sub(found[dim], 1), *found[dim + 1 :])


_SLICE = views._RULES[aten.slice]
FAULTS["slices begin one early"] = _rule(aten.slice, _late_slice)
FAULTS["transposition of equal sizes ignored"] = _rule(
    aten.mT,
    lambda node, args, index, bounds: index if _square(node) else _MT(node, args, index, bounds),
)
_MT = views._RULES[aten.mT]
FAULTS["repeat for repeat_interleave"] = _rule(
    aten.repeat_interleave,
    lambda node, args, index, bounds: _wrapped(node, args, index),
)


def _square(node: Any) -> bool:
    shape = node.meta["val"].shape
    return shape[-1] == shape[-2]


def _swapped(index: Any) -> Any:
    return (*index[:-2], index[-1], index[-2])


def _wrapped(node: Any, args: dict[str, Any], index: Any) -> Any:
    dim = args["dim"] % len(index)
    own = args["self"].meta["val"].shape[dim]
    return (*index[:dim], integers.mod(index[dim], own), *index[dim + 1 :])


def _next_column(packet: Any) -> Fault:
    made = pullback._OPERATIONS[packet]

    def shifted(pull: Any, here: Any, args: dict[str, Any], index: Any) -> Expr | None:
        return made(pull, here, args, (*index[:-1], integers.add(index[-1], 1)))

    return lambda: mock.patch.dict(pullback._OPERATIONS, {packet: shifted})


FAULTS["tril off by one"], FAULTS["triu off by one"] = map(_next_column, (aten.tril, aten.triu))
FAULTS["changes in place not seen"] = lambda: mock.patch.object(
    marks.Mark, "__call__", lambda self, node: () if self is marks.mutations else node.meta.get(self.key, self.default)
)
FAULTS["writes seen through aliases taken for private"] = lambda: mock.patch.object(
    inplace, "_only_through", lambda *about: True
)
FAULTS["gradients flow through detach"] = lambda: mock.patch.object(
    marks.Mark, "__call__",
    lambda self, node: False if self is marks.stop_gradient else node.meta.get(self.key, self.default),
)  # fmt: skip
FAULTS["any shift is ignored by the softmax"] = lambda: mock.patch.object(
    softmaxes, "_is_ignored", lambda shift, columns: True
)
FAULTS["softmax over any dimension"] = lambda: mock.patch.object(
    pullback.nodes, "normalize_dim", lambda dim, rank: rank - 1
)
FAULTS["beta of baddbmm ignored"] = lambda: mock.patch.object(
    pullback.PullBack, "_with_added", lambda self, here, index, product: product
)


def _first_element(new: Any, old: Any, index: Any) -> Any:
    found = views.broadcast_index(new, old, index)
    return (integers.integer(0), *found[1:]) if len(old) > 3 else found


FAULTS["four-dimensional arguments are read at their first element"] = lambda: mock.patch.object(
    pullback, "broadcast_index", _first_element
)


def found_by(fault: Fault, seeds: Iterable[int], emitter: str | None = "reference") -> tuple[int | None, int]:
    """(the first seed whose function comes out wrong with the fault and right without it, functions run)."""
    ran = 0
    for seed in seeds:
        drawn = program(seed)
        if emitter is not None and (drawn.emitter != emitter or drawn.route != "trace"):
            continue
        ran += 1
        with fault():
            bad = check(drawn, verify=False).verdict in BAD
        if bad and check(drawn, verify=False).verdict not in BAD:
            return seed, ran
    return None, ran


def measure(record: Record, seeds: Iterable[int], minutes: float | None, name: str = "") -> int:
    """Looks for every fault with this in its name, until the time is over; 1 where one is not found by all seeds."""
    missed = 0
    for fault in (fault for fault in FAULTS | kernel_faults.FAULTS if name in fault):
        if record.is_over(minutes):
            break
        in_kernels = fault in kernel_faults.FAULTS
        find = kernel_faults.found_by if in_kernels else found_by
        seed, ran = find((FAULTS | kernel_faults.FAULTS)[fault], seeds)
        missed += seed is None
        line = {"fault": fault, "seed": seed, "specs" if in_kernels else "functions": ran}
        record.write(line)
        print(json.dumps(line), flush=True)
    return 1 if missed else 0
