"""Masks of long sequences, written as `transformers` and others write them: each can be replayed, whatever the length,
and is fused. Programs are analysed and not run."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from fusion.backend import fuse
from fusion.caching import BoundedCache
from fusion.options import Options
from fusion.validation import sites

LOWEST = torch.finfo(torch.float32).min


def _sites(program, length, dynamic):
    """The sites of the report on `program(q, k, v, keep)`, with a padding mask of zeros, ones and twos."""
    reports = []

    def backend(module, inputs):
        reports.append(fuse(module, inputs, Options(inner="eager", emitter="reference"))[1])
        results = [node.meta["example_value"] for node in module.graph.output_node().args[0]]
        return lambda *_: [torch.empty(0) for _ in results]

    q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
    with torch.no_grad():
        torch.compile(program, backend=backend, dynamic=dynamic)(q, k, v, torch.randint(0, 3, (2, length)))
    return [site for report in reports for site in report.sites]


def _attention(q, k, v, mask):
    return (q @ k.mT * 8**-0.5 + mask).softmax(-1) @ v


def causal_and_padding_by_slices(q, k, v, keep):
    """transformers 4.4x, Llama."""
    n = q.shape[-2]
    mask = torch.full((n, n), LOWEST).triu(1)
    mask *= torch.arange(n) > torch.arange(n).reshape(-1, 1)
    mask = mask[None, None].expand(q.shape[0], 1, -1, -1).clone()
    dead = (mask[:, :, :, :n] + keep[:, None, None, :]) == 0
    mask[:, :, :, :n] = mask[:, :, :, :n].masked_fill(dead, LOWEST)
    return _attention(q, k, v, mask[:, :, :, : k.shape[-2]])


def rows_without_keys_unmasked(q, k, v, keep):
    """transformers 4.3x, for SDPA."""
    n = q.shape[-2]
    causal = torch.full((n, n), LOWEST).triu(1)[None, None]
    mask = causal.masked_fill((1.0 - keep[:, None, None, :].expand(-1, 1, n, -1).float()).bool(), LOWEST)
    return _attention(q, k, v, mask.mul(~torch.all(mask == LOWEST, dim=-1, keepdim=True)))


def sliding_by_tril(q, k, v, keep):
    """Gemma 2."""
    n = q.shape[-2]
    causal = torch.full((n, n), LOWEST).triu(1)[None, None].expand(q.shape[0], 1, -1, -1)
    causal = causal.masked_fill(keep[:, None, None, :] == 0, LOWEST)
    sliding = torch.tril(torch.ones_like(causal, dtype=torch.bool), diagonal=-512)
    mask = torch.where(sliding, LOWEST, causal)
    return (torch.tanh(q @ k.mT / 50) * 50 + mask[:, :, :, : k.shape[-2]]).softmax(-1) @ v


def sliding_by_positions(q, k, v, keep):
    """Mistral."""
    place = torch.arange(q.shape[-2])
    dead = place > place.reshape(-1, 1)
    dead.bitwise_or_(place <= place.reshape(-1, 1) - 256)
    mask = (torch.full((len(place), len(place)), LOWEST) * dead)[None, None].expand(q.shape[0], 1, -1, -1)
    return _attention(q, k, v, mask.masked_fill((keep == 0)[:, None, None], LOWEST))


def packed_positions(q, k, v, keep):
    """Numbers of packed sequences, found from positions that begin again: here one sequence, as without packing."""
    place = torch.arange(q.shape[-2])
    positions = place[None].expand(q.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    live = (place <= place[:, None]) & (sequence[:, :, None] == sequence[:, None, :])
    return _attention(q, k, v, torch.where(live[:, None], 0.0, LOWEST))


def packed_by_index(q, k, v, keep):
    """transformers 5, with index tensors in the place of `vmap`."""
    sequence = (torch.diff(keep, prepend=keep[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b = torch.arange(q.shape[0])[:, None, None, None]
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    kept = F.pad(keep, (0, 16)).bool()
    live = (j <= i) & (sequence[b, i] == sequence[b, j]) & kept[b, j]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live)


def positions_by_cumsum(q, k, v, keep):
    position = (keep.cumsum(-1) - 1).masked_fill(keep == 0, 1)
    live = (position[:, None, None, :] <= position[:, None, :, None]) & (keep != 0)[:, None, None, :]
    return torch.where(live, q @ k.mT, torch.full((), LOWEST)).softmax(-1) @ v


def slopes_by_cumsum(q, k, v, keep):
    """BLOOM."""
    n = q.shape[-2]
    bias = torch.tensor([0.5, 0.25])[:, None, None] * ((keep.cumsum(-1) - 1) * keep)[:, None, None, :]
    dead = torch.ones(n, n, dtype=torch.bool).triu(1) | (keep == 0)[:, None, None, :]
    return (bias + q @ k.mT).masked_fill(dead, LOWEST).softmax(-1) @ v


def local_and_global(q, k, v, keep):
    """Longformer."""
    place, everywhere = torch.arange(q.shape[-2]), keep == 2
    live = (place[:, None] - place).abs() <= 128
    live = (live | everywhere[:, None, :, None] | everywhere[:, None, None, :]) & (keep > 0)[:, None, None, :]
    weights = (q @ k.mT).masked_fill(~live, LOWEST).softmax(-1)
    return weights.masked_fill((keep == 0)[:, None, :, None], 0.0) @ v


def chunks_after_padding(q, k, v, keep):
    """Llama 4."""
    place, padding = torch.arange(q.shape[-2]), (keep == 0).cumsum(-1)[:, -1:, None]
    chunk = (place - padding) // 128
    live = (chunk == chunk.mT) & (place <= place[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None])


def images_within_text(q, k, v, keep):
    """Gemma 3."""
    image = keep == 1
    first = image & ~F.pad(image, (1, 0), value=0)[:, :-1]
    group = torch.where(image, first.int().cumsum(1) - 1, -1)
    same = (group[:, :, None] == group[:, None, :]) & (group != -1)[:, :, None]
    place = torch.arange(q.shape[-2])
    return _attention(q, k, v, torch.where((same | (place <= place[:, None]))[:, None], 0.0, LOWEST))


def sinks_beside_keys(q, k, v, keep):
    """GPT-OSS."""
    n = q.shape[-2]
    scores = q @ k.mT + torch.full((n, n), -torch.inf).triu(1)
    sinks = torch.tensor([0.5, 1.0]).reshape(1, -1, 1, 1).expand(q.shape[0], -1, n, -1)
    scores = torch.cat([scores, sinks], -1)
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def prefix_of_blocks(q, k, v, keep):
    n = q.shape[-2]
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[:, : n // 4] = True
    mask[n // 2 :, n // 2 :] = torch.ones(n - n // 2, n - n // 2).tril().bool()
    blocks = torch.ones(n // 64, n // 64, dtype=torch.bool).tril().repeat_interleave(64, 0).repeat_interleave(64, 1)
    return (q @ k.mT).masked_fill(~(mask | blocks), -torch.inf).softmax(-1) @ v


PROGRAMS = [
    causal_and_padding_by_slices, rows_without_keys_unmasked, sliding_by_tril, sliding_by_positions, packed_positions,
    packed_by_index, positions_by_cumsum, slopes_by_cumsum, local_and_global, chunks_after_padding, images_within_text,
    sinks_beside_keys, prefix_of_blocks,
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("length", "dynamic"),
    [
        (2048, True),
        (8192, False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2048, False), (8192, True))),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_masks_of_long_sequences_are_compared_and_fused(monkeypatch, program, length, dynamic):
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())
    before = counters["fusion"]["skipped"]
    (site,) = _sites(program, length, dynamic)
    assert site.reason is None
    assert site.validated.startswith("values in")
    assert counters["fusion"]["skipped"] == before


def test_lines_of_constants_are_replayed_at_any_length():
    (site,) = _sites(packed_positions, 1 << 17, True)
    assert site.reason is None and site.validated.startswith("values in")
