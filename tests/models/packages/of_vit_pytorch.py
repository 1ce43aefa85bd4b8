"""vit-pytorch: the model of every module, which is its last class, its sizes by rules over the names of arguments."""

import functools
import importlib
import inspect
import pkgutil
from typing import Any

import torch
import vit_pytorch  # pyright: ignore[reportMissingImports]
from torch import nn

from tests.models.candidates import Candidate
from tests.models.inputs import Inputs
from tests.models.signature import arguments

PIXELS, FRAMES, SAMPLES = 64, 4, 128
_RULES: list[tuple[str, Any]] = [
    ("image_size|img_size", PIXELS),
    ("(image_)?patch_size", 8),
    ("freq_patch_size", 8),
    ("frame_patch_size", 2),
    ("frames|num_frames|max_frames", FRAMES),
    ("seq_len", SAMPLES),
    ("num_classes", 5),
    ("dim|embedding_dim|sm_dim|lg_dim", 64),
    ("s[1-4]_emb_dim", 64),
    ("depth|cls_depth|spatial_depth|temporal_depth|.*_depth", 2),
    ("heads|.*_heads", 4),
    ("mlp_dim|.*_mlp_dim", 96),
    ("dim_head|.*_dim_head", 16),
    ("num_residual_streams", 4),
    ("channels", 3),
]
_STAGES = {"dim": 32, "depth": (1, 1, 2, 1), "num_classes": 5, "heads": (1, 2, 4, 8)}
_PYRAMID = {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1)}
_MAX_VIT = {"depth": (1, 1), "dim_head": 16, "window_size": 4, "dim": 32, "dim_conv_stem": 32}
_CCT = {"n_conv_layers": 2, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 5}
_VOLUME = {"ndim": 3, "input_shape": (8, 16, 16), "patch_size": (2, 4, 4)}
_SPECIAL: dict[str, dict[str, Any]] = {
    "ats_vit": {"max_tokens_per_depth": (48, 24)},
    "nest": {"num_hierarchies": 3, "block_repeats": (1, 1, 2)},
    "max_vit": _MAX_VIT,
    "max_vit_with_registers": _MAX_VIT,
    "mobile_vit": {
        "image_size": (64, 64),
        "patch_size": (2, 2),
        "dims": [48, 64, 80],
        "channels": [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96],
    },
    "pit": {"depth": (1, 2)},
    "levit": {"depth": 2, "mlp_mult": 2, "dim": (64, 96, 128), "heads": (2, 3, 4)},
    "scalable_vit": {**_STAGES, "reduction_factor": (8, 4, 2, 1), "window_size": (8, 8, None, None)},
    "sep_vit": {**_STAGES, "window_size": 2},
    "crossformer": {**_PYRAMID, "local_window_size": 2, "global_window_size": (4, 2, 2, 1)},
    "regionvit": {**_PYRAMID, "window_size": 2},
    "cross_vit": {"sm_patch_size": 8, "lg_patch_size": 16},
    "look_vit": {"patch_size": 16, "highres_patch_size": 8},
    "twins_svt": {f"s{stage}_{part}": 2 for stage in (1, 2, 3, 4) for part in ("local_patch_size", "global_k")},
    "looped_vit": {"image_size": PIXELS, "patch_size": 8},
    "t2t": {"depth": 2, "heads": 4, "mlp_dim": 96},
    "jumbo_vit": {"num_jumbo_cls": 1, "jumbo_cls_k": 2},
    "wwt": {"num_slots": 8},
    "vit_nd": _VOLUME,
    "vit_nd_pope": _VOLUME,
    "vit_nd_rotary": _VOLUME,
    "cct": _CCT,
    "cct_3d": _CCT,
}


def candidates() -> dict[str, Candidate]:
    """Module name -> candidate."""
    found = {}
    for module in pkgutil.iter_modules(vit_pytorch.__path__):
        found[module.name] = Candidate(
            name=module.name,
            package="vit-pytorch",
            class_name=module.name,
            make=functools.partial(_build, module.name),
            kinds=lambda model: ["pixels", "224 pixels", "video", "series", "volume", "list of pictures"],
            feed=_feed,
        )
    return found


def _build(name: str) -> nn.Module:
    module = importlib.import_module(f"vit_pytorch.{name}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    model_class = [c for c in classes if issubclass(c, nn.Module)][-1]
    return model_class(**arguments(model_class, _RULES, **_SPECIAL.get(name, {})))


def _feed(kind: str, model: nn.Module, batch: int) -> Inputs:
    name = next(iter(inspect.signature(model.forward).parameters))
    shapes = {
        "pixels": (3, PIXELS, PIXELS),
        "224 pixels": (3, 224, 224),
        "video": (3, FRAMES, PIXELS, PIXELS),
        "series": (3, SAMPLES),
        "volume": (3, 8, 16, 16),
    }
    if kind == "list of pictures":
        return {name: [torch.randn(3, PIXELS, PIXELS // (1 + index)) for index in range(batch)]}
    return {name: torch.randn(batch, *shapes[kind])}
