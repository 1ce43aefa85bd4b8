"""Records of the fastest tiles: a file for each module, device name and version of Triton, with all measurements."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_type_hints

import torch

from fusion import caching
from fusion.planning.choice import Tile
from fusion.planning.gpu_layout import power

from . import flex
from .candidates import MOST

log = logging.getLogger(__name__)

FORMAT = 2  # of the files; to be raised when a tile or a situation comes to mean something else


def _header(digest: str, device: torch.device) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"triton": triton.__version__, "torch": torch.__version__, "flash": flex.installed()}  # of the peers
    return {"format": FORMAT, "module": digest, "device": name, **versions}


def name_of(digest: str, device: torch.device) -> str:
    """File with the choices for one module on one kind of device."""
    key = hashlib.sha256(json.dumps(_header(digest, device)).encode()).hexdigest()[:16]
    return f"tiles_{key}.json"


def remembered(digest: str, device: torch.device) -> dict[str, Any]:
    """Choices for a module on a device by kernel and situation; none from files that cannot be read or are of another
    module, device or version."""
    name = name_of(digest, device)
    try:
        content = json.loads(caching.read(name))
        if not _header(digest, device).items() <= content.items():
            return {}
        return {name: choice for name, choice in content["choices"].items() if _sound(choice["tile"], choice["peer"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as problem:
        log.debug("%s is ignored: %s", name, problem)
        return {}


def _sound(tile: dict[str, Any], peer: object) -> bool:
    """Whether this is a valid record of a choice in a file."""
    kinds = get_type_hints(Tile)
    if not isinstance(peer, str):
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
    choices = remembered(digest, device) | {name: choice}
    try:
        text = json.dumps(_header(digest, device) | {"choices": choices}, indent=1)
        caching.save(name_of(digest, device), text.encode())
    except OSError as problem:
        log.info("what was measured is not remembered: %s", problem)
