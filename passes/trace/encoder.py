"""Decompositions of torch's fused transformer-encoder operations, so that their attention becomes visible.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` in eval mode call one opaque operation each ("fast path"). The
functions of this module compute the same from ordinary operations, or return NotImplemented where they cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.torch_private.operators import ENCODER_LAYER, SELF_ATTENTION


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """`torch._native_multi_head_attention`: [B, N, E] inputs, packed projections; returns (output, weights or None)."""
    if query.is_nested or (mask is not None and mask_type not in (0, 1, 2, None)):
        return NotImplemented
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_expanded_mask(mask, mask_type), -math.inf)
    attention = torch.softmax(scores, -1)
    out = F.linear((attention @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, attention.mean(1) if average_attn_weights else attention


def _expanded_mask(mask: Tensor, mask_type: int | None) -> Tensor:
    """0: [N, N] over keys and queries; 1: [B, N] padding of keys; 2: already [B, H, N, N]. True is masked out."""
    mask = mask if mask.dtype is torch.bool else mask != 0
    if mask_type == 1:
        return mask[:, None, None, :]
    return mask


def transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """`torch._transformer_encoder_layer_fwd`: one encoder layer on [B, N, E]."""

    def attend(x: Tensor) -> Any:
        result = multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )
        return result if result is NotImplemented else result[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    attended = attend(norm(src, norm_weight_1, norm_bias_1) if norm_first else src)
    if attended is NotImplemented:
        return NotImplemented
    x = src + attended
    if norm_first:
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(x, norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    SELF_ATTENTION: multi_head_attention,
    ENCODER_LAYER: transformer_encoder_layer,
    torch.ops.aten._native_multi_head_attention.default: multi_head_attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
}
