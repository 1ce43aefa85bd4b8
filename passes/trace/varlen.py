"""`torch.nn.attention.varlen_attn` as ordinary operations, so that its attention becomes visible on CPUs.

Torch has it on CUDA alone, in half precision. On CPUs it is attention over all sequences at once, whose mask gives each
query the keys of its own sequence: [T_q, H, D] queries, [T_k, H_kv, D] keys, `cu_seq_q` and `cu_seq_k` [B + 1] with the
starts of sequences. If there are fewer queries than keys, they are the last ones, as in FlashAttention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operator
import torch.nn.functional as F
from torch import Tensor


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None, backend: int | None = None,
) -> Any:  # fmt: skip
    """`torch.ops.torch_attn._varlen_attn`: (output [T_q, H, D], log-sum-exps [H, T_q], a state of random numbers). The
    requested kernel library (`backend`, from torch 2.15 on) has no meaning on a CPU.

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
    query: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    seqused_k: Tensor | None,
    is_causal: bool,
    window_size: list[int],
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


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Table of the decomposition; None with a torch whose operator takes other arguments: it is a private one."""
    packet = torch.ops.torch_attn._varlen_attn
    taken = [argument.name for argument in packet.default._schema.arguments]
    known = list(inspect.signature(varlen_attention).parameters)
    return dict.fromkeys((packet, packet.default), varlen_attention) if taken == known[: len(taken)] else {}


DECOMPOSITIONS = _decompositions()
