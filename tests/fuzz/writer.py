"""Source text of a random program, written line by line: the choices come from one seeded generator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Choice = TypeVar("Choice")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A random program.

    text: defines the sizes, `dtype`, `inputs()` and the function `f` of those inputs.
    trained: whether gradients of all floating-point inputs are compared as well.
    route: how the program reaches the compiler, see `tests.fuzz.routes`.
    emitter: "reference", or "auto" for the kernels of this machine.
    intended: whether f is an attention that a person would expect to be fused.
    kinds: names of the choices made, for the counts of a record.
    """

    text: str
    trained: bool
    route: str
    emitter: str
    intended: bool
    kinds: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """In which most of it is computed."""
        return getattr(torch, self.text.split("dtype = torch.")[1].split()[0])


@dataclass
class Writer:
    """A program that is being written.

    lines: statements of `f` so far. arguments: names of its parameters, each with the expression that draws it.
    late: statements of `inputs` after all are drawn. lead: sizes of the dimensions before rows and columns.
    """

    rng: random.Random
    sizes: dict[str, int]
    dtype: str
    trained: bool
    lead: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    intended: bool = True
    used: dict[str, int] = field(default_factory=dict)

    def pick(self, *choices: Choice) -> Choice:
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def say(self, line: str) -> None:
        self.lines.append(line)

    def fresh(self, prefix: str) -> str:
        """A name that is not used yet."""
        count = self.used[prefix] = self.used.get(prefix, 0) + 1
        return prefix if count == 1 else f"{prefix}_{count}"

    def let(self, prefix: str, expression: str) -> str:
        """A new variable for an expression."""
        name = self.fresh(prefix)
        self.say(f"{name} = {expression}")
        return name

    def argument(self, prefix: str, expression: str) -> str:
        """A new parameter of `f`."""
        name = self.fresh(prefix)
        self.arguments[name] = expression
        return name

    def floats(self, prefix: str, *shape: str) -> str:
        """A new floating-point parameter of a shape, at times of an unusual size."""
        factor = self.rng.choices(["", " * 0.1", " * 4", " * 30"], [12, 2, 2, 1])[0]
        return self.argument(prefix, f"(torch.randn({', '.join(shape) or '()'}){factor}).to(dtype)")

    def note(self, kind: str) -> str:
        self.kinds.add(kind)
        return kind

    def text(self) -> str:
        names = ", ".join(self.arguments)
        comma = "," if len(self.arguments) == 1 else ""
        drawn = [f"    {name} = {expression}" for name, expression in self.arguments.items()]
        body = [f"    {line}" for line in self.lines]
        return "\n".join(
            [f"{', '.join(self.sizes)} = {', '.join(map(str, self.sizes.values()))}", f"dtype = torch.{self.dtype}"]
            + ["", "def inputs():", *drawn, *(f"    {line}" for line in self.late), f"    return ({names}{comma})"]
            + ["", f"def f({names}):", *body, ""]
        )  # fmt: skip
