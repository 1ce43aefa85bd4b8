"""Processes that tests start: forks of one process that has imported torch and fusion, which takes seconds.

The environment is that of the first start; what differs is set by the function that runs.
"""

from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from torch import multiprocessing

IMPORTED = ("torch._dynamo", "torch.distributed.tensor", "fusion.backend", "fusion.codegen.cpu", "fusion.sequences")
_METHOD = "forkserver"


def context() -> Any:
    """Context of `multiprocessing` whose processes are such forks."""
    forkserver.set_forkserver_preload([*IMPORTED])
    return multiprocessing.get_context(_METHOD)


def run(function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """`torch.multiprocessing.spawn` of such processes: `function(rank, *args)` in each, until all have ended."""
    context()
    multiprocessing.start_processes(function, args, nprocs, start_method=_METHOD)
