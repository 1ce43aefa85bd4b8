"""x-transformers: a decoder and an encoder for each of its switches, and for values where a switch takes one.

Switches are read off the signatures of `AttentionLayers` and `Attention` (there with the prefix `attn_`), so a new one
is tried without a line here.
"""

import functools
import inspect
from typing import Any

import torch
import x_transformers  # pyright: ignore[reportMissingImports]
from torch import nn
from x_transformers.x_transformers import (  # pyright: ignore[reportMissingImports]
    Attention,
    AttentionLayers,
)

from tests.models.candidates import Candidate
from tests.models.inputs import LENGTH, Inputs

WORDS = 100
_BODY = {"dim": 64, "depth": 2, "heads": 4, "attn_dim_head": 16, "rotary_emb_dim": 16, "verbose": False}
_VALUES: dict[str, dict[str, Any]] = {
    "attn_sparse_topk": {"attn_sparse_topk": 8},
    "attn_num_mem_kv": {"attn_num_mem_kv": 4},
    "attn_kv_heads": {"attn_kv_heads": 2},
    "attn_value_dim_head": {"attn_value_dim_head": 24},
    "attn_max_attend_past": {"attn_max_attend_past": 8},
    "attn_qk_norm_groups": {"attn_qk_norm": True, "attn_qk_norm_groups": 4},
    "attn_qk_norm_dim_scale": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "attn_use_latent_q": {"attn_use_latent_q": True, "attn_dim_latent_q": 32},
    "attn_use_latent_kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 32},
    "attn_gate_values_rank": {"attn_gate_values": True, "attn_gate_values_rank": 8},
    "attn_gate_values_headwise": {"attn_gate_values": True, "attn_gate_values_headwise": True},
    "attn_cope_talking_heads": {"attn_use_cope": True, "attn_cope_talking_heads": True},
    "attn_sparse_topk_straight_through": {"attn_sparse_topk": 8, "attn_sparse_topk_straight_through": True},
    "alibi_num_heads": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "dynamic_pos_bias_log_distance": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
    "rotary_and_grouped_heads": {"rotary_pos_emb": True, "attn_kv_heads": 2},
    "cross_attend": {"cross_attend": True},
    "num_residual_streams": {"num_residual_streams": 4},
    "sandwich_coef": {"depth": 4, "sandwich_coef": 2},
    "shift_tokens": {"shift_tokens": 1},
    "use_adaptive_layernorm": {"use_adaptive_layernorm": True, "dim_condition": 64},
    "use_adaptive_rmsnorm": {"use_adaptive_rmsnorm": True, "dim_condition": 64},
}


def candidates() -> dict[str, Candidate]:
    """`decoder`, `decoder attn_qk_norm`, ... -> candidate."""
    switches = {"": {}} | {name: {name: True} for name in _switches()} | _VALUES
    return {
        f"{side.lower()} {switch}".strip(): Candidate(
            name=f"{side.lower()} {switch}".strip(),
            package="x-transformers",
            class_name=side,
            make=functools.partial(_build, side, settings),
            kinds=_kinds,
            feed=_feed,
        )
        for side in ("Decoder", "Encoder")
        for switch, settings in switches.items()
    }


def _switches() -> list[str]:
    return [
        prefix + name
        for kind, prefix in ((AttentionLayers, ""), (Attention, "attn_"))
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is False and name not in ("causal", "verbose")
    ]


def _build(side: str, settings: dict[str, Any]) -> nn.Module:
    body = getattr(x_transformers, side)(**(_BODY | settings))
    return x_transformers.TransformerWrapper(num_tokens=WORDS, max_seq_len=128, attn_layers=body)


def _kinds(model: nn.Module) -> list[str]:
    return ["text", "text and context", "text and condition"]


def _feed(kind: str, model: nn.Module, batch: int) -> Inputs:
    mask = torch.ones(batch, LENGTH, dtype=torch.bool)
    mask[1:, -LENGTH // 4 :] = False
    made = {"x": torch.randint(0, WORDS, (batch, LENGTH)), "mask": mask}
    if kind == "text and context":
        made["context"] = torch.randn(batch, 11, _BODY["dim"])
    if kind == "text and condition":
        made["condition"] = torch.randn(batch, _BODY["dim"])
    return made
