"""Make any `transformers` configuration tiny: `shrink(config_class, **overrides)`.

Rules are data: the first pattern that matches a field's whole name gives its value. A number replaces an integer; a
list keeps its length, so that fields which describe the same stages still agree.
"""

import re
from typing import Any

from transformers import AutoConfig, PretrainedConfig

WIDTH = 64
HEADS = 4
VOCABULARY = 128


def _at_most(limit: int):
    return lambda old: min(old, limit)


def _window(old: int) -> int:
    return 4 if old < 10 else 16  # small ones count patches of an image, large ones tokens


def _patch(old: int) -> int:
    return 16 if old > 4 else old  # the stems of hierarchical models stay


_RULES: list[tuple[str, Any]] = [
    # Attention.
    (r"num_(global_)?key_value_heads|num_kv_heads|multi_query_group_num|n_head_kv", 2),
    (r".*num_(attention_)?heads|.*attention_heads|n_heads?|num_heads|decoder_num_heads|encoder_num_heads", HEADS),
    (r".*qk_rope_head_dim|qk_rope_dim", 8),
    (r".*qk_nope_head_dim", 16),
    (r"qk_head_dim", 24),
    (r".*v_head_dim", 12),
    (r".*lora_rank", 24),
    (r"(.*_)?head_dim|d_kv|attention_head_size|attention_key_dim|d_head|kv_channels|attention_head_dim", 16),
    (r"rotary_dim", 8),
    (r"index_n_heads|index_topk", 4),
    (r"index_head_dim", 16),
    (r"(local_|global_)?(sliding_)?(attention_)?window(_size)?|sliding_window(_size)?|attention_window_size", _window),
    (r"local_attention|attention_chunk_size", 16),
    # Widths.
    (r"vocab_size_per_layer_input|vocab_size|.*_vocab_size|src_vocab_size|tgt_vocab_size|n_vocab", VOCABULARY),
    (r"hidden_size_per_layer_input", 16),
    (r".*(intermediate|ffn|feed_?forward|ff|mlp)_(size|dim|hidden_size|hidden_dim|inner_dim)|d_ff|n_inner|d_inner", 96),
    (r"dim_feedforward|ffn_hidden_size|mlp_hidden_size|inner_dim|intermediate_dim|feedforward_dim", 96),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_size|embedding_dim|projection_dim|n_embd)", WIDTH),
    (r"dim|width|hidden_dims|projection_size|out_hidden_size|mm_hidden_size|output_dim|embed_dims?|model_dim", WIDTH),
    (r"mm_embed_dim|cross_attention_hidden_size|projector_hidden_size|image_hidden_size|kv_dim|emb_dim", WIDTH),
    (r"encoder_hidden|entity_emb_size|latent_dim|bottleneck_size|retriever_proj_size|proj_size|lru_width", WIDTH),
    (r"conv_dim|encoder_hidden_dim|upsample_initial_channel|hidden_channels|fpn_feature_size|mask_feature_size", WIDTH),
    (r"fusion_hidden_size|feature_size|encoder_in_channels|decoder_in_channels|conv_channels", WIDTH),
    # Depths.
    (r"num_feat_extract_layers|num_conv_layers|mtp_num_layers|num_nextn_predict_layers", _at_most(99)),
    (r"(num_)?(hidden_|encoder_|decoder_|attention_|text_|vision_|audio_|transformer_|spatial_|temporal_)?layers", 2),
    (r"num_.*_(hidden_)?layers|n_layers?|depth|.*_depth|.*_layers|num_layer|num_blocks", 2),
    (r"first_k_dense_replace|num_dense_layers|num_first_full_attention_layers|num_last_full_attention_layers", 1),
    # Positions and tokens.
    (r".*max_(.*_)?position_embeddings|.*max_(.*_)?positions|n_positions|n_ctx|max_seq_len(gth)?|max_length", 128),
    (r"max_source_positions|max_target_positions|max_sequence_length|n_ctx|seq_len(gth)?|context_len(gth)?", 128),
    # Mixtures of experts.
    (r"(n_|num_|moe_num_)?(routed_|local_)?experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|top_k_experts|moe_k|expert_top_k|experts_per_token|top_k", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    # State-space layers that stand beside attention in hybrids.
    (r"mamba_d_state|ssm_state_size|state_size|mamba_n_groups|mamba_ngroups", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 16),
    (r"linear_(key|value)_head_dim", 16),
    (r"linear_num_(key|value)_heads", 4),
    # Images, sound, video.
    (r"image_size|img_size|input_size|video_size", 64),
    (r"patch_size|patch_stride|vision_patch_size|tubelet_patch_size", _patch),
    (r"num_mel_bins|num_mel_channels|input_feat_per_channel|n_mels|feature_dim|num_audio_features", 16),
    (r"max_length_audio|max_frames|num_frames|frames_per_clip|n_frames", 4),
    (r"num_queries|num_object_queries|num_query_tokens|query_length|num_latents|resampler_n_latents|n_latents", 7),
    (r"num_labels|num_classes", 5),
]
_COMPILED = [(re.compile(pattern), value) for pattern, value in _RULES]

_TOKENS = re.compile(r".*_token_(id|index)|.*_token|decoder_start_token_id")


def fit(old: Any, new: Any) -> Any:
    """`new` in the form of `old`: lists keep their length and, where they grow, grow as before."""
    if callable(new):
        if isinstance(old, (list, tuple)):
            return type(old)(new(v) if type(v) is int else v for v in old)
        return new(old) if type(old) is int else None
    if isinstance(old, (list, tuple)):
        if not old or not all(type(v) is int for v in old):
            return None
        smallest = max(min(old), 1)
        return type(old)(max(v, 1) // smallest * new for v in old)
    return new if isinstance(old, int) and not isinstance(old, bool) else None


def _set_by_parent(config: PretrainedConfig) -> dict[str, Any]:
    """Fields that differ from the class's own defaults, per-layer lists left out (they follow the number of layers)."""
    fresh = vars(type(config)())
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_") and name in fresh and not name.endswith("_types") and value != fresh[name]
    }


