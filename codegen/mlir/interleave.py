"""Lines of MLIR that do not depend on each other, put side by side."""

from __future__ import annotations

import re

_NAME = re.compile(r"%\w+")


def in_turns(streams: list[list[str]]) -> list[str]:
    """A line of each stream in turns, where it uses no value that is still to come. Streams with regions follow each
    other."""
    if any(line.endswith("{") for lines in streams for line in lines):
        return [line for lines in streams for line in lines]
    waiting = {_NAME.findall(line)[0] for lines in streams for line in lines if " = " in line}
    rest, merged = [list(reversed(lines)) for lines in streams], []
    while any(rest):
        for lines in rest:
            if not lines:
                continue
            names = _NAME.findall(lines[-1])
            defined = names[:1] if " = " in lines[-1] else []
            if waiting.isdisjoint(names[len(defined) :]):
                waiting.difference_update(defined)
                merged.append(lines.pop())
    return merged
