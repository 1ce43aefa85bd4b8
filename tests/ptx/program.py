"""PTX text as instructions: opcodes, operands, predicates and branches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.ptx.wave import Wave

Run = Callable[["Wave", "np.ndarray | None"], Any]
"""Execution of an instruction by the threads of a wave; mask: those that take part, None for all."""
Maker = Callable[[list[str], list[str], str], Run]
"""(parts of the opcode, operands, the line) -> the instruction's execution."""
OPCODES: dict[str, Maker] = {}
COLLECTIVE = {"bar", "shfl", "redux", "mma", "wgmma", "ldmatrix", "stmatrix", "elect", "mbarrier"}
"""Opcodes before which threads wait for those that took another branch."""
MAPS = 1 << 62
"""Address of the first tensor map among the parameters."""


def opcode(*names: str) -> Callable[[Maker], Maker]:
    """Decorator that registers the maker of opcodes with these first parts."""

    def register(maker: Maker) -> Maker:
        OPCODES.update(dict.fromkeys(names, maker))
        return maker

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """predicate: the register that selects threads. run: None of a branch, whose target is the number of an
    instruction."""

    line: str
    predicate: str | None
    negated: bool
    run: Run | None
    target: int


def operands_of(text: str) -> list[str]:
    """Operands at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def list_of(operand: str) -> list[str]:
    """Registers of a vector operand, `{%r1, %r2}`."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


class Program:
    """The kernel of a PTX module. params: (type, name) of its parameters, in order. maps: addresses of those
    that are tensor maps. constants: arrays in global memory.
    variables: addresses of arrays, in global, shared or local memory."""

    def __init__(self, ptx: str):
        entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.S)
        assert entry is not None, "no kernel in the PTX"
        arrays = re.findall(r"\.global \.align \d+ \.b8 (\w+)\[\d+\] = \{([^}]*)\}", ptx[: entry.start()])
        self.constants = {name: np.array([int(n) for n in text.split(",")], np.uint8) for name, text in arrays}
        local = re.search(r"\.local .*?(\w+)\[(\d+)\]", ptx)
        self.local_size = int(local.group(2)) if local else 0
        self.variables = {name: data.ctypes.data for name, data in self.constants.items()}
        self.variables |= dict.fromkeys(["global_smem", *([local.group(1)] if local else [])], 0)
        self.params = re.findall(r"\.param \.(\w+)(?: \.ptr)?[^,]*?(\w+_param_\d+)", entry.group(2))
        maps = [name for kind, name in self.params if kind == "align"]
        self.maps = {name: MAPS + 128 * number for number, name in enumerate(maps)}
        self.variables |= self.maps
        texts, self.labels = list[str](), dict[str, int]()
        for line in _statements(ptx[entry.end() :]):
            if label := re.fullmatch(r"([$\w]+):", line):
                self.labels[label.group(1)] = len(texts)
            else:
                texts += filter(None, (part.strip() for part in line.split(";")))
        self.code = [self._instruction(text, len(texts)) for text in texts]
        opcodes = (re.sub(r"^@\S+\s+", "", text).partition(".")[0] for text in texts)
        self.waits = [name in COLLECTIVE for name in opcodes] + [True]  # the last: at the end

    def _instruction(self, line: str, end: int) -> Instruction:
        predicate = re.match(r"@(!?)(%?\w+)\s+", line)
        name, _, rest = re.sub(r"\s+", " ", line[predicate.end() :] if predicate else line).partition(" ")
        parts, operands = name.split("."), operands_of(rest)
        branch = parts[0] in ("bra", "ret", "exit")
        if not branch and parts[0] not in OPCODES:
            raise NotImplementedError(f"the emulator has no {name}: {line}")
        return Instruction(
            line=line,
            predicate=predicate.group(2) if predicate else None,
            negated=bool(predicate and predicate.group(1)),
            run=None if branch else OPCODES[parts[0]](parts, operands, line),
            target=self.labels[operands[0]] if parts[0] == "bra" else end,
        )


def _statements(body: str) -> list[str]:
    """Lines of a kernel without comments, declarations and the braces of its scopes."""
    statements, begun, depth = [], False, 0
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if not begun:
            begun = line == "{"
            continue
        if line in ("{", "}"):
            depth += (line == "{") - (line == "}")
            if depth < 0:
                break
            continue
        if line.count("{") != line.count("}"):  # inline assembly has a scope of its own
            depth += line.startswith("{") - line.endswith("}")
            line = line.removeprefix("{").removesuffix("}").strip()
        if line and not line.startswith("."):
            statements.append(line)
    return statements
