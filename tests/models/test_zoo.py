"""Real architectures through the whole backend: as exact as eager, and nearly every attention fused.

A core of them runs by default, all of them with `make test-long`.
"""

from dataclasses import replace

import pytest
import torch

from tests.models import oracle
from tests.models.harness import Mismatch, Outcome, check
from tests.models.zoo import ZOO, Entry, by_name

FLOAT32 = "architectures, float32, batch 2"
SHARE_FUSED = 0.95
UNFUSED = {"longformer": 2, "groupvit": 2, "big_bird-sparse": 1}
"""Sites of the core that are not fused: diagonals of chunks, softmax over queries, keys gathered in blocks."""

# Entries in which the sites that a softmax makes are few, or stand over another axis than the keys.
UNUSUAL_SOFTMAX = {"wavlm", "groupvit"}


# A subset that has something of everything, for what costs more per architecture or adds less.
DIVERSE = """bert gpt2 llama gemma2 bloom t5 deberta-v2 swin whisper gpt_oss mpt deepseek_v3 falcon-alibi xlnet clip
swinv2 bart vit wav2vec2 beit""".split()
# What runs by default: these, and others that write attention in a way of their own.
CORE = (
    """mpnet openai-gpt gpt_neo xglm longformer fsmt longt5 qwen3_next diffllama modernbert detr sam_vision_model wavlm
groupvit patchtst big_bird-sparse deberta-v2-buckets falcon-grouped""".split()
    + DIVERSE
)


def _chosen(names: list[str], default: str) -> list:
    """All names as parameters, of which those in `default` run by default."""
    return [pytest.param(name, marks=[] if name in default.split() else [pytest.mark.long]) for name in names]


ONE_LAYER = {"bart", "detr", "fsmt", "whisper"}
"""Encoders with decoders, each of which takes as long as two others and whose layers are alike."""


def _short(entry: Entry) -> Entry:
    """An encoder with a decoder, of a layer each; others as they are."""
    layers = (("encoder_layers", 1), ("decoder_layers", 1)) if entry.name in ONE_LAYER else ()
    return replace(entry, overrides=(*entry.overrides, *layers))


def _parameters() -> list:
    return [pytest.param(_short(e), id=e.name, marks=[] if e.name in CORE else [pytest.mark.long]) for e in ZOO]


def _check(outcomes: dict[str, list[Outcome]], title: str, entry: Entry, **how) -> Outcome:
    try:
        outcome = check(entry, **how)
    except Mismatch as mismatch:
        outcomes.setdefault(title, []).append(mismatch.outcome)
        raise
    outcomes.setdefault(title, []).append(outcome)
    return outcome


@pytest.mark.parametrize("entry", _parameters())
def test_float32(entry: Entry, outcomes):
    """Padded batch of two, float32, the rest of the graph in plain torch."""
    outcome = _check(outcomes, FLOAT32, entry)
    assert outcome.sites or not outcome.witnessed, f"overlooked: {[str(s) for s in outcome.witnessed]}"
    assert outcome.fused + len(outcome.unfused) == outcome.sites
    assert all(left.reason and left.reason != "None" for left in outcome.unfused), outcome.unfused
    assert not outcome.notes, outcome.notes
    if entry.essential and entry.name not in UNUSUAL_SOFTMAX:
        _check_that_attention_chooses(outcome.entropies)


def _check_that_attention_chooses(entropies: tuple[float, ...]) -> None:
    """The weights make attention choose: with uniform attention, wrong scores would pass unseen."""
    assert entropies, "no softmax seen"
    assert sum(entropies) / len(entropies) < 0.9


def test_nearly_every_site_is_fused(outcomes):
    """All sites of the core, by the oracle's count, but for those that are known; and 95 % where all of them ran."""
    found = outcomes.get(FLOAT32, [])
    if len(found) < len(CORE):
        pytest.skip(f"only {len(found)} architectures ran before this test")
    left = {o.name: o.total - o.fused for o in found if o.name in CORE and o.fused < o.total}
    assert left == UNFUSED
    if len(found) == len(ZOO):
        total, fused = sum(o.total for o in found), sum(o.fused for o in found)
        assert fused >= SHARE_FUSED * total, f"{fused} of {total} sites fused"


def test_every_kind_is_met(outcomes):
    """Each row of the table of what models write occurs in the zoo, by the oracle's own reading of the graphs."""
    found = outcomes.get(FLOAT32, [])
    if len(found) < len(CORE):
        pytest.skip(f"only {len(found)} architectures ran before this test")
    met = frozenset().union(*(o.kinds for o in found))
    assert set(oracle.KINDS) <= met, f"not met: {sorted(set(oracle.KINDS) - met)}"


WITH_INDUCTOR = "bert gpt2 llama gemma2 bloom t5 deberta-v2 swin gpt_oss vit".split()
DYNAMIC = "bert gpt2 llama gemma2 bart deberta-v2".split()  # torch traces these in seconds
# Routing decides by comparing, and in half precision two correct runs may decide differently.
HALF = [name for name in DIVERSE if name not in ("gpt_oss", "deepseek_v3")]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, *parameter.values, marks=parameter.marks, id=f"{str(dtype)[6:]}-{parameter.values[0]}")
        for dtype, default in (
            (torch.bfloat16, "gemma2 swin"),
            (torch.float16, "llama deberta-v2 falcon-alibi"),
        )
        for parameter in _chosen(HALF, default)
    ],
)
def test_half_precision(name: str, dtype: torch.dtype, outcomes):
    outcome = _check(outcomes, f"architectures, {dtype}", by_name(name), dtype=dtype)
    assert outcome.fused == outcome.total, outcome.unfused


@pytest.mark.parametrize("name", _chosen(DIVERSE, "swin gpt_oss deepseek_v3"))
def test_batch_of_one(name: str, outcomes):
    """Dimensions of size 1 fold away and change the graph."""
    outcome = _check(outcomes, "architectures, batch 1", by_name(name), batch=1)
    assert outcome.fused == outcome.total, outcome.unfused


@pytest.mark.parametrize("name", _chosen(DYNAMIC, "gemma2 bart"))
def test_dynamic(name: str, outcomes):
    """Every size, and every float of a module, is a symbol."""
    outcome = _check(outcomes, "architectures, dynamic", _short(by_name(name)), dynamic=True)
    assert outcome.fused == outcome.total, outcome.unfused


@pytest.mark.optimised
@pytest.mark.parametrize("name", _chosen(WITH_INDUCTOR, "llama vit"))
def test_with_inductor(name: str, outcomes):
    """The rest of the graph compiled as users have it."""
    outcome = _check(outcomes, "architectures, Inductor", by_name(name), inner="inductor")
    assert outcome.fused == outcome.total, outcome.unfused


def test_the_zoo_covers_the_field():
    essential = [e for e in ZOO if e.essential]
    assert len(ZOO) >= 120 and len(essential) >= 70
    assert len({e.name for e in ZOO}) == len(ZOO)
    assert {"encoder", "decoder", "encoder-decoder", "vision", "audio", "multimodal"} <= {
        by_name(name).family for name in CORE
    }
