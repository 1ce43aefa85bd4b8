"""Inputs for small models, by kind: `make(kind, model, batch=2, seed=0)` returns keyword arguments for `model.forward`.

In a batch of two the second sample is padded: on the left where the model is a causal decoder, on the right elsewhere.
Lengths are odd on purpose. `kinds_for(model)` lists the kinds that a model's signature allows, most likely first.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

LENGTH = 37
DECODER_LENGTH = 21
SAMPLES = 7400  # sound at the first sample rate; about 23 frames after a stride of 320

Inputs = dict[str, Any]
_MAKERS: dict[str, Callable[..., Inputs]] = {}


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` that `config` or a configuration nested in it has a value for."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    for inner in vars(config).values():
        if hasattr(inner, "model_type") and (value := find(inner, *names)) is not None:
            return value
    return default


def _square(value: Any) -> tuple[int, int]:
    if isinstance(value, dict):
        value = list(value.values())
    return (value, value) if isinstance(value, int) else (value[-2], value[-1])


def is_causal(model: torch.nn.Module) -> bool:
    """Whether text is padded on the left, as for generation."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    return any(getattr(m, "is_causal", False) for m in model.modules())


def _vocabulary(model) -> int:
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    asked = find(model.config, "vocab_size", default=max(sizes, default=100))
    return min(int(asked), 100)


