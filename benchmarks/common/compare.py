"""Comparisons of one feature with its peers: cases in turns in one process, as a Markdown table.

A module of comparisons names its studies, `STUDIES`, and calls `main`. A study yields the cases of the command line's
options. The result of "fusion" is compared with float64 before it is timed, wherever a case has a plain function.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import results
from benchmarks.common.measuring import Entry, interleave
from fusion.exactness import errors
from fusion.torch_private.tensors import tree_leaves

torch._inductor.config.compile_threads = 1  # workers that start up would disturb the first cases
torch._dynamo.config.recompile_limit = 1000  # programs made by one function share its code

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A line of the table. functions: contestants by name, "fusion" first, called with `tensors`, or None where a peer
    cannot express the case; tensors that need a gradient get one in a training step. plain: the function in eager mode,
    whose float64 result is the reference; exact: what computes it, where that is another (a model in float64).
    """

    name: str
    tensors: list[Tensor]
    functions: Mapping[str, Function | None]
    plain: Function | None = None
    exact: Function | None = None


Study = Callable[[argparse.Namespace], Iterator[Case]]


def compiled(function: Function, backend: str = "fusion", dynamic: bool | None = False, **options: Any) -> Function:
    """The function compiled by a backend, with static shapes unless told otherwise."""
    return torch.compile(function, backend=backend, dynamic=dynamic, options=options or None)


def contestants(function: Function, *, eager: bool = False, **options: Any) -> dict[str, Function]:
    """The function compiled by fusion (with its options) and by Inductor, and as it is."""
    return {"fusion": compiled(function, **options), "Inductor": compiled(function, "inductor")} | (
        {"eager": function} if eager else {}
    )


def gradients(tensors: list[Tensor], outputs: list[Tensor]) -> list[Tensor | None]:
    """Gradients of half the sum of squares, for all tensors that need one."""
    wanted = [x for x in tensors if x.requires_grad]
    outputs = [out.values() if out.is_nested else out for out in outputs if out.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, [out.detach() for out in outputs], allow_unused=True))


def outputs_of(function: Function | None, tensors: list[Tensor]) -> list[Tensor]:
    assert function is not None
    return [x for x in tree_leaves(function(*tensors)) if isinstance(x, Tensor) and x.is_floating_point()]


def step(function: Function | None, tensors: list[Tensor]) -> list[Tensor | None]:
    """The outputs of a function, or the gradients of its inputs if any need them."""
    outputs = outputs_of(function, tensors)
    return gradients(tensors, outputs) if any(x.requires_grad for x in outputs) else [*outputs]


def fault_of(case: Case) -> str:
    """Where fusion's result is farther from float64 than the numerics rule allows; "" where it is not."""
    if case.plain is None:
        return ""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in case.tensors]
    ours, plain = (step(function, case.tensors) for function in (case.functions["fusion"], case.plain))
    results = ours, plain, step(case.exact or case.plain, wide)
    for result, eager, exact in zip(*results, strict=True):
        if result is not None and eager is not None and exact is not None:
            comparison = errors(result, eager, exact)
            if comparison.share > 1:
                return f"wrong: {comparison}"
    return ""


def entry_of(name: str, case: Case, backward: bool) -> Entry:
    """A contestant: results, a training step, or the backward alone."""
    function = case.functions[name]
    if function is None:
        return Entry(name=name)
    if backward:
        setup = functools.partial(outputs_of, function, case.tensors)
        return Entry(name=name, setup=setup, call=functools.partial(gradients, case.tensors))
    return Entry(name=name, call=functools.partial(step, function, case.tensors))


def line(case: Case, options: argparse.Namespace, backward: bool) -> list[str]:
    """Median milliseconds of each contestant, and how many times fusion's they are."""
    if fault := fault_of(case):
        return [case.name, fault]
    entries = [entry_of(name, case, backward) for name in case.functions]
    clock = time.process_time if options.busy else time.perf_counter
    interleave(entries, seconds=options.seconds, settle=options.settle, clock=clock)
    ours, *others = [entry.median for entry in entries]
    assert ours is not None
    times = [f"{1e3 * time:.3g}" if time else "" for time in (ours, *others)]
    return [case.name, *times, *(f"{time / ours:.2f}" if time else "" for time in others)]


def table(study: Study, options: argparse.Namespace, backward: bool = False) -> tuple[str, bool]:
    """The table, printed line by line, and whether a result was wrong."""
    lines: list[str] = []
    wrong = False
    for case in study(options):
        if not lines:
            peers = list(case.functions)[1:]
            head = ["case", "fusion, ms", *peers, *(f"{peer} / fusion" for peer in peers)]
            lines += ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
            print("\n".join(lines))
        cells = line(case, options, backward)
        wrong |= cells[1].startswith("wrong")
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        torch.compiler.reset()
    return "\n".join(lines) + "\n", wrong


def main(
    doc: str | None,
    studies: dict[str, Study],
    *,
    backward: tuple[str, ...] = (),
    train: bool = False,
    settle: float = 0,
) -> int:
    """Run the study that the command line names; 1 if a result was wrong. backward: studies that time the backward
    alone; train: all studies need gradients; settle: seconds (`interleave`)."""
    parser = results.parser(doc)
    parser.add_argument("study", choices=list(studies), nargs="?" if len(studies) == 1 else None, default=[*studies][0])
    parser.add_argument("--lengths", nargs="+", type=int, help="rows and keys")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--d", type=int, default=64, help="head dimension, where a study asks")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="some of the study's")
    parser.add_argument("--train", action="store_true", help="a step with gradients")
    parser.add_argument(
        "--busy", action="store_true", help="processor time of one thread, for a machine with other work"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="per line, all contestants together")
    parser.add_argument("--output", type=Path, help="a file for the table, with machine and versions")
    options = parser.parse_args()
    options.train, options.settle = options.train | train, settle
    if options.busy:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    head = results.heading(f"{options.study.replace('_', ' ').capitalize()}, {options.dtype}")
    print(head, end="")
    with torch.set_grad_enabled(options.train):
        text, wrong = table(studies[options.study], options, options.study in backward)
    if options.output:
        options.output.write_text(head + text)
    return int(wrong)


def draw(options: argparse.Namespace, *shapes: tuple[int, ...], train: bool | None = None) -> list[Tensor]:
    """Normal tensors in the dtype of the options; they need gradients in a training step."""
    wanted = options.train if train is None else train
    return [torch.randn(shape).to(getattr(torch, options.dtype)).requires_grad_(wanted) for shape in shapes]


def chosen(options: argparse.Namespace, cases: dict[str, Function]) -> Iterator[tuple[str, Function]]:
    """The cases that the command line names, or all."""
    for name in options.cases or cases:
        yield name, cases[name]
