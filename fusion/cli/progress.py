"""Lines on a terminal about work that takes more than two seconds: compiling, tuning, comparing, measuring.

The package logs what it begins to `fusion.progress`; every two seconds the last of it is printed, if it is new.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

INTERVAL = 2.0


class _Latest(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Progress of what runs inside, on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    log, latest, done, started = logging.getLogger("fusion.progress"), _Latest(), threading.Event(), time.monotonic()

    def report() -> None:
        printed = ""
        while not done.wait(INTERVAL):
            if latest.text != printed:
                printed = latest.text
                print(f"{time.monotonic() - started:4.0f} s  {printed}", file=sys.stderr, flush=True)

    log.addHandler(latest)
    log.setLevel(logging.INFO)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        log.removeHandler(latest)
        log.setLevel(logging.NOTSET)
