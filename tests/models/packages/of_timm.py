"""timm: of every module, and of every first word among its models' names, the smallest model that its name promises.

Pure convolution nets are among them: they show that a compiler of attention leaves the rest alone.
"""

import functools
import inspect
import re
from typing import Any

import timm
import torch
from torch import nn

from tests.models.candidates import Candidate
from tests.models.inputs import Inputs

PIXELS = (128, 224, 256)
_SIZES = """zepto atto femto pico nano xxtiny xxt test xtiny xxs micro xs tiny extra t s mini small little lite
light""".split()
_LARGE = "m medium b base l large xl xlarge h huge g giant gigantic so150m so400m enormous".split()


def candidates() -> dict[str, Candidate]:
    """Model name -> candidate."""
    smallest: dict[tuple[str, str], str] = {}
    for name in timm.list_models():
        key = timm.model_entrypoint(name).__module__, re.findall(r"^(?:test_)?[a-z]+", name)[0]
        if key not in smallest or _promised_size(name) < _promised_size(smallest[key]):
            smallest[key] = name
    return {
        name: Candidate(
            name=name,
            package="timm",
            class_name=module.rsplit(".", 1)[-1],
            make=functools.partial(_build, name),
            kinds=_kinds,
            feed=_feed,
        )
        for (module, _), name in smallest.items()
    }


def _promised_size(name: str) -> tuple[int, int, int]:
    """A key to sort by: words for sizes, then the sum of the numbers, then the length of the name."""
    words = name.split("_")
    rank = min((_SIZES.index(w) for w in words if w in _SIZES), default=len(_SIZES))
    rank += sum(100 * (1 + _LARGE.index(w)) for w in words if w in _LARGE)
    return rank, sum(int(n) for n in re.findall(r"\d+", name)), len(name)


def _build(name: str) -> nn.Module:
    """With few pixels, where the architecture is made for a number of pixels."""
    try:
        return timm.create_model(name, img_size=PIXELS[0])
    except (TypeError, AssertionError, ValueError, RuntimeError):
        return timm.create_model(name)


def _kinds(model: Any) -> list[str]:
    own = getattr(getattr(model, "patch_embed", None), "img_size", None) or model.default_cfg["input_size"][-2:]
    sizes = [*PIXELS, max(own) if isinstance(own, tuple) else own]
    if model.default_cfg.get("fixed_input_size") or hasattr(model, "patch_embed"):
        sizes.reverse()
    return list(dict.fromkeys(f"{size} pixels" for size in sizes if isinstance(size, int)))


def _feed(kind: str, model: Any, batch: int) -> Inputs:
    size = int(kind.split()[0])
    name = next(iter(inspect.signature(model.forward).parameters))
    return {name: torch.randn(batch, model.default_cfg["input_size"][0], size, size)}
