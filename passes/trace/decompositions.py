"""Operations that are traced as their decompositions, so that an attention in them becomes visible, or all of it is in
operations that the analysis knows.

Transformer encoders and `nn.MultiheadAttention` in eval mode (the "fast path") are one opaque operation each.
`torch.nn.attention.varlen_attn` exists on CUDA alone, in half precision; on CPUs it is attention over all sequences at
once, whose mask gives each query the keys of its sequence. Einsums that are no product of matrices with one dimension
each for rows, columns and the sum become sums, permutations, and products after a reshape, as ATen decomposes them:
products that sum over several dimensions are the tied rows of the MSA Transformer (Rao et al., 2021, section 3). Of the
rest, some may return their input, or views of it, of which their schemas say nothing; others work element by element on
tensors that they cut or reshape before, or sum afterwards: gates, losses. Their decompositions are torch's.
"""

from __future__ import annotations

import functools
import inspect
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operator
import torch.nn.functional as F
from torch import Tensor

from fusion.torch_private.operators import ENCODER_LAYER, SELF_ATTENTION, schema

aten = torch.ops.aten


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Self-attention of torch's fast path: [B, N, E] inputs, packed projections; returns (output, weights or None).

    mask: true where it is masked out; mask_type 0: [N, N] over queries and keys, 1: [B, N] padding of keys, 2:
        [B, H, N, N].
    """
    if query.is_nested or (mask is not None and mask_type not in (0, 1, 2, None)):
        return NotImplemented
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        mask = mask if mask.dtype is torch.bool else mask != 0
        scores = scores.masked_fill(mask[:, None, None, :] if mask_type == 1 else mask, -math.inf)
    attention = torch.softmax(scores, -1)
    out = F.linear((attention @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, attention.mean(1) if average_attn_weights else attention


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


ENCODER: dict[Any, Callable[..., Any]] = {
    SELF_ATTENTION: multi_head_attention,
    ENCODER_LAYER: transformer_encoder_layer,
    torch.ops.aten._native_multi_head_attention.default: multi_head_attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
}


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None, backend: int | None = None,
) -> Any:  # fmt: skip
    """`torch.ops.torch_attn._varlen_attn`: (output [T_q, H, D], log-sum-exps [H, T_q], a state of random numbers). The
    requested kernel library (`backend`, from torch 2.15 on) has no meaning on a CPU.

    query [T_q, H, D], key and value [T_k, H_kv, D]; cu_seq_q, cu_seq_k [B + 1]: the starts of sequences. If there are
    fewer queries than keys, they are the last ones, as in FlashAttention.

    A query without a key has the output 0 and the log-sum-exp +inf, as in FlashAttention.
    """
    if query.device.type != "cpu" or cu_seq_k is None or block_table is not None:
        return NotImplemented
    first, last = _key_ranges(query, cu_seq_q, cu_seq_k, seqused_k, is_causal, window_size or [-1, -1])
    keys = torch.arange(key.shape[0], device=key.device)
    live = (first[:, None] <= keys) & (keys < last[:, None])
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=live, scale=scale, enable_gqa=enable_gqa)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.float() @ k.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    sums = scores.masked_fill(~live, -torch.inf).logsumexp(-1)[0]
    sums = torch.where(first < last, sums, torch.inf)
    return out[0].transpose(0, 1), sums, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _key_ranges(
    query: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None, is_causal: bool, window_size: list[int]
) -> tuple[Tensor, Tensor]:
    """(first key of each query [T_q], end of its keys): an empty range where the end is not beyond the first."""
    rows = torch.arange(query.shape[0], device=query.device)
    sequence = torch.searchsorted(cu_seq_q[1:-1], rows, right=True)  # rows behind the last sequence count with it
    first = cu_seq_k[sequence]
    last = cu_seq_k[sequence + 1] if seqused_k is None else first + seqused_k[sequence]
    diagonal = rows - cu_seq_q[sequence + 1] + last
    before, after = window_size[0], 0 if is_causal else window_size[1]
    if before >= 0:
        first = torch.maximum(first, diagonal - before)
    if after >= 0:
        last = torch.minimum(last, diagonal + after + 1)
    return first, last


def _varlen() -> dict[Any, Callable[..., Any]]:
    """Table of the decomposition; None with a torch whose operator takes other arguments: it is a private one."""
    packet = torch.ops.torch_attn._varlen_attn
    taken = [argument.name for argument in packet.default._schema.arguments]
    known = list(inspect.signature(varlen_attention).parameters)
    return dict.fromkeys((packet, packet.default), varlen_attention) if taken == known[: len(taken)] else {}


VARLEN = _varlen()


def decomposed_einsum(equation: Any, *operands: Any) -> Any:
    """The einsum as `sum`, `permute`, `mul`, or with fewer dimensions; NotImplemented for dots, diagonals, others."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or not all(isinstance(x, Tensor) for x in operands):
        return NotImplemented
    terms, _, output = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if any(not term.isalpha() or len(set(term)) != len(term) for term in (*inputs, output)):
        return NotImplemented
    if len(inputs) == 1:
        return _of_one(inputs[0], output, *operands)
    if len(inputs) == 2 and set("".join(inputs)) == set(output):
        left, right = (_aligned(term, output, x) for term, x in zip(inputs, operands, strict=True))
        return left * right
    if len(inputs) != 2:
        return NotImplemented
    result = _of_a_vector(inputs, output, operands)
    return result if result is not NotImplemented else _with_fewer_dimensions(inputs, output, operands)


