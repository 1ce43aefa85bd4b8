"""Records of the fastest tiles: a file for each module, device name and version of Triton, with all measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_type_hints

import torch

from fusion import caching
from fusion.planning.choice import Tile
from fusion.planning.gpu_layout import power

from . import flex
from .candidates import MOST

FORMAT = 2  # of the files; to be raised when a tile or a situation comes to mean something else


def _records(digest: str, device: torch.device) -> caching.Records:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"triton": triton.__version__, "torch": torch.__version__, "flash": flex.installed()}  # of the peers
    return caching.Records("tiles", {"format": FORMAT, "module": digest, "device": name, **versions})


def remembered(digest: str, device: torch.device) -> dict[str, Any]:
    """Choices for a module on a device by kernel and situation."""
    return _records(digest, device).read(_sound)


def _sound(choice: Any) -> bool:
    """Whether this is a valid record of a choice in a file."""
    tile, kinds = choice["tile"], get_type_hints(Tile)
    if not isinstance(choice["peer"], str):
        return False
    if tile.keys() != kinds.keys() or any(type(tile[name]) is not kind for name, kind in kinds.items()):
        return False
    sizes = [tile[name] for name, kind in kinds.items() if kind is int and name != "stages"]
    return tile["stages"] >= 1 and all(1 <= size <= MOST and size == power(size) for size in sizes)


def remember(
    digest: str,
    device: torch.device,
    name: str,
    tile: Tile,
    seconds: Mapping[Tile | str, float],
    failed: Mapping[Tile | str, str],
    peer: str = "",
) -> None:
    """Add a choice to its file, with the measurements. peer: the implementation that is called in place of the
    kernel."""
    measured = [{"tile": str(other), "seconds": seconds[other]} for other in sorted(seconds, key=seconds.__getitem__)]
    choice = {
        "tile": asdict(tile),
        "peer": peer,
        "measured": measured,
        "failed": {str(t): text for t, text in failed.items()},
    }
    _records(digest, device).write(remembered(digest, device) | {name: choice})
