"""Vector functions of MKL, which torch uses for exp, tanh and others on x86."""

import functools

import torch

from fusion.torch_private.fake import unset_fake_temporarily
from fusion.torch_private.modes import without_function_modes
from fusion.torch_private.tracing import disable_proxy_modes_tracing

TAKEN = (
    torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.log,
    torch.log10, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh, torch.trunc,
)  # fmt: skip


@functools.cache
def resolve() -> None:
    """Call each of them once, on one element; once in a process, before the first graph is compiled.

    MKL looks for a function's code at the first call. Where several threads make that call at the same time, MKL 2024.2
    may let one of them run code of low accuracy, with relative errors of 5e-5 (pytorch/pytorch#188792). Then torch's
    result is wrong, once in a process. An earlier call by one thread prevents it.
    """
    with without_function_modes(), unset_fake_temporarily(), disable_proxy_modes_tracing():
        for dtype in (torch.float32, torch.float64):
            element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for function in TAKEN:
                function(element)