def _of_one(term: str, output: str, x: Tensor) -> Tensor:
    """Einsum of one operand: the output's letters in order; other letters are moved to the end and summed."""
    summed = [letter for letter in term if letter not in output]
    x = x.permute([term.index(letter) for letter in (*output, *summed)])
    return x.sum(list(range(len(output), len(term)))) if summed else x


def _aligned(term: str, output: str, x: Tensor) -> Tensor:
    """The operand with a dimension for each letter of the output, of size 1 where it has none."""
    x = x.permute([term.index(letter) for letter in output if letter in term])
    for dim, letter in enumerate(output):
        if letter not in term:
            x = x.unsqueeze(dim)
    return x


def _of_a_vector(terms: Sequence[str], output: str, operands: Sequence[Tensor]) -> Any:
    """Product of a matrix and a vector, as a matrix product with one row."""
    left, right = map(set, terms)
    matrices = [not set(term) <= other for term, other in zip(terms, (right, left), strict=True)]
    if matrices[0] == matrices[1] or left & right <= set(output) or not left ^ right <= set(output):
        return NotImplemented
    row = next(letter for letter in string.ascii_letters if letter not in "".join(terms))
    place = min(output.index(letter) for letter in left ^ right)
    (one, x), (other, y) = ((term, x) if is_matrix else (term + row, x.unsqueeze(-1))
                            for term, is_matrix, x in zip(terms, matrices, operands, strict=True))  # fmt: skip
    return torch.einsum(f"{one},{other}->{output[:place]}{row}{output[place:]}", x, y).squeeze(place)


def _with_fewer_dimensions(terms: Sequence[str], output: str, operands: Sequence[Tensor]) -> Any:
    """Product with several dimensions in the sum or the columns: each group as one dimension."""
    extents: dict[str, Any] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, extent in zip(term, x.shape, strict=True):
            if extents.setdefault(letter, extent) != extent:  # of size 1, and broadcast
                return NotImplemented
    left, right = map(set, terms)
    summed = "".join(letter for letter in terms[0] if letter in right and letter not in output)
    columns = ["".join(letter for letter in term if letter not in other)
               for term, other in zip(terms, (right, left), strict=True) if term[-1] not in summed]  # fmt: skip
    merged = [letters for letters in (summed, *columns) if len(letters) > 1]
    if not merged or not summed or (left ^ right) - set(output):
        return NotImplemented
    short, flat = zip(*(_merged(term, merged, x) for term, x in zip(terms, operands, strict=True)), strict=True)
    apart = [letters for letters in merged if letters != summed]
    single = "".join(letter for letter in output if not any(letter in letters for letters in apart))
    result = torch.einsum(f"{short[0]},{short[1]}->{single}{''.join(letters[0] for letters in apart)}", *flat)
    for dim, letters in reversed([*enumerate(apart, len(single))]):
        result = result.unflatten(dim, [extents[letter] for letter in letters])
    order = "".join((single, *apart))
    return result.permute([order.index(letter) for letter in output])


def _merged(term: str, merged: Sequence[str], x: Tensor) -> tuple[str, Tensor]:
    """Operand with each of its groups of letters as one dimension behind the others, named by its first letter."""
    groups = [letters for letters in merged if letters[0] in term]
    rest = "".join(letter for letter in term if not any(letter in letters for letters in groups))
    order = "".join((rest, *groups))
    x = x.permute([term.index(letter) for letter in order])
    for dim, letters in enumerate(groups, len(rest)):
        x = x.flatten(dim, dim + len(letters) - 1)
    return "".join((rest, *(letters[0] for letters in groups))), x


EINSUMS = {torch.einsum: decomposed_einsum, torch.ops.aten.einsum.default: decomposed_einsum}


_SILENT = (aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.cartesian_prod,
           aten.chain_matmul, aten.conj_physical, aten.meshgrid, aten.sum_to_size)  # fmt: skip
_OF_OTHERS = (aten.prelu, aten.float_power, aten.l1_loss, aten.kl_div, aten.poisson_nll_loss, aten.margin_ranking_loss,
              aten.hinge_embedding_loss)  # fmt: skip
_BY_TORCH = (aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.soft_margin_loss,
             aten.binary_cross_entropy_with_logits)  # fmt: skip
"""With gradients of their own in torch, which those of the decompositions equal. (Those of `binary_cross_entropy` are
others where its logarithms are cut off.)"""


def _by_torch(overload: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _table()[overload](*args, **kwargs)


@functools.cache
def _table() -> Any:
    return torch.export.default_decompositions()


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Gated linear unit, computed in float32 and rounded once, as torch does."""
    gated, gate = x.float().chunk(2, dim) if x.dtype in (torch.bfloat16, torch.float16) else x.chunk(2, dim)
    return (gated * gate.sigmoid()).to(x.dtype)


def _overloads(packet: Any) -> list[Any]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in overloads if not schema(overload).is_mutable]


MADE_OF_OTHERS: dict[Any, Callable[..., Any]] = {
    aten.glu.default: _glu,
    **{overload: overload.decompose for packet in (*_SILENT, *_OF_OTHERS) for overload in _overloads(packet)},
    **{overload: _by_torch(overload) for packet in _BY_TORCH for overload in _overloads(packet)},
}
"""Overload -> what is traced in its place."""