def _text(model, batch: int, length: int = LENGTH, left: bool | None = None) -> Inputs:
    ids = torch.randint(5, max(6, _vocabulary(model)), (batch, length))
    mask = torch.ones(batch, length, dtype=torch.long)
    if batch > 1:
        padding = length // 4
        if is_causal(model) if left is None else left:
            mask[1, :padding] = 0
        else:
            mask[1, -padding:] = 0
    pad = getattr(model.config, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < _vocabulary(model):
        ids = torch.where(mask == 0, pad, ids)
    return {"input_ids": ids, "attention_mask": mask}


def _pixels(model, batch: int) -> torch.Tensor:
    height, width = _square(find(model.config, "image_size", "img_size", default=64))
    return torch.randn(batch, find(model.config, "num_channels", "in_channels", "in_chans", default=3), height, width)


def _maker(name: str):
    def register(function: Callable[..., Inputs]):
        _MAKERS[name] = function
        return function

    return register


def _accepts(model) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def make(kind: str, model: torch.nn.Module, *, batch: int = 2, seed: int = 0, **extra: Any) -> Inputs:
    """Inputs of `kind`; what `forward` does not take is left out; `extra` is added as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _MAKERS[kind](model, batch)
    accepted = _accepts(model)
    everything = "kwargs" in accepted or "super_kwargs" in accepted
    return {k: v for k, v in made.items() if k in accepted or (everything and k != "attention_mask")} | extra


@_maker("text")
def _(model, batch):
    return _text(model, batch)


@_maker("text_long")
def _(model, batch):
    return _text(model, batch, 128)


@_maker("text_no_mask")
def _(model, batch):
    return {"input_ids": _text(model, batch)["input_ids"]}


@_maker("text_to_text")
def _(model, batch):
    decoder = _text(model, batch, DECODER_LENGTH, left=False)
    return _text(model, batch, left=False) | {
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }


@_maker("pixels")
def _(model, batch):
    pixels = _pixels(model, batch)
    patches = (pixels.shape[-1] // _square(find(model.config, "patch_size", default=16))[0]) ** 2
    return {"pixel_values": pixels, "noise": torch.rand(batch, patches)}  # what a masked autoencoder would draw


@_maker("pixels_to_text")
def _(model, batch):
    return {
        "pixel_values": _pixels(model, batch),
        "decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"],
    }


@_maker("video")
def _(model, batch):
    frames = find(model.config, "num_frames", "frames_per_clip", default=4)
    video = _pixels(model, batch)[:, None].repeat(1, frames, 1, 1, 1)
    video = video + torch.randn_like(video)
    return {"pixel_values": video, "pixel_values_videos": video}


@_maker("text_and_pixels")
def _(model, batch):
    return _text(model, batch, left=False) | {"pixel_values": _pixels(model, batch)}


@_maker("text_and_pixels_to_text")
def _(model, batch):
    return (
        _text(model, batch, left=False)
        | {"pixel_values": _pixels(model, batch)}
        | {"decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"]}
    )


@_maker("text_and_video")
def _(model, batch):
    return _text(model, batch, left=False) | _MAKERS["video"](model, batch)


def _with_image_tokens(model, batch: int, pixels: Inputs, tokens: int) -> Inputs:
    made = _text(model, batch, max(LENGTH, tokens + 13))
    image = find(model.config, "image_token_id", "image_token_index", "media_placeholder_token_id", default=0)
    ids = torch.where(made["input_ids"] == image, 5, made["input_ids"])
    ids[:, -tokens - 3 : -3] = image  # at the end, clear of left padding
    made["input_ids"] = ids
    made["mm_token_type_ids"] = (ids == image).long()
    made["token_type_ids"] = (ids == image).long()
    return made | pixels


def _features_found(model, made: Inputs) -> int | None:
    """How many image features the model itself says it makes per sample, from its own complaint."""
    try:
        with torch.no_grad():
            model(**made)
    except Exception as error:
        if found := re.search(r"tokens: *(\d+), *features:? *(\d+)", str(error)):
            return int(found.group(2))
        raise
    return None


@_maker("image_in_text")
def _(model, batch):
    return _fill_in(model, batch, {"pixel_values": _pixels(model, batch)})


def _fill_in(model, batch: int, pixels: Inputs) -> Inputs:
    accepted = _accepts(model)
    sizes = {"image_sizes": torch.tensor([list(_pixels(model, 1).shape[-2:])] * batch)}
    pixels = pixels | {k: v for k, v in sizes.items() if k in accepted}

    def build(tokens: int) -> Inputs:
        made = _with_image_tokens(model, batch, pixels, tokens)
        return {k: v for k, v in made.items() if k in accepted}

    found = _features_found(model, build(16))
    return build(16 if found is None else found // batch)


@_maker("image_crops_in_text")
def _(model, batch):
    pixels = _pixels(model, batch)
    return _fill_in(model, batch, {"pixel_values": pixels[:, None].repeat(1, 3, 1, 1, 1)})


def _patches(model, batch: int, height: int = 4, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    patch = _square(find(model.config, "patch_size", default=16))[0]
    frames = find(model.config, "temporal_patch_size", default=1)
    channels = find(model.config, "in_channels", "in_chans", "num_channels", default=3)
    grid = torch.tensor([[1, height, width]] * batch)
    return torch.randn(batch * height * width, channels * frames * patch * patch), grid


@_maker("patches_in_text")
def _(model, batch):
    patches, grid = _patches(model, batch)
    return _fill_in(model, batch, {"pixel_values": patches, "image_grid_thw": grid})


@_maker("patches")
def _(model, batch):
    patches, grid = _patches(model, batch)
    names = list(_accepts(model))
    return {next(n for n in names if n in ("hidden_states", "pixel_values")): patches, "grid_thw": grid}


@_maker("waveform")
def _(model, batch):
    sound = torch.randn(batch, SAMPLES)
    mask = torch.ones(batch, SAMPLES, dtype=torch.long)
    if batch > 1:
        mask[1, -SAMPLES // 4 :] = 0
        sound = sound * mask
    return {"input_values": sound, "attention_mask": mask}


@_maker("waveform_to_text")
def _(model, batch):
    return _MAKERS["waveform"](model, batch) | {"decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"]}


@_maker("waveform_channel")
def _(model, batch):
    return {"input_values": torch.randn(batch, 1, SAMPLES)}


def _mel_bins(model) -> int:
    return find(model.config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", default=16)


@_maker("mel_major")
def _(model, batch):
    """[batch, mel, time], as Whisper takes it: time is twice the encoder's positions."""
    time = 2 * find(model.config, "max_source_positions", default=64)
    return {"input_features": torch.randn(batch, _mel_bins(model), time)}


@_maker("mel_major_to_text")
def _(model, batch):
    return _MAKERS["mel_major"](model, batch) | {"decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"]}


@_maker("time_major")
def _(model, batch):
    """[batch, time, mel]"""
    time = 77
    mask = torch.ones(batch, time, dtype=torch.long)
    if batch > 1:
        mask[1, -time // 4 :] = 0
    features = torch.randn(batch, time, _mel_bins(model))
    return {"input_features": features, "attention_mask": mask}


@_maker("time_major_to_text")
def _(model, batch):
    return _MAKERS["time_major"](model, batch) | {"decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"]}


@_maker("spectrogram")
def _(model, batch):
    """[batch, time, mel] of a fixed time, as an audio spectrogram transformer takes it."""
    time = find(model.config, "max_length", default=96)
    return {"input_values": torch.randn(batch, time, _mel_bins(model))}


@_maker("boxes")
def _(model, batch):
    made = _text(model, batch, left=False)
    corner = torch.randint(0, 60, (batch, LENGTH, 2))
    made["bbox"] = torch.cat([corner, corner + torch.randint(1, 60, (batch, LENGTH, 2))], -1)
    return made


@_maker("boxes_and_pixels")
def _(model, batch):
    pixels = _pixels(model, batch)
    return _MAKERS["boxes"](model, batch) | {"pixel_values": pixels, "image": pixels}


