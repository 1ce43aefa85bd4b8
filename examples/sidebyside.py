"""Time a few ways to compute the same thing, in turns, so that whatever disturbs the machine disturbs all of them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def medians(calls: dict[str, Callable[[], Any]], *, rounds: int = 5) -> dict[str, float]:
    """Median seconds per call by name. The calls have run before: compilation is not in here."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(samples) for name, samples in times.items()}


def show(title: str, times: dict[str, float], extra: dict[str, dict[str, str]] | None = None) -> None:
    """Print a table: time, speed relative to the first line, and further columns given as {column: {name: text}}."""
    table = Table(title=title, title_justify="left")
    for column in ("", "ms", "speed", *(extra or {})):
        table.add_column(column, justify="left" if not column else "right")
    first = next(iter(times.values()))
    for name, seconds in times.items():
        cells = [column.get(name, "") for column in (extra or {}).values()]
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{first / seconds:.2f}x", *cells)
    Console().print(table)
