"""Tables of docs/versions.md, which `.ci/torches.py` and `.ci/versions.py` write."""

import re
from collections.abc import Callable


def release(version: str) -> tuple[int, ...]:
    """Numbers of a version, without what is said of its build."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def with_row(page: str, outcome: dict[str, str], key: Callable[[list[str]], tuple]) -> str:
    """The page with a row replaced or added, in the table whose first column is called as the first entry of `outcome`.
    key: of the cells of a row; rows are sorted by it, and rows of the same key are the same one."""
    lines, title = page.splitlines(), next(iter(outcome))
    first = next(k for k, line in enumerate(lines) if line.lower().startswith(f"| {title} |")) + 2
    last = next((k for k in range(first, len(lines)) if not lines[k].startswith("|")), len(lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last]]
    rows.append([value.replace("|", "/") for value in outcome.values()])
    by_key = {key(cells): f"| {' | '.join(cells)} |" for cells in rows}
    return "\n".join([*lines[:first], *(by_key[k] for k in sorted(by_key)), *lines[last:]]) + "\n"