@_maker("boxes_and_pixels_to_text")
def _(model, batch):
    made = _MAKERS["boxes_and_pixels"](model, batch)
    made["bbox"] = made["bbox"] / 128.0
    return made | {"decoder_input_ids": _text(model, batch, DECODER_LENGTH)["input_ids"]}


@_maker("series")
def _(model, batch):
    context = find(model.config, "context_length", "prediction_length", default=32)
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    ahead = find(model.config, "prediction_length", default=8) or 8
    features = find(model.config, "num_time_features", default=0) or 0
    return {
        "past_values": torch.randn(batch, context + lags),
        "past_time_features": torch.randn(batch, context + lags, features),
        "past_observed_mask": torch.ones(batch, context + lags),
        "future_values": torch.randn(batch, ahead),
        "future_time_features": torch.randn(batch, ahead, features),
    }


@_maker("series_channels")
def _(model, batch):
    channels = find(model.config, "num_input_channels", default=1)
    return {"past_values": torch.randn(batch, find(model.config, "context_length", default=32), channels)}


@_maker("hidden_states")
def _(model, batch):
    width = find(model.config, "hidden_size", "d_model", default=64)
    return {
        "inputs_embeds": torch.randn(batch, LENGTH, width),
        "hidden_states": torch.randn(batch, LENGTH, width),
        "query_embeds": torch.randn(batch, 7, width),
        "encoder_hidden_states": torch.randn(batch, LENGTH, find(model.config, "encoder_hidden_size", default=width)),
    }


@_maker("visual_features")
def _(model, batch):
    width = find(model.config, "visual_feat_dim", "visual_embedding_dim", default=64)
    return _text(model, batch, left=False) | {
        "visual_feats": torch.randn(batch, 9, width),
        "visual_embeds": torch.randn(batch, 9, width),
        "visual_pos": torch.rand(batch, 9, 4),
    }


@_maker("audio_in_text")
def _(model, batch):
    made = _MAKERS["mel_major"](model, batch)
    text = _text(model, batch, 3 * LENGTH)
    audio = find(model.config, "audio_token_id", "audio_token_index", default=0)
    mask = torch.ones(made["input_features"].shape[0], made["input_features"].shape[-1], dtype=torch.long)
    made |= text | {"feature_attention_mask": mask, "input_features_mask": mask}

    def build(tokens: int) -> Inputs:
        ids = torch.where(text["input_ids"] == audio, 5, text["input_ids"])
        ids[:, -tokens - 3 : -3] = audio
        return {k: v for k, v in (made | {"input_ids": ids}).items() if k in _accepts(model)}

    found = _features_found(model, build(16))
    return build(16 if found is None else found // batch)


@_maker("text_and_sound")
def _(model, batch):
    return _text(model, batch, left=False) | {"input_features": torch.randn(batch, 1, 64, 64)}


def kinds_for(model: torch.nn.Module) -> list[str]:
    """Kinds to try, most likely first."""
    names = _accepts(model)
    main = model.main_input_name
    decoder = "decoder_input_ids" in names
    tries: list[str] = []
    if "bbox" in names:
        tries += ["boxes_and_pixels_to_text", "boxes_and_pixels", "boxes"]
    if "visual_feats" in names or "visual_embeds" in names:
        tries += ["visual_features"]
    if {"input_ids", "pixel_values"} <= names:
        if "image_grid_thw" in names:
            tries += ["patches_in_text"]
        tries += ["text_and_pixels_to_text"] if decoder else []
        tries += ["image_in_text", "image_crops_in_text", "text_and_pixels", "text_and_video"]
    if {"input_ids", "input_features"} <= names:
        tries += ["audio_in_text", "text_and_sound"]
    if "past_values" in names:
        tries += ["series", "series_channels"]
    if "grid_thw" in names:
        tries += ["patches"]
    if main == "input_values" or "input_values" in names:
        tries += ["waveform_to_text"] if decoder else []
        tries += ["waveform", "spectrogram", "waveform_channel"]
    if main == "input_features" or "input_features" in names:
        tries += ["mel_major_to_text", "time_major_to_text"] if decoder else []
        tries += ["mel_major", "time_major"]
    if "pixel_values" in names or "pixel_values_videos" in names:
        tries += ["pixels_to_text"] if decoder else []
        tries += ["pixels", "video"]
    if "input_ids" in names:
        tries += ["text_to_text"] if decoder else []
        tries += ["text", "text_long", "text_no_mask"]
    if {"inputs_embeds", "hidden_states", "query_embeds"} & names:
        tries += ["hidden_states"]
    return tries
