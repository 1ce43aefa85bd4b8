"""Kernels of SDPA in place of our own: which specs they can express, what they compute, when autotune takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen import triton
from fusion.codegen.triton import launch, peers
from fusion.codegen.triton.autotune import Tuner
from fusion.codegen.triton.launch import Kernel
from fusion.machine import INTERPRETER
from fusion.runtime import kernels
from fusion.runtime.guards import failures_raised
from tests.codegen.mlir.cases import assert_as_exact_as_eager, case, draw
from tests.numerics import assert_as_exact_as_eager as assert_exact

SHAPE = {"B": 2, "H": 2, "Nq": 20, "Nk": 20}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 3, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    live = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(~live, torch.finfo(q.dtype).min), -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1))


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :1, :25], v[:, :1, :25])


def by_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(2, -1, 4, 16).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def is_peer(run: functools.partial) -> bool:
    return "peers.py" in getattr(run.func, "__code__", is_peer.__code__).co_filename


def prefers_peers(run: functools.partial, device: torch.device) -> float:
    return 0.5 if is_peer(run) else 1.0


@pytest.mark.parametrize("function", [plain, causal, grouped, shared, by_tokens])
def test_what_sdpa_says_is_what_the_spec_says(function: Callable[..., Tensor]) -> None:
    """Found in a model, called with the tensors that its op is called with."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, n, 16) for n in (70, 30, 30)]
    if function is by_tokens:
        inputs = [x.transpose(1, 2).flatten(2) for x in inputs]
    made: list[Kernel] = []

    def compiled(spec, *_) -> Kernel:
        made.append(Kernel(spec, tuner=Tuner(clock=prefers_peers)))
        return made[-1]

    emitter = SimpleNamespace(supports=triton.supports, reads=triton.reads, compile=compiled)
    torch._dynamo.reset()
    with failures_raised(), kernels.emitting("interpreted", ("cpu",), lambda: emitter, lambda device: INTERPRETER):
        got = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})(*inputs)
    assert_exact(got, function(*inputs), function(*(x.double() for x in inputs)))
    sizes = {"B0": 2, "B1": 4, "Nq": 70, "Nk": 25 if function is shared else 30}
    assert [kernel.choice([sizes[n] for n in kernel.spec.sizes]).peer for kernel in made] == ["sdpa math"]


def test_a_single_wrong_row_is_seen() -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    out = Kernel(c.spec)(operands, sizes)
    assert peers.as_exact_as_eager(c.spec, operands, sizes, out)
    out[1, 1, -1, 3] += 0.01
    assert not peers.as_exact_as_eager(c.spec, operands, sizes, out)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch, own_cache) -> None:
    """What CPUs have, too; beside one tile."""
    monkeypatch.setattr(launch, "candidates", lambda kernel, spec, extents, tile, machine: [tile])
    kinds = {"sdpa math": SDPBackend.MATH, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    here = {name: functools.partial(peers.sdpa, kind) for name, kind in kinds.items()}
    monkeypatch.setattr(peers, "PEERS", here)


@pytest.mark.parametrize(
    "name", ["soft_cap", "alibi", "bias", "window", "documents", "left_padded", "chunks", "causal_last_key"]
)
def test_other_programs_are_not_sdpa_s(name: str) -> None:
    assert not peers.calls(case(name, d=16).spec, torch.device("cpu"))
    assert peers.calls(case("causal", d=16).spec, torch.device("cpu"))


@pytest.mark.parametrize("faster", [True, False])
def test_a_peer_is_called_where_it_is_faster(faster: bool) -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=lambda run, device: 1.0 - 0.5 * is_peer(run) * faster))
    for _ in range(2):
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert kernel.choice(sizes).measured and kernel.choice(sizes).peer == ("sdpa math" if faster else "")
    assert ("sdpa math, measured to be faster than tiles of" in kernel.source(sizes)) == faster
    another = Kernel(c.spec, tuner=Tuner())
    assert_as_exact_as_eager(another(operands, sizes), c, operands)
    assert another.choice(sizes).peer == kernel.choice(sizes).peer, "remembered"
    assert Kernel(c.spec).choice(sizes).peer == "", "only where it was asked for"


def test_a_peer_that_is_less_exact_is_not_called(monkeypatch) -> None:
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=prefers_peers))
    got = kernel(operands, sizes)
    monkeypatch.undo()
    assert_as_exact_as_eager(got, c, operands)
    assert kernel.choice(sizes).measured and kernel.choice(sizes).peer == ""


def test_a_peer_that_refuses_a_later_call_is_not_missed(monkeypatch) -> None:
    c = case("causal", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=prefers_peers))
    kernel(operands, sizes)
    assert kernel.choice(sizes).peer == "sdpa math"

    def refuse(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.")

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", refuse)
        got = kernel(operands, sizes)
    assert_as_exact_as_eager(got, c, operands)
