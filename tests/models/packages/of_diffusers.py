"""diffusers: its transformers, UNets and autoencoders, their signatures' defaults made small by rules over the names.

Inputs are made by the names of `forward`'s parameters; what a model calls latents may have five layouts, tried in turn.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import models
from torch import nn

from tests.models.candidates import Candidate
from tests.models.inputs import Inputs
from tests.models.signature import arguments

WIDTH, HEADS, HEAD = 64, 4, 16
SIDE, FRAMES, TEXT, PIXELS = 16, 3, 11, 64


def _like(default: Any, values: list) -> Any:
    return type(default)(values)


def _axes(default: Any) -> Any:
    """Parts of a head's width for the axes of a rotary embedding."""
    return _like(default, {1: [HEAD], 2: [8, 8], 3: [4, 6, 6], 4: [4, 4, 4, 4]}[len(default)])


def _stages(default: Any) -> Any:
    if isinstance(default, int):
        return WIDTH
    return _like(default, [WIDTH // 2] + [WIDTH] * (len(default) - 1))


def _at_most(limit: int) -> Callable:
    return lambda default: default if isinstance(default, (tuple, list)) else min(default, limit)


def _ones(default: Any) -> Any:
    return 1 if isinstance(default, int) else _like(default, [1] * len(default))


_RULES: list[tuple[str, Any]] = [
    ("axes_dims?(_rope)?|rope_axes_dim|rope_dim(_list)?|mrope_section", _axes),
    ("(num_)?(kv_heads|key_value_(attention_)?heads|n_kv_heads)|n_kv_heads", 2),
    (".*num_(attention_|cross_attention_)?heads|n_?heads|.*_heads", HEADS),
    (".*head_dim", HEAD),
    (".*block_out_channels|stage_channels", _stages),
    (".*norm_num_groups|groups", 8),
    (".*layers_per_(down_|up_|mid_)?block", _ones),
    ("(num_)?(.*_)?layers|n_?layers|.*depth|num_.*_blocks|n_.*layers|mmdit_layers|nlayers", _at_most(2)),
    ("(in|out|io|latent|audio_in|audio_out)_channels|(in|out)_visual_dim|z_dim|z_channels", _at_most(16)),
    ("base_dim|ch|base_channels|channels", 16),
    ("ffn?_(hidden_size|dim|inner_dim)|intermediate_(size|dim)|moe_intermediate_dim|.*_intermediate_size", 96),
    ("freq_dim|timestep_features_dim|addition_time_embed_dim|condition_dim|timestep_embed_dim", 32),
    ("sample_(size|height|width)|base_height|base_width|pos_embed_max_size", SIDE),
    ("sample_frames|video_length|num_frames", FRAMES),
    ("projection_class_embeddings_input_dim", 96),
    ("num_(routed_)?experts", 4),
    ("max_text_seq_length|text_len|text_len_t5", TEXT),
    (".*codebook_size|vocab_size|num_vq_embeddings|.*vocab_size", 64),
    ("hidden_size|.*_hidden_size|dim|.*_dim|.*_dim_t5|caption_channels|.*_channels|embed_dim|context_in_dim", WIDTH),
]
_SPECIAL: dict[str, dict[str, Any]] = {
    "Transformer2DModel": {"in_channels": 4, "sample_size": SIDE, "norm_num_groups": 2},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "caption_channels": WIDTH},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "in_channels": 4, "caption_channels": [WIDTH, WIDTH]},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "patch_size": 2},
    "QwenImageTransformer2DModel": {"in_channels": 16, "out_channels": 4},
    "TransformerTemporalModel": {"in_channels": WIDTH, "norm_num_groups": 8},
    "UNetSpatioTemporalConditionModel": {"in_channels": 4, "num_attention_heads": HEADS},
    "AllegroTransformer3DModel": {"attention_head_dim": 24, "cross_attention_dim": 96},
    "AuraFlowTransformer2DModel": {"pos_embed_max_size": SIDE * SIDE},
    "AutoencoderKLKVAE": {"channels": 32},
    "AutoencoderKLKVAEVideo": {"ch": 32},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (32, 64, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "sample_size": PIXELS,
    },
    "ControlNetModel": {"conditioning_embedding_out_channels": (16, 32)},
    "DreamLiteTransformer2DModel": {"in_channels": WIDTH},
    "DualTransformer2DModel": {"in_channels": WIDTH, "cross_attention_dim": WIDTH},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "OmniGenTransformer2DModel": {"pad_token_id": 0},
    "WanAnimateTransformer3DModel": {"in_channels": 36, "latent_channels": 16},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1], "vace_in_channels": 16},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "Kandinsky6Transformer3DModel": {"visual_cond": False},
    "QwenImageControlNetModel": {"extra_condition_channels": 0},
    "SD3ControlNetModel": {"extra_conditioning_channels": 0},
    "UVit2DModel": {
        "micro_cond_encode_dim": 16,
        "micro_cond_embed_dim": 80,
        "block_num_heads": HEADS,
        "block_out_channels": WIDTH,
        "in_channels": WIDTH,
        "num_res_blocks": 1,
    },
    "AutoencoderTiny": {"encoder_block_out_channels": (64,) * 4, "decoder_block_out_channels": (64,) * 4},
}
_OTHER = "Multi Adapter AutoModel ImageProjection Mixin AttentionBackend Parallel".split()


def candidates() -> dict[str, Candidate]:
    """Class name -> candidate."""
    return {
        name: Candidate(
            name=name,
            package="diffusers",
            class_name=name,
            make=functools.partial(_build, name),
            kinds=_kinds,
            feed=_feed,
        )
        for name in sorted(models._class_to_module)
        if name[0].isupper() and not any(word in name for word in _OTHER)
    }


