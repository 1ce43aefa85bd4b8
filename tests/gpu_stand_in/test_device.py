"""Attention on a GPU that is not there: torch's wheel for CUDA, Triton's launcher, Inductor for CUDA, autograd's
threads and captured graphs as they are on a device, with the kernels executed as PTX."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fusion
from tests import numerics

Tensors = list[torch.Tensor]


def attention(q, k, v, slopes):
    """That of the README."""
    s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    s = 30 * torch.tanh(s / 30) - slopes * (i - j)
    s = s.masked_fill((j > i) | (j <= i - 16), -torch.inf)
    return s.softmax(-1) @ v


def operands(place: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensors:
    slopes = torch.logspace(-1, -4, 4, base=2).view(4, 1, 1)
    tensors = [*torch.randn(3, 1, 4, 40, 32).unbind(0), slopes]
    return [tensor.to(place, dtype).requires_grad_() for tensor in tensors]


def results(function: Any, tensors: Tensors) -> Tensors:
    """The output and all gradients."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*tensors)
    (out.float() if out.dtype != torch.float64 else out).square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in tensors)]  # pyright: ignore


def check(function: Any, tensors: Tensors) -> None:
    actual = [tensor.cpu() for tensor in results(function, tensors)]
    eager = [tensor.cpu() for tensor in results(attention, tensors)]
    numerics.assert_as_exact_as_eager(actual, eager, results(attention, [t.double().cpu() for t in tensors]))


def test_operators(device: Any) -> None:
    """On the device's tensors they are the CPU's, also where results get their size by the operator."""
    x, w = torch.randn(5, 7), torch.randn(7, 3)
    for function in (torch.matmul, lambda a, b: (a[:, :3] * b.sum()).isfinite(), lambda a, b: a[a > 0].sort().values):
        numerics.assert_same(function(x.cuda(), w.cuda()).cpu(), function(x, w))
    model, batches = torch.nn.BatchNorm1d(7), x.clone().requires_grad_()
    model(batches).square().mean().backward()
    there, again = torch.nn.BatchNorm1d(7).cuda(), x.cuda().requires_grad_()
    there(again).square().mean().backward()
    numerics.assert_same(again.grad.cpu(), batches.grad)  # pyright: ignore
    numerics.assert_same(there.running_mean.cpu(), model.running_mean)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_program_of_the_readme(device: Any, inner: str) -> None:
    options = {"inner": inner, "strict": True}
    check(torch.compile(attention, backend="fusion", options=options), operands())
    assert device.launched[0] == "attention_forward"
    assert {"attention_backward_prepare", "attention_forward"} < set(device.launched)


def test_another_device_than_the_current_one(device: Any) -> None:
    check(torch.compile(attention, backend="fusion", options={"strict": True}), operands("cuda:1"))
    assert torch.cuda.current_device() == 0 and "attention_forward" in device.launched


def test_tiles_are_measured_in_a_process_of_their_own(device: Any) -> None:
    """Which computes nothing on this device; so any of them may be the fastest."""
    options = {"autotune": True, "inner": "eager", "strict": True}
    with fusion.collect_reports() as reports, torch.no_grad():
        compiled = torch.compile(attention, backend="fusion", options=options)
        tensors = operands()
        out = compiled(*tensors).cpu()
        eager, exact = attention(*tensors).cpu(), attention(*[tensor.double().cpu() for tensor in tensors])
    assert re.search(r"runs +tiles of .*, measured", str(reports[0])) and device.launched == ["attention_forward"]
    numerics.assert_as_exact_as_eager(out, eager, exact)


def test_captured_and_replayed(device: Any) -> None:
    """Graphs of forward and backward, with other numbers at each call."""
    compiled = torch.compile(attention, backend="fusion", mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        check(compiled, operands())
    assert device.replays >= 4
    assert device.launched.count("attention_forward") == 4


def test_waiting_in_a_capture_fails(device: Any) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def test_reading_outside_of_a_tensor_fails(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion.codegen.triton import module

    load = module.load
    monkeypatch.setattr(module, "load", lambda text, *rest: load(text.replace("key < stop", "key < 1 << 24"), *rest))
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.compile(attention, backend="fusion", options={"inner": "eager"})(*operands(dtype=torch.float16))
    assert "outside of all tensors" in str(device.faults.pop())
