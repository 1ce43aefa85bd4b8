"""Attention in every spelling that must be recognised, and what must be left alone: plain functions of q, k, v."""

import math

import torch
import torch.nn.functional as F


def _causal(n: int, m: int | None = None) -> torch.Tensor:
    return torch.ones(n, m or n, dtype=torch.bool).tril()


def _weights(s):
    return torch.softmax(s, dim=-1)


# --- products ---------------------------------------------------------------------------------------------------


def matmul_function(q, k, v):
    return torch.matmul(_weights(torch.matmul(q, k.transpose(-1, -2))), v)


def operators_and_mt(q, k, v):
    return _weights(q @ k.mT * 0.3) @ v


def bmm_of_flattened_heads(q, k, v):
    b, h, n, d = q.shape
    s = torch.bmm(q.reshape(b * h, n, d), k.reshape(b * h, -1, d).transpose(1, 2))
    return torch.bmm(_weights(s), v.reshape(b * h, -1, v.shape[-1])).view(b, h, n, -1)


def baddbmm_with_bias(q, k, v):
    b, h, n, d = q.shape
    bias = (torch.arange(k.shape[2]) / 10).to(q.dtype).expand(b * h, n, k.shape[2])
    s = torch.baddbmm(bias, q.reshape(b * h, n, d), k.reshape(b * h, -1, d).transpose(1, 2), beta=0.5, alpha=0.3)
    return (_weights(s).view(b, h, n, -1) @ v).transpose(1, 2).contiguous().view(b, n, -1)


def einsum_heads_last(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bkhd->bqhd", _weights(s), v)


def einsum_other_letters_and_order(q, k, v):
    s = torch.einsum("xyac,xybc->axyb", q, k)
    return torch.einsum("axyb,xybe->xaey", s.softmax(-1), v)


def einsum_with_dots(q, k, v):
    return torch.einsum("...ij,...je->...ie", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v)


def three_dimensional(q, k, v):
    return _weights(q[:, 0] @ k[:, 0].transpose(1, 2) * 0.5) @ v[:, 0]


def five_dimensional(q, k, v):
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))
    return _weights(q @ k.transpose(-1, -2)) @ v


def transposed_scores(q, k, v):
    return v.mT @ (k @ q.mT).softmax(-2)


# --- softmax ----------------------------------------------------------------------------------------------------


def softmax_method_positive_dim(q, k, v):
    return (q @ k.mT).softmax(3) @ v


def softmax_in_float32(q, k, v):
    return torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v


def softmax_by_hand(q, k, v):
    e = torch.exp(q @ k.mT)
    return (e / e.sum(-1, keepdim=True)) @ v


def softmax_by_hand_with_maximum(q, k, v):
    s = q @ k.mT
    e = (s - s.max(dim=-1, keepdim=True).values).exp()
    return (e * (1 / e.sum(-1, keepdim=True))) @ v


def softmax_by_logsumexp(q, k, v):
    s = q @ k.mT
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def softmax_by_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


def powers_of_two(q, k, v):
    s = q @ k.mT * math.log2(math.e)
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def powers_of_two_in_natural_units(q, k, v):
    s = (q @ k.mT).masked_fill(~_causal(q.shape[2], k.shape[2]), -math.inf)
    e = torch.exp2((s - s.amax(-1, keepdim=True)) * math.log2(math.e))
    return (e / e.sum(-1, keepdim=True)) @ v


def normalised_by_a_norm(q, k, v):
    return F.normalize((q @ k.mT * 0.2).exp(), p=1, dim=-1) @ v