def _build(name: str) -> nn.Module:
    model_class = getattr(models, name)
    return model_class(**arguments(model_class, _RULES, **_SPECIAL.get(name, {})))


_LATENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "picture": lambda batch, c: (batch, c, SIDE, SIDE),
    "video": lambda batch, c: (batch, c, FRAMES, SIDE, SIDE),
    "frames of video": lambda batch, c: (batch, FRAMES, c, SIDE, SIDE),
    "tokens": lambda batch, c: (batch, FRAMES * 4 * 4, c),
    "sound": lambda batch, c: (batch, c, 128),
    "frames as a batch": lambda batch, c: (batch * FRAMES, c, 4, 4),
}
_PIXELS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "pixels": lambda batch, c: (batch, c, PIXELS, PIXELS),
    "video in pixels": lambda batch, c: (batch, c, 9, PIXELS, PIXELS),
    "waveform": lambda batch, c: (batch, c, 8192),
    "spectrogram": lambda batch, c: (batch, c, 64, 16),
}


def _kinds(model: nn.Module) -> list[str]:
    names = inspect.signature(model.forward).parameters
    layouts = _PIXELS if "sample" in names and "timestep" not in names else _LATENTS
    return [kind + how for kind in layouts for how in ("", ", no masks", ", what is required")]


def _config(model: nn.Module, *names: str, default: int) -> Any:
    found = (getattr(model.config, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def _feed(kind: str, model: nn.Module, batch: int) -> Inputs:
    layout, _, how = kind.partition(", ")
    shape = (_LATENTS | _PIXELS)[layout]
    made = _everything(model, batch, shape)
    parameters = inspect.signature(model.forward).parameters
    masks = [name for name in made if "mask" in name]
    return {
        name: made[name]
        for name, parameter in parameters.items()
        if name in made
        and (parameter.default is parameter.empty or (how != "what is required" and not (how and name in masks)))
    }


def _everything(model: nn.Module, batch: int, shape: Callable[[int, int], tuple[int, ...]]) -> Inputs:
    """Something for each name that a `forward` may have."""
    channels = _config(
        model, "in_channels", "in_visual_dim", "io_channels", "audio_channels", "num_channels", default=3
    )
    axes = _config(model, "axes_dims_rope", "axes_dim_rope", "axes_dims", "rope_axes_dim", default=(0, 0, 0))
    latents, time = torch.randn(shape(batch, channels)), 1000 * torch.rand(batch)
    mask = torch.ones(batch, TEXT, dtype=torch.long)
    mask[1:, -3:] = 0
    text = torch.randn(batch, TEXT, WIDTH)
    tokens = latents.shape[1] if latents.dim() == 3 else SIDE * SIDE // 4
    image_ids = torch.stack([torch.arange(tokens) // 4**i % 4 for i in range(len(axes))], -1).float()
    made: Inputs = dict.fromkeys(("hidden_states", "sample", "x", "controlnet_cond"), latents)
    made |= dict.fromkeys(("timestep", "timesteps", "timestep_r", "r_timestep", "timestep_ratio"), time)
    made |= dict.fromkeys(("encoder_hidden_states", "encoder_hidden_states_t5"), text)
    made |= dict.fromkeys(("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"), mask.bool())
    made |= dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), mask)
    made |= dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.full((batch, 2), 16.0))
    made |= dict.fromkeys(("pooled_projections", "pooled_embeds", "proj_embedding"), torch.randn(batch, WIDTH))
    made |= dict.fromkeys(("num_frames",), FRAMES) | dict.fromkeys(("height", "width"), 4)
    return made | {
        "encoder_hidden_states_2": torch.randn(batch, 7, WIDTH),
        "encoder_attention_mask_2": torch.ones(batch, 7, dtype=torch.bool),
        "global_hidden_states": torch.randn(batch, 1, WIDTH),
        "image_embeds": torch.randn(batch, 7, WIDTH),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(TEXT, len(axes)),
        "guidance": time if _config(model, "guidance_embeds", default=False) else None,
        "class_labels": torch.randint(0, 5, (batch,)),
        "img_shapes": [[(1, 8, 6)]] * batch,
        "added_time_ids": torch.rand(batch, 3),
        "fps": torch.full((batch,), 8),
        "input_ids": torch.randint(0, 64, (batch, SIDE, SIDE)),
        "pooled_text_emb": torch.randn(batch, WIDTH),
        "micro_conds": torch.rand(batch, 5),
        "image_meta_size": torch.full((batch, 6), 16.0),
        "style": torch.zeros(batch, dtype=torch.long),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "image_latents": latents,
        "target_input_ids": torch.randint(0, 64, (batch, TEXT)),
        "source_hidden_states": text,
        "context_latents": latents,
        "text_bth": text,
        "text_lens": torch.tensor([TEXT] + [TEXT - 3] * (batch - 1)),
        "prior_token_id": torch.randint(0, 64, (batch, SIDE * SIDE // 4)),
        "prior_token_drop": torch.zeros(batch, dtype=torch.bool),
        "inputs_embeds": torch.randn(batch, TEXT, WIDTH),
        "audio_hidden_states": latents,
        "audio_encoder_hidden_states": text,
        "audio_num_frames": 48,
        "latents": latents,
        "z": latents,
        "scale": 2,
        "clip_text_pooled": torch.randn(batch, 1, WIDTH),
        "visual_rope_pos": [torch.arange(FRAMES), torch.arange(SIDE // 2), torch.arange(SIDE // 2)],
        "text_rope_pos": torch.arange(TEXT),
        "encodings_and_masks": [(text, mask)],
        "decoder_input_tokens": torch.randn(batch, 256, WIDTH),
        "decoder_noise_time": torch.rand(batch),
        "t": torch.rand(batch),
        "cap_feats": list(text),
    }
