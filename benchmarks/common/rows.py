"""The attention variants that are measured: each as a person writes it in plain PyTorch, and as each peer wants it.

`q: [B, H, N, d]`, `k, v: [B, H_kv, N, d]`. The plain function is what eager, Inductor and fusion get. For
`scaled_dot_product_attention` and FlexAttention masks, biases and block masks are made beforehand, outside the time
measured: a model would make them once and use them in every layer. In latent attention V is a part of K's columns.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.ir import AttentionSpec

WINDOW = 512  # keys that a query sees in the sliding-window row, itself included
CAP = 20.0  # bound of the soft-capped score
GROUP = 4  # query heads per key head in the grouped row
ROTARY = 64  # columns of K in latent attention that only the scores see
DOCUMENTS = (5, 1, 3, 2, 8, 4, 6, 3)  # lengths of packed documents, in parts of their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One size: batch, query heads, sequence length, head dimension and dtype."""

    B: int = 1
    H: int
    N: int
    d: int
    dtype: torch.dtype

    def tensors(self, row: "Row", dtype: torch.dtype | None = None, device: str = "cpu") -> tuple[Tensor, ...]:
        """Operands of the row's plain function: q, k, v, and what else the variant takes; the same ones every time.

        Latent attention takes no v. Those of a floating-point dtype are rounded to the problem's, then become `dtype`.
        """
        generator = torch.Generator(device).manual_seed(0)
        keys = (self.B, max(1, self.H // (row.group or self.H)), self.N, self.d)
        shapes = [(self.B, self.H, row.queries or self.N, self.d), keys, keys][: 2 if row.latent else 3]
        operands = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        if row.stored is not None:
            operands = [operands[0], *(x.to(row.stored).view(torch.uint8) for x in operands[1:])]
        operands += [extra.to(device) for extra in row.extras(self, generator)]
        return tuple(x.to(self.dtype).to(dtype or self.dtype) if x.is_floating_point() else x for x in operands)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k), dim=-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    live = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~live, -math.inf), dim=-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    scores = _scores(q, k) + slopes[:, None, None] * (j - i)
    return torch.softmax(scores.masked_fill(j > i, -math.inf), dim=-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = CAP * torch.tanh(_scores(q, k) / CAP)
    return torch.softmax(scores, dim=-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    live = (j <= i) & (i - j < WINDOW)
    return torch.softmax(torch.where(live, _scores(q, k), -math.inf), dim=-1) @ v


def bias(q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k) + position_bias, dim=-1) @ v


def table(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    return torch.softmax(_scores(q, k) + offsets[:, j - i + q.shape[-2] - 1], dim=-1) @ v


def _for_every_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(*_for_every_query_head(q, k, v))


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(*_for_every_query_head(q, k, v))


def float8_decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.view(torch.float8_e4m3fn).to(q.dtype) for x in (k, v))
    return decode(q, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    live = (documents[:, None, :, None] == documents[:, None, None, :]) & (j <= i)
    return torch.softmax(_scores(q, k).masked_fill(~live, -math.inf), dim=-1) @ v


def latent(q: Tensor, compressed: Tensor) -> Tensor:
    return causal(q, compressed, compressed[..., : q.shape[-1] - ROTARY])


def latent_decode(q: Tensor, compressed: Tensor) -> Tensor:
    return full(q, compressed, compressed[..., : q.shape[-1] - ROTARY])


def _slopes(p: Problem, generator: torch.Generator) -> list[Tensor]:
    return [torch.tensor([2 ** (-8 * (h + 1) / p.H) for h in range(p.H)])]


def _position_bias(p: Problem, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(1, p.H, p.N, p.N, generator=generator, device=generator.device)]


def _offsets(p: Problem, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(p.H, 2 * p.N - 1, generator=generator, device=generator.device)]


def _document_lengths(N: int) -> list[int]:
    ends = [N * sum(DOCUMENTS[: n + 1]) // sum(DOCUMENTS) for n in range(len(DOCUMENTS))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _documents(p: Problem, generator: torch.Generator) -> list[Tensor]:
    lengths = torch.tensor(_document_lengths(p.N))
    return [torch.arange(len(DOCUMENTS)).repeat_interleave(lengths).expand(p.B, -1).contiguous()]


def _nothing(p: Problem, generator: torch.Generator) -> list[Tensor]:
    return []


def _causal_mask(b, h, i, j):
    return i >= j


def _window_mask(b, h, i, j):
    return (i >= j) & (i - j < WINDOW)


def _packed_mask(documents: Tensor) -> Callable:
    return lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j)


def _cap_score(score, b, h, i, j):
    return CAP * torch.tanh(score / CAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A variant: how it is written plainly, what it needs besides q, k, v, and what the peers call it.

    `sdpa(*extras)` gives the keyword arguments of F.scaled_dot_product_attention, where these are not a mask of what
    `score` and `mask` say; beyond_sdpa: it has no argument for the variant. `score(*extras)` gives FlexAttention's
    score_mod, `mask(*extras)` its mask_mod. `pairs(N)`: live query-key pairs
    of one head, where they are not all. group: query heads per key head, None where all share one. learned: training
    wants the gradient of the extras too. latent: V is K without its last ROTARY columns. stored: the dtype whose bits k
    and v are, as uint8.
    """

    title: str
    plain: Callable[..., Tensor]
    extras: Callable[[Problem, torch.Generator], list[Tensor]] = _nothing
    group: int | None = 1
    queries: int | None = None  # N of them where this is None
    sdpa: Callable[..., dict] | None = None
    beyond_sdpa: bool = False
    score: Callable[..., Callable] | None = None
    mask: Callable[..., Callable] | None = None
    pairs: Callable[[int], int] | None = None
    learned: bool = False
    latent: bool = False
    stored: torch.dtype | None = None

    def live_pairs(self, N: int) -> int:
        """Query-key pairs of a head whose weight is not zero: what the arithmetic is counted by."""
        return (self.queries or N) * N if self.pairs is None else self.pairs(N)

    def width(self, d: int) -> int:
        """Columns of V."""
        return d - ROTARY if self.latent else d

    def flop(self, p: Problem) -> int:
        """Operations of both matrix products over live pairs; exponentials and score arithmetic are not counted."""
        return 2 * p.B * p.H * (p.d + self.width(p.d)) * self.live_pairs(p.N)

    def attended(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q, k, v and the extras, for peers that want a v."""
        q, k, *rest = operands
        if self.latent:
            return q, k, k[..., : self.width(k.shape[-1])], rest
        return q, k, rest[0], rest[1:]


def _triangle(N: int) -> int:
    return N * (N + 1) // 2


def _band_pairs(N: int) -> int:
    seen = min(N, WINDOW)
    return _triangle(seen) + (N - seen) * seen


def _packed_pairs(N: int) -> int:
    return sum(map(_triangle, _document_lengths(N)))


def _as_mask(row: "Row", q: Tensor, k: Tensor, extras: list[Tensor]) -> dict:
    """The mask, and what the program adds to scores, as an argument of `scaled_dot_product_attention`."""
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)[None, :]
    b, h = (torch.arange(n, device=q.device).view(-1, *[1] * dims) for n, dims in ((q.shape[0], 3), (q.shape[1], 2)))
    live = row.mask(*extras)(b, h, i, j) if row.mask else None
    if row.score is None:
        return {"attn_mask": live}
    bias = row.score(*extras)(0.0, b[:1], h, i, j)[None]
    return {"attn_mask": (bias if live is None else bias.masked_fill(~live, -math.inf)).to(q.dtype)}


def _alibi_score(slopes: Tensor) -> Callable:
    return lambda score, b, h, i, j: score + slopes[h] * (j - i)


def _bias_score(position_bias: Tensor) -> Callable:
    return lambda score, b, h, i, j: score + position_bias[0, h, i, j]


def _table_score(offsets: Tensor) -> Callable:
    last = (offsets.shape[1] - 1) // 2
    return lambda score, b, h, i, j: score + offsets[h, j - i + last]


_CAUSAL: dict[str, Any] = {"mask": lambda *_: _causal_mask, "pairs": _triangle}

ROWS: dict[str, Row] = {
    "full": Row(title="full", plain=full, sdpa=dict),
    "causal": Row(title="causal", plain=causal, sdpa=lambda: {"is_causal": True}, **_CAUSAL),
    "alibi": Row(title="ALiBi + causal", plain=alibi, extras=_slopes, score=_alibi_score, **_CAUSAL),
    "softcap": Row(title="soft-cap", plain=softcap, beyond_sdpa=True, score=lambda: _cap_score),
    "window": Row(title=f"sliding window ({WINDOW})", plain=window, mask=lambda: _window_mask, pairs=_band_pairs),
    "bias": Row(title="T5-style bias [1, H, N, N]", plain=bias, extras=_position_bias, score=_bias_score,
                sdpa=lambda position_bias: {"attn_mask": position_bias}, learned=True),
    "table": Row(title="relative-position table [H, 2N-1]", plain=table, extras=_offsets, score=_table_score,
                 learned=True),
    "grouped": Row(title=f"grouped heads ({GROUP}), causal", plain=grouped, group=GROUP,
                   sdpa=lambda: {"is_causal": True, "enable_gqa": True}, **_CAUSAL),
    "decode": Row(title=f"decoding: one query, grouped heads ({GROUP})", plain=decode, group=GROUP, queries=1,
                  sdpa=lambda: {"enable_gqa": True}),
    "float8 decode": Row(title=f"decoding, keys and values in float8 (e4m3fn), grouped heads ({GROUP})",
                         plain=float8_decode, group=GROUP, queries=1, beyond_sdpa=True, stored=torch.float8_e4m3fn),
}  # fmt: skip

GPU_ROWS: dict[str, Row] = ROWS | {
    "packed": Row(title=f"{len(DOCUMENTS)} packed documents, causal", plain=packed, extras=_documents,
                  mask=_packed_mask, pairs=_packed_pairs),
    "latent": Row(title="latent attention, causal", plain=latent, group=None, latent=True,
                  sdpa=lambda: {"is_causal": True}, **_CAUSAL),
    "latent decode": Row(title="latent attention, decoding", plain=latent_decode, group=None, latent=True, queries=1,
                         sdpa=dict),
}  # fmt: skip
"""Variants measured on GPUs: those of CPUs and more."""


def sdpa_call(row: Row, operands: tuple[Tensor, ...]) -> Callable[[], Tensor] | None:
    """A call of F.scaled_dot_product_attention for the row, or None where it has no argument that says the variant.

    A key head that all query heads share is expanded, which copies nothing.
    """
    if row.beyond_sdpa:
        return None
    q, k, v, extras = row.attended(operands)
    arguments = row.sdpa(*extras) if row.sdpa else _as_mask(row, q, k, extras)
    if row.group is None:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return functools.partial(F.scaled_dot_product_attention, q, k, v, **arguments)


def flex_call(row: Row, operands: tuple[Tensor, ...], compiled: bool = True) -> Callable[[], Tensor]:
    """A call of FlexAttention for the row, with a block mask wherever the variant has a mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, extras = row.attended(operands)
    blocks = None
    if row.mask is not None:
        batch = q.shape[0] if extras and not extras[0].is_floating_point() else None  # documents differ by batch
        blocks = create_block_mask(row.mask(*extras), batch, None, q.shape[-2], k.shape[-2], device=str(q.device))
    call = torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention
    score = row.score(*extras) if row.score else None
    return functools.partial(call, q, k, v, score_mod=score, block_mask=blocks, enable_gqa=row.group != 1)


def traced(row: Row, dtype: torch.dtype, d: int | None = None, N: int = 64, **options: object) -> AttentionSpec:
    """The spec of a variant; sizes but d are parameters of it. options: of the backend."""
    d = d or (128 if row.latent else 64)
    operands = Problem(H=8, N=N, d=d, dtype=dtype).tensors(row)

    class Attention(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return row.plain(*tensors)

    graph = fusion.rewrite(torch.export.export(Attention(), operands), options=options).graph
    (found,) = (node for node in graph.nodes if "fusion.attention" in str(node.target))
    (text,) = (arg for arg in found.args if isinstance(arg, str) and arg.startswith("{"))
    return AttentionSpec.from_json(text)
