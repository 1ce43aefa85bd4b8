"""torch's structured log as fusion.torch_private.dynamo writes it."""

import json
import subprocess
import sys
from pathlib import Path

from fusion.torch_private import dynamo as caches

_PROGRAM = """
from fusion.torch_private import dynamo as caches
import torch
assert caches.is_tracing_log_on()
caches.write_to_tracing_log("fusion_test", "the text")
"""


def test_nobody_reads_by_default() -> None:
    """Torch finds that out at the first text of a process."""
    caches.write_to_tracing_log("fusion_test", "unread")
    assert not caches.is_tracing_log_on()


def test_a_text_is_found_in_the_log(tmp_path: Path) -> None:
    import os

    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, env={**os.environ, "TORCH_TRACE": str(tmp_path)})
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert json.dumps({"name": "fusion_test", "encoding": "string"})[1:-1] in text and "the text" in text
