"""I/O and bound of masked attentions, against counts over the dense mask."""

import itertools
import math

import pytest
import torch

import fusion
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS
from fusion.machine import machine
from fusion.planning import counted
from fusion.planning.register_tiles import planes_of, target_of
from fusion.planning.schedules import lower_bound
from fusion.report.data import mask_text
from tests.numerics import assert_same_in_float64, assert_within

MASKS = {
    "causal": lambda i, j, h: j <= i,
    "strictly causal": lambda i, j, h: j < i,
    "window": lambda i, j, h: (j <= i) & (i - j < 40),
    "both sides": lambda i, j, h: (i - j).abs() <= 33,
    "window of each head": lambda i, j, h: (j <= i) & (i - j < 16 * (h + 1)),
    "first keys": lambda i, j, h: j < 70,
    "later rows": lambda i, j, h: j + 25 <= i,
    "ahead": lambda i, j, h: (j >= i) & (j < i + 50),
    "twice as many keys": lambda i, j, h: j <= 2 * i + 1,
    "chunks": lambda i, j, h: (j <= i) & (j >= i // 64 * 64),
}
SHAPES = ((1, 2, 200, 200, 16), (2, 3, 77, 300, 32), (1, 4, 256, 130, 64))


def positions(heads: int, n_q: int, n_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(n_q)[:, None], torch.arange(n_k), torch.arange(heads)[:, None, None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_io_and_bound_are_what_the_mask_needs(name, shape):
    batch, heads, n_q, n_k, d = shape
    live = MASKS[name](*positions(heads, n_q, n_k)).expand(heads, n_q, n_k)

    def attend(q, k, v):
        scores = q @ k.mT / math.sqrt(d)
        return scores.masked_fill(~MASKS[name](*positions(heads, n_q, n_k)), -math.inf).softmax(-1) @ v

    q, k, v = (torch.randn(batch, heads, n, d) for n in (n_q, n_k, n_k))
    (site,) = fusion.explain(attend, q, k, v).sites
    plan, tile, here = site.plan, site.plan.choice.tile, machine(None)
    step = target_of(here).register_tile(planes_of(site.spec, target_of(here)))[1]
    visited = sum(sum(live_keys(head, tile.rows, step, n_k)) for head in live)
    # Q, the output and a statistic of each row once, K and V of the visited tiles (`planning.schedules`).
    assert_same_in_float64(plan.io, batch * (heads * n_q * (2 * d + 1) + 2 * d * visited))
    needed_rows, needed_keys = live.any(2).sum().item(), live.any(1).sum().item()
    compulsory = batch * (needed_rows * d + heads * n_q * d + 2 * needed_keys * d)
    assert_same_in_float64(lower_bound(plan.problem, math.inf), compulsory)
    assert plan.ratio >= 1


def decayed(scores: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A decay by rows and keys, which the graph makes as a table for each head."""
    i, j, _ = positions(base.shape[0], *scores.shape[-2:])
    return scores * base ** ((i + 2 * j) / 100)


TABLES = {
    "bias of each head": (lambda b, h, n, m: torch.randn(h, n, m), torch.add, 4, lambda b, h: h),
    "bias of each batch element": (lambda b, h, n, m: torch.randn(b, 1, n, m), torch.add, 4, lambda b, h: b),
    "bias of all": (lambda b, h, n, m: torch.randn(b, h, n, m), torch.add, 4, lambda b, h: b * h),
    "one bias, in half precision": (lambda b, h, n, m: torch.randn(n, m).half(), torch.add, 2, lambda b, h: 1),
    "booleans": (lambda b, h, n, m: torch.rand(n, m) < 0.5, lambda s, x: torch.where(x, s, 0.5 * s), 1, lambda b, h: 1),
    "decay": (lambda b, h, n, m: torch.rand(h, 1, 1), decayed, 4, lambda b, h: h),
}
"""Tables of an element for each score: one of that kind, its use, bytes of an element, and copies of it."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "twice as many keys", "chunks"])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_read_where_scores_are_computed(kind, mask):
    batch, heads, n_q, n_k, d = 2, 3, 200, 260, 16
    make, use, size, copies = TABLES[kind]
    keeps = MASKS.get(mask, lambda i, j, h: (i >= 0) & (j >= 0))
    live = keeps(*positions(1, n_q, n_k)).expand(n_q, n_k)

    def attend(q, k, v, table):
        scores = use(q @ k.mT / math.sqrt(d), table)
        return scores.masked_fill(~keeps(*positions(1, n_q, n_k)), -math.inf).softmax(-1) @ v

    q, k, v = (torch.randn(batch, heads, n, d) for n in (n_q, n_k, n_k))
    (site,) = fusion.explain(attend, q, k, v, make(batch, heads, n_q, n_k)).sites
    plan, tile, here = site.plan, site.plan.choice.tile, machine(None)
    rows, step = target_of(here).register_tile(planes_of(site.spec, target_of(here)))
    keys = {size: live_keys(live, size, step, n_k) for size in (tile.rows, rows)}
    computed = sum(min(rows, n_q - n * rows) * count for n, count in enumerate(keys[rows]))
    read = heads * (n_q * (2 * d + 1) + 2 * d * sum(keys[tile.rows]) + computed * size / 4)
    assert_same_in_float64(plan.io, batch * read)
    needed = batch * heads * (live.any(1).sum().item() * d + n_q * d + 2 * live.any(0).sum().item() * d)
    needed += live.sum().item() * copies(batch, heads) * size / 4
    assert_same_in_float64(lower_bound(plan.problem, math.inf), needed)
    assert plan.ratio >= 1 and "t*N_q*N_k" in plan.explain()


def live_keys(live: torch.Tensor, rows: int, step: int, n_k: int) -> list[int]:
    """Keys that each block of rows visits, in steps."""
    found = [live[first : first + rows].any(0).nonzero() for first in range(0, len(live), rows)]
    return [
        min(-(-(int(keys[-1]) + 1) // step) * step, n_k) - int(keys[0]) // step * step if len(keys) else 0
        for keys in found
    ]


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_data_are_counted_on_the_inputs(name):
    """A tile is visited where a cell of the map that it touches holds a live score (`fusion.ir.tile_map`)."""
    heads, n_q, n_k, d = 2, 400, 500, 16
    live = MASKS[name](*positions(heads, n_q, n_k)).expand(heads, n_q, n_k)

    def attend(q, k, v, mask):
        return (q @ k.mT / math.sqrt(d)).masked_fill(~mask, -math.inf).softmax(-1) @ v

    q, k, v = (torch.randn(1, heads, n, d) for n in (n_q, n_k, n_k))
    (site,) = fusion.explain(attend, q, k, v, live, options={"tile_maps": "always"}).sites
    plan, tile, visited = site.plan, site.plan.choice.tile, 0
    for first, start in itertools.product(range(0, n_q, tile.rows), range(0, n_k, tile.keys)):
        end = min(start + tile.keys, n_k)
        rows = slice(first // CELL_ROWS * CELL_ROWS, -(-min(first + tile.rows, n_q) // CELL_ROWS) * CELL_ROWS)
        keys = slice(start // CELL_KEYS * CELL_KEYS, -(-end // CELL_KEYS) * CELL_KEYS)
        visited += (end - start) * int(live[:, rows, keys].any((1, 2)).sum())
    mask = plan.computed * heads * n_q * n_k / 4  # its elements are bytes
    assert_same_in_float64(plan.io, heads * n_q * (2 * d + 1) + 2 * d * visited + mask)
    needed_rows, needed_keys = live.any(2).sum().item(), live.any(1).sum().item()
    needed = (needed_rows + heads * n_q + 2 * needed_keys) * d + live.sum().item() / 4
    assert_same_in_float64(lower_bound(plan.problem, math.inf), needed)
    assert plan.ratio >= 1 and plan.schedule == "block_sparse"
    text = mask_text(site.spec, site.attentions[0].names, plan)
    assert f"{100 * live.double().mean().item():.0f} % of the scores live" in text and "of these inputs" in text


@pytest.mark.parametrize("mask", ["one for all", "documents", "window or first keys", "float positions"])
@pytest.mark.parametrize("most", [1 << 23, 1 << 14])
def test_shares_of_masks_that_no_range_tells(mask, most, monkeypatch):
    """No batch element or head has a mask of its own here. Of many scores those of some blocks of rows are counted."""
    monkeypatch.setattr(counted, "MOST_SCORES", most)
    n = 640
    i, j, _ = positions(1, n, n)
    document = torch.arange(n) // 100
    live = {
        "one for all": torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.7,
        "documents": document[:, None] == document,
        "window or first keys": (j <= i) & ((i - j < 64) | (j < 4)),
        "float positions": j <= i,
    }[mask]

    def attend(q, k, v, given, document):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(q.shape[-2])
        dead = {
            "one for all": lambda: ~given,
            "documents": lambda: document[:, None] != document,
            "window or first keys": lambda: ~((j <= i) & ((i - j < 64) | (j < 4))),
            "float positions": lambda: (i - j).float() < 0,
        }[mask]()
        return (q @ k.mT / 4).masked_fill(dead, -math.inf).softmax(-1) @ v

    q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
    (site,) = fusion.explain(attend, q, k, v, live, document).sites
    plan = site.plan
    share = live.double().mean().item()
    assert_within(abs(plan.problem.live_share(1) - share), 0.1 * share + 0.005 if most < 1 << 20 else 1e-9)
    assert f"{100 * plan.problem.live_share(1):.0f} % of the scores live" in mask_text(
        site.spec, site.attentions[0].names, plan
    )
    assert plan.ratio >= 1


@pytest.mark.parametrize(
    ("maps", "reason"), [("never", "positions alone, not by data (option tile_maps)"), ("always", "; every call looks")]
)
def test_one_sentence_says_why_more_is_computed_than_live(maps, reason):
    def attend(q, k, v, keep):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return (q @ k.mT).masked_fill((j > i) | ~keep[:, None, None], -math.inf).softmax(-1) @ v

    (site,) = fusion.explain(
        attend, *torch.randn(3, 1, 1, 256, 8), torch.arange(256)[None] < 100, options={"tile_maps": maps}
    ).sites
    text = mask_text(site.spec, site.attentions[0].names, site.plan)
    assert "; a tile with a live score is computed whole" in text and reason in text


def test_a_mask_of_which_nothing_is_skipped_names_the_option_that_would():
    def attend(q, k, v, documents):
        dead = documents[:, :, None] != documents[:, None, :]
        return (q @ k.mT).masked_fill(dead[:, None], -math.inf).softmax(-1) @ v

    arguments = (*torch.randn(3, 1, 1, 96, 8), torch.arange(96)[None] // 20)
    texts = {maps: str(fusion.explain(attend, *arguments, options={"tile_maps": maps})) for maps in ("auto", "never")}
    said = (
        "20 % of the scores live, 100 % computed (of these inputs); no tile is left out, as positions do not tell which"
    )
    assert all(said in text for text in texts.values())
    assert 'options={"tile_maps": "always"} looks for dead tiles' in texts["auto"]
    assert "always" not in texts["never"]
