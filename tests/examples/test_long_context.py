"""examples/long_context.py: what runs out of memory on one process does not on two and four, with the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"


@pytest.mark.long
@pytest.mark.skipif(
    not (sys.platform == "linux" and dist.is_available() and dist.is_gloo_available()),
    reason="the memory of a process is limited on Linux; torch needs distributed with gloo",
)
def test_memory_falls_with_the_number_of_processes() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE), "4096", "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    added = [int(text) for text in re.findall(r"(\d+) MiB added$", done.stdout, flags=re.M)]
    assert len(added) == 3  # one process without a limit, two, four
    assert added[0] > 1.5 * added[1] > 2 * added[2]
