"""What autotune measures for one attention: every tile and schedule that it tries, and those that it does not trust."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import torch

from fusion.codegen.triton import autotune
from gpu_cells import Place, operands_of
from gpu_device import Device


@dataclass(slots=True, kw_only=True)
class Tuned:
    """seconds: of a launch, by tile; failed: why others have none. table: the tile without measuring."""

    title: str
    kernel: str
    flop: float
    table: str
    seconds: dict[str, float]
    failed: dict[str, str]


def tune(place: Place, device: Device) -> list[Tuned]:
    """Measure a place's forward kernels, whether or not choices are remembered from before."""
    found: list[Tuned] = []
    operands = operands_of(place, device)
    flop = place.definition.flop(place.problem)

    def note(digest, where, name, tile, seconds, failed) -> None:
        first = str(next(iter(seconds), tile))
        found.append(Tuned(
            title=str(place), kernel=name.partition(":")[0], flop=flop, table=first,
            seconds={str(tile): each for tile, each in seconds.items()},
            failed={str(tile): why.splitlines()[0][:200].replace("|", "/") for tile, why in failed.items()},
        ))  # fmt: skip

    torch._dynamo.reset()
    with (
        torch.no_grad(),
        mock.patch.dict(os.environ, FUSION_UNTRIED="1"),
        mock.patch.object(autotune, "remember", note),
        mock.patch.object(autotune, "remembered", lambda digest, where: {}),
    ):
        device.tuned(place.definition.plain)(*operands)
    return found
