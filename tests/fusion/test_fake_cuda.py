"""Ops on fake CUDA tensors: they mix no devices, and the host reads no number of the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx import Graph

import fusion
from fusion.ir.tile_map import MapSpec
from fusion.passes.replace import _operand
from fusion.runtime import kernels
from fusion.runtime.tile_map_op import Cells
from fusion.torch_private.tensors import FakeTensorMode

N = 96
I, J = torch.arange(N)[:, None], torch.arange(N)
GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS = torch.arange(3).repeat_interleave(N // 3).expand(2, -1)
MASK = torch.rand(2, 1, N, N, generator=GENERATOR) > 0.5
PADDING = torch.arange(N) < torch.tensor([[N], [60]])


def _longformer(data):
    return ((I - J).abs() <= 40) | (J < 4) | (I < 4)


def _documents(data):
    return (data[:, None, :, None] == data[:, None, None, :]) & (J <= I) & (I - J < 40)


def _padding(data):
    return data[:, None, None, :] & ((I // 32 == J // 32) | (J < 8))


def _prefix(data):
    return (J <= I) | ((data[:, None, :, None] == 1) & (data[:, None, None, :] == 1))


def _additive(data):
    return data > -1e9


CASES = {
    "longformer": (_longformer, PADDING),
    "documents": (_documents, DOCUMENTS),
    "padding": (_padding, PADDING),
    "prefix": (_prefix, DOCUMENTS),
    "mask": (lambda data: data, MASK),
    "additive": (_additive, torch.zeros(2, 1, N, N).masked_fill(~MASK, torch.finfo(torch.float32).min)),
}


@pytest.mark.parametrize("name", CASES)
def test_tile_maps(name: str) -> None:
    live, data = CASES[name]

    def attention(q, k, v, data):
        scores = q @ k.mT / 4
        return (scores + data if name == "additive" else scores.masked_fill(~live(data), -math.inf)).softmax(-1) @ v

    operands = [torch.randn(2, 2, N, 16, generator=GENERATOR) for _ in range(3)]
    with fusion.collect_reports() as reports:
        compiled = torch.compile(
            attention, backend="fusion", dynamic=False, options={"inner": "eager", "tile_maps": "always"}
        )
        compiled(*operands, data)
    nodes = reports[0].graph_after.graph.find_nodes(op="call_function", target=torch.ops.fusion.tile_map.default)
    assert nodes, reports[0]
    (data_nodes, sizes, spec) = nodes[0].args
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [node.meta["val"] for node in data_nodes]
        on_cuda = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in given]
        codes = Cells(parsed := MapSpec.from_json(spec), on_cuda, dict(zip(parsed.sizes, sizes, strict=True))).codes()
    assert codes.device.type == "cuda" and codes.shape[-1] == 2


def test_gradients_of_auxiliary_outputs_in_a_capture(monkeypatch) -> None:
    """The host reads whether they are zero, but not in a capture; Inductor captures around the op."""
    seen, capturing = [], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(kernels, "backward_of", lambda *_: lambda *given: seen.append(given))
    backward = kernels.outputs_backward_of("", "cuda", "")
    with FakeTensorMode():
        grad = torch.empty(4, device="cuda")
        with pytest.raises(RuntimeError):  # the host would read a number of the device
            backward(grad, [grad])
        capturing[0] = True
        backward(grad, [grad])
    assert seen == [(grad, [grad])]
    assert torch.Tag.cudagraph_unsafe in torch.ops.fusion.attention_outputs_backward.default.tags


def test_a_number_on_the_host_is_copied_to_the_device() -> None:
    """Eager mode multiplies scores on a GPU by a tensor of one element on the host; a kernel cannot read it."""
    graph = Graph()
    number, scores = graph.placeholder("number"), graph.placeholder("scores")
    root = graph.call_function(torch.ops.aten.mul.Tensor, (scores, number))
    graph.output(root)
    with FakeTensorMode():
        number.meta["val"] = torch.empty(())
        scores.meta["val"] = root.meta["val"] = torch.empty(4, 4, device="cuda")
        with graph.inserting_before(root):
            copied = _operand(graph, root, number, {})
            assert _operand(graph, root, scores, {}) is scores
    assert copied.meta["val"].device == scores.meta["val"].device and copied.meta["val"].shape == ()
    graph.lint()