def _kwargs(default: PretrainedConfig) -> dict[str, Any]:
    wanted: dict[str, Any] = _set_by_parent(default)
    inverse = {v: k for k, v in (getattr(default, "attribute_map", None) or {}).items()}
    used: set[int] = set()
    for name, old in vars(default).items():
        if isinstance(old, PretrainedConfig):
            wanted[name] = shrink(type(old), _like=old)
            continue
        if name.startswith("_") or isinstance(old, bool) or old is None:
            continue
        if name == "layer_types" and isinstance(old, (list, tuple)) and len(set(old)) > 1:
            wanted[name] = list(dict.fromkeys(old))  # one layer of each type
            continue
        if name == "depths" and isinstance(old, (list, tuple)):
            wanted[name] = type(old)([2] + [1] * (len(old) - 1))
            continue
        if _TOKENS.fullmatch(name) and isinstance(old, int):
            new = old
            while new >= VOCABULARY - 8 or new in used:  # distinct, and out of the way of random text
                new = VOCABULARY - 1 - len(used)
                if new not in used:
                    break
            used.add(new)
            wanted[name] = new
            continue
        for pattern, value in _COMPILED:
            if pattern.fullmatch(name) or (name in inverse and pattern.fullmatch(inverse[name])):
                if (fitted := fit(old, value)) is not None:
                    wanted[name] = fitted
                break
    return _agree(default, wanted)


def _agree(default: PretrainedConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fields that must match each other."""
    if "qk_rope_head_dim" in wanted and "head_dim" in wanted:
        wanted["head_dim"] = wanted["qk_rope_head_dim"]
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = HEADS  # latent attention expands keys to all heads
    if hasattr(default, "channel_shrink_ratio"):
        wanted["hidden_size"] = 6 * HEADS * default.channel_shrink_ratio  # six coordinates of a box side by side
    if "layer_types" in wanted:
        for name in ("num_hidden_layers", "n_layers", "num_layers"):
            if hasattr(default, name):
                wanted[name] = len(wanted["layer_types"])
                break
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        half = int(wanted.get("head_dim", WIDTH // HEADS) * rope.get("partial_rotary_factor", 1.0)) // 2
        wanted["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return wanted


def shrink(config_class: type[PretrainedConfig], *, _like: PretrainedConfig | None = None, **overrides: Any):
    """A small configuration of `config_class`; nested configurations are shrunk as well.

    `overrides` win; a dictionary given for a nested configuration overrides fields of that one.
    """
    default = _like if _like is not None else config_class()
    wanted = _kwargs(default)
    for name, value in (_SPECIAL.get(config_class.model_type, {}) | overrides).items():
        nested = wanted.get(name)
        if isinstance(value, dict) and isinstance(nested, PretrainedConfig):
            if value.get("model_type", nested.model_type) != nested.model_type:
                wanted[name] = AutoConfig.for_model(**value)
            else:
                wanted[name] = shrink(type(nested), _like=getattr(default, name), **value)
        else:
            wanted[name] = value
    return config_class(**wanted)


# Fields whose meaning the names do not tell, by model_type.
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_SOUND = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_codevectors_per_group": 8}

_SERIES = {"prediction_length": 8, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2}
_STAGES = {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 32, "window_size": 4}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}

_SPECIAL: dict[str, dict[str, Any]] = {
    "swin": _STAGES,
    "donut-swin": _STAGES,
    "maskformer-swin": _STAGES,
    "swinv2": _STAGES,
    "qwen2_vl_text": _AXES,
    "qwen2_5_vl_text": _AXES,
    "glm4v_text": _AXES,
    "glm_ocr_text": _AXES,
    "glm_image_text": _AXES,
    "qwen2_5_vl_vision": {"window_size": 64},
    "qwen2_5_omni_vision_encoder": {"window_size": 64},
    "exaone4_5_vision": {"window_size": 64},
    "ministral": {"head_dim": 16},
    "mobilebert": {"true_hidden_size": 64, "intra_bottleneck_size": 64, "embedding_size": 64},
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": {
        "prediction_length": 8,
        "context_length": 32,
        "lags_sequence": [1, 2, 3],
        "num_time_features": 2,
    },
    "maskformer": {"backbone_config": {"depths": [2, 1, 1, 1], "num_heads": [2, 4, 8, 16]}},
    "sam_vision_model": {"window_size": 3},
    "sam3_vit_model": {"window_size": 3},
    "slanext": {"vision_config": {"window_size": 3}},
    "vitdet": {"window_size": 3},
    "detr": {"backbone_config": _RESNET},
    "conditional_detr": {"backbone_config": _RESNET},
    "deformable_detr": {"backbone_config": _RESNET | {"out_features": ["stage2", "stage3", "stage4"]}},
    "dab-detr": {"backbone_config": _RESNET},
    "table-transformer": {"backbone_config": _RESNET},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 48), "max_position_embeddings": 128},
    "xmod": {"default_language": "en_XX"},
    "gemma3n_text": {"intermediate_size": 96, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "prophetnet": {"ngram": 2, "max_position_embeddings": 256},
    "zaya": {"num_experts_per_tok": 1},
    "sam_prompt_encoder_config": {"image_embedding_size": 4},
    "perceiver": {"d_latents": 64, "d_model": 64, "num_blocks": 1, "num_self_attends_per_block": 2},
    "hubert": _SOUND,
    "wav2vec2": _SOUND,
    "wavlm": _SOUND,
}
