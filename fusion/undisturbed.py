"""Isolation of the analysis from settings of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fusion.torch_private.autograd import hooks_allowed, recording
from fusion.torch_private.fake import unset_fake_temporarily
from fusion.torch_private.tracing import disable_proxy_modes_tracing


@contextlib.contextmanager
def by_autograd() -> Iterator[None]:
    """Switch off the caller's autograd settings during the analysis: hooks on saved tensors, of which a checkpoint
    counts some, or their ban, and anomaly mode, which made-up values would trigger."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks_allowed(), hooks(_same, _same), torch.autograd.set_detect_anomaly(False):
        yield


@contextlib.contextmanager
def by_compilation() -> Iterator[None]:
    """Plain torch on real tensors, whatever compilation is in progress."""
    with (
        unset_fake_temporarily(),
        disable_proxy_modes_tracing(),
        torch.inference_mode(False),
        torch.enable_grad(),
        recording(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