def divided_after_the_product(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return ((e @ v) / e.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)


def sink_by_logsumexp(q, k, v):
    s = q @ k.mT * 0.3
    scale = torch.sigmoid(torch.logsumexp(s, -1) - torch.linspace(-1, 1, q.shape[1]).to(q.dtype)[:, None])
    return ((_weights(s) @ v) * scale.unsqueeze(-1)).transpose(1, 2).contiguous()


def softmax_plus_one(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def softmax_of_shifted_scores(q, k, v):
    s = q @ k.mT / 8
    return _weights((s - s.amax(-1, keepdim=True)) * 2.0) @ v


def softmax_in_the_dtype_of_the_values(q, k, v):
    """A float32 mask with half precision's lowest value, swallowed only when the softmax casts the sum back."""
    lowest = torch.finfo(q.dtype).min if q.dtype != torch.float64 else torch.finfo(torch.float64).min
    keep = _causal(q.shape[2], k.shape[2]) & (torch.arange(q.shape[2]) != 3)[:, None]
    mask = torch.zeros(keep.shape, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill(~keep, lowest)
    return torch.softmax(q @ k.mT * 0.3 + mask, -1, dtype=q.dtype) @ v


def masked_exponentials(q, k, v):
    e = torch.exp(q @ k.mT * 0.2) * _causal(q.shape[2], k.shape[2])
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def softmax_less_the_largest_of_all(q, k, v):
    s = q @ k.mT * 0.2
    e = torch.exp(s - s.max())
    return (e / e.sum(-1, keepdim=True)) @ v


def softmax_of_the_distance_to_the_maximum(q, k, v):
    s = q @ k.mT
    return _weights(s.max(-1, keepdim=True)[0].expand_as(s) - s) @ v


# --- scaled_dot_product_attention and modules -------------------------------------------------------------------


def sdpa_plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal_scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


def sdpa_bool_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_causal(q.shape[2], k.shape[2]))


def sdpa_float_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=k[0, 0, :, 0].expand(q.shape[2], -1))


def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


# --- scales -----------------------------------------------------------------------------------------------------


def scale_on_query(q, k, v):
    return _weights((q * q.shape[-1] ** -0.5) @ k.mT) @ v


def scale_on_key_by_division(q, k, v):
    return _weights(q @ (k / math.sqrt(k.shape[-1])).mT) @ v


def scale_in_a_tensor(q, k, v):
    return _weights(q @ k.mT * torch.tensor(0.37)) @ v


def scale_by_division(q, k, v):
    return _weights((q @ k.mT).div(3.0)) @ v


# --- masks and biases -------------------------------------------------------------------------------------------


def masked_fill_with_a_tensor(q, k, v):
    s = q @ k.mT
    return s.masked_fill(~_causal(q.shape[2], k.shape[2]), torch.tensor(-2.0, dtype=s.dtype)).softmax(-1) @ v


def masked_fill_infinity(q, k, v):
    return _weights((q @ k.mT).masked_fill(~_causal(q.shape[2], k.shape[2]), -math.inf)) @ v


def masked_fill_in_place(q, k, v):
    s = q @ k.mT
    s /= 2.0
    s.masked_fill_(~_causal(q.shape[2], k.shape[2]), torch.finfo(s.dtype).min)
    return _weights(s) @ v


def mask_by_index(q, k, v):
    s = q @ k.mT
    s[:, :, ~_causal(q.shape[2], k.shape[2])] = -math.inf
    return _weights(s) @ v


def where_finite(q, k, v):
    s = q @ k.mT
    return _weights(torch.where(_causal(q.shape[2], k.shape[2]), s, torch.full_like(s, -1e9))) @ v


def additive_tenthousand(q, k, v):
    return _weights(q @ k.mT + (1.0 - _causal(q.shape[2], k.shape[2]).to(q.dtype)) * -1e4) @ v


def multiplied_then_added(q, k, v):
    mask = _causal(q.shape[2], k.shape[2]).to(q.dtype)
    return _weights(q @ k.mT * mask - 1e9 * (1 - mask)) @ v


def mask_written_in_blocks(q, k, v):
    mask = torch.full((q.shape[2], k.shape[2]), -math.inf, dtype=q.dtype)
    mask[: q.shape[2] // 2, : k.shape[2] // 2] = 0
    mask[q.shape[2] // 2 :, k.shape[2] // 2 :] = 0
    return _weights(q @ k.mT + mask) @ v


def alibi(q, k, v):
    slopes = (2.0 ** -torch.arange(1, q.shape[1] + 1)).to(q.dtype)
    distance = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
    s = q @ k.mT + slopes[:, None, None] * distance.to(q.dtype)
    return _weights(s.masked_fill(distance > 0, -math.inf)) @ v


def soft_capped(q, k, v):
    return _weights(20 * torch.tanh(q @ k.mT / 20)) @ v


def strange_score(q, k, v):
    s = q @ k.mT
    return _weights(F.silu(s) + torch.sin(s).clamp(-0.5, 0.5) - s.abs().sqrt() + F.gelu(s, approximate="tanh")) @ v


def table_bias(q, k, v):
    table = torch.randn(2 * 64 - 1, q.shape[1], generator=torch.Generator().manual_seed(0)).to(q.dtype)
    index = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None] + 63
    return _weights(q @ k.mT + table[index].permute(2, 0, 1)) @ v


def cosine_with_temperature(q, k, v):
    temperature = torch.linspace(1, 3, q.shape[1]).to(q.dtype).view(-1, 1, 1).clamp(max=4.6).exp()
    return _weights(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * temperature) @ v


def sink_last(q, k, v):
    sink = torch.linspace(-1, 1, q.shape[1]).to(q.dtype).view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    return torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., :-1] @ v


def sink_first_shifted(q, k, v):
    s = torch.cat([torch.zeros_like(q[..., :1]), q @ k.mT], -1)
    return (s - s.amax(-1, keepdim=True)).softmax(-1)[..., 1:] @ v


def sink_by_padding(q, k, v):
    return _weights(F.pad(q @ k.mT, (1, 0)))[..., 1:] @ v


def head_mask_after_softmax(q, k, v):
    keep = (torch.arange(q.shape[1]) % 2).to(q.dtype).view(1, -1, 1, 1)
    return (_weights(q @ k.mT) * keep) @ v


def multiplicative_mask_after_softmax(q, k, v):
    return _weights(q @ k.mT).masked_fill(~_causal(q.shape[2], k.shape[2]), 0.0) @ v


def dropout_in_eval(q, k, v):
    return F.dropout(_weights(q @ k.mT), 0.3, training=False) @ v


# --- heads ------------------------------------------------------------------------------------------------------


def grouped_by_repeat_interleave(q, k, v):
    k, v = k[:, :2].repeat_interleave(2, dim=1), v[:, :2].repeat_interleave(2, dim=1, output_size=4)
    return _weights(q @ k.mT) @ v


def grouped_by_expand_and_reshape(q, k, v):
    k, v = (x[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(x.shape) for x in (k, v))
    return _weights(q @ k.mT) @ v


def grouped_by_broadcasting(q, k, v):
    k, v = (x[:, :2].unsqueeze(2) for x in (k, v))
    return (_weights(q.unflatten(1, (2, 2)) @ k.mT) @ v).flatten(1, 2)


def multi_query(q, k, v):
    return _weights(q @ k[:, :1].mT) @ v[:, :1]


def key_changed_after_it_was_read(q, k, v):
    """In place, on a tensor of the graph's own: the scores are of the key before the change."""
    k = k.clone()
    s = q @ k.mT
    k.mul_(2.0)
    return _weights(s) @ (v + k.mean())


# --- normalisers ------------------------------------------------------------------------------------------------


def sigmoid_attention(q, k, v):
    return torch.sigmoid(q @ k.mT - 3.0) @ v


def relu_squared(q, k, v):
    return torch.relu(q @ k.mT * 0.1).square() @ v


def differential(q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
    return (_weights(q1 @ k1.mT) - 0.3 * _weights(q2 @ k2.mT)) @ v[:, : q1.shape[1]]


FUSED = [value for value in list(globals().values()) if callable(value) and getattr(value, "__code__", None)
         and value.__code__.co_varnames[:3] == ("q", "k", "v") and value.__module__ == __name__]  # fmt: skip


# --- to be left alone -------------------------------------------------------------------------------------------


def scores_returned(q, k, v):
    s = q @ k.mT
    return _weights(s) @ v, s


def scores_used_again(q, k, v):
    s = q @ k.mT
    return _weights(s) @ v + s.sum()


def value_added_to_the_product(q, k, v):
    return torch.baddbmm(q.flatten(0, 1), _weights(q @ k.mT).flatten(0, 1), v.flatten(0, 1))


def through_the_inverse_error_function(q, k, v):
    return _weights(torch.erfinv((q @ k.mT).tanh() * 0.9)) @ v


def padded_by_reflection(q, k, v):
    s = F.pad((q @ k.mT).flatten(0, 1), (1, 1), mode="replicate")
    return _weights(s)[..., 1:-1] @ v.flatten(0, 1)


def divided_by_another_sum(q, k, v):
    s = q @ k.mT
    return (_weights(s) @ v) / torch.exp(0.5 * s).sum(-1, keepdim=True)


def softmax_over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def softmax_over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


def permuted_wrongly(q, k, v):
    return _weights(q @ k.permute(0, 2, 3, 1).reshape(k.shape).mT.sort(-1).values.cumsum(-1)).sort(-1).values @ v


def squared_weights(q, k, v):
    return _weights(q @ k.mT).square() @ v


def normalised_product_added(q, k, v):
    s = q @ k.mT
    return (_weights(s) + s / s.sum(-1, keepdim=True)) @ v


def linear_attention(q, k, v):
    return (q @ k.mT * 0.1) @ v


def doubles(q, k, v):
    return _weights(q.double() @ k.double().mT) @ v.double()


def changed_before_it_is_read(q, k, v):
    """The scores are a view that another view changes in place: not what the product gave."""
    s = q @ k.mT
    view = s[:, :, ::2]
    view.add_(1.0)
    return _weights(s) @ v


LEFT = {value_added_to_the_product: "is added to another", through_the_inverse_error_function: "",
        padded_by_reflection: "",
        divided_by_another_sum: "needed elsewhere",
        scores_returned: "needed elsewhere", scores_used_again: "needed elsewhere", softmax_over_queries: "",
        softmax_over_heads: "", permuted_wrongly: "", squared_weights: "not linear",
        normalised_product_added: "added to the weights: s / sum(s)",
        linear_attention: "", doubles: "float64", changed_before_it_is_read: ""}  # fmt: skip
