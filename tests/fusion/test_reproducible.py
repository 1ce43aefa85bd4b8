"""The option `reproducible`, from torch.compile on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")


import fusion
from fusion.errors import OptionError, StrictError
from fusion.options import Options
from tests import processes
from tests.reproducible import same_bits, threads

OPTIONS = {"reproducible": True, "inner": "eager"}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries over all keys so far."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    mask = torch.arange(n_k) <= torch.arange(n_q)[:, None] + (n_k - n_q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_in_chunks_and_decoding_have_the_bits_of_one_call(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 32).to(dtype) for heads in (4, 2, 2))
    run = torch.compile(attend, backend="fusion", dynamic=True, options=OPTIONS)
    with torch.no_grad():
        whole = run(q, k, v)
        for first, last, count in ((0, 170, 1), (170, 299, 2), (299, 300, 5), (3, 7, 1)):
            with threads(count):
                rows = run(q[1:, :, first:last], k[1:, :, :last], v[1:, :, :last])
            assert same_bits(rows, whole[1:, :, first:last])
    trained = run(q.requires_grad_(), k, v)
    assert same_bits(trained.detach(), whole)


def sharded(rank: int, folder: str, schedule: str) -> None:
    """On one of two processes: the whole result of `attend` on sequences that they share."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.fusion.sequence_cases import join

    join(rank, folder, 2)
    mesh = init_device_mesh("cpu", (2,))
    shards = [distribute_tensor(x, mesh, [Shard(2)]) for x in torch.load(f"{folder}/operands.pt")]
    result = fusion.sequence_parallel(attend, options={"reproducible": True, "sequences": schedule})(*shards)
    torch.save(result.full_tensor(), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("schedule", ["auto", pytest.param("all_to_all", marks=pytest.mark.long)])
def test_processes_that_share_a_sequence_have_the_bits_of_one(tmp_path: Path, schedule: str) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no distributed with gloo")
    torch.manual_seed(0)
    operands = [torch.randn(1, heads, 290, 32) for heads in (4, 2, 2)]
    torch.save(operands, tmp_path / "operands.pt")
    processes.run(sharded, (str(tmp_path), schedule), nprocs=2)
    with torch.no_grad():
        whole = torch.compile(attend, backend="fusion", options=OPTIONS)(*operands)
    assert all(same_bits(torch.load(tmp_path / f"{rank}.pt"), whole) for rank in (0, 1))


def test_the_report_says_what_it_costs() -> None:
    operands = [torch.randn(1, 2, 100, 16) for _ in range(3)]
    with torch.no_grad():
        report = fusion.explain(F.scaled_dot_product_attention, *operands, options=OPTIONS)
        assert "reproducible:" in str(report) and "predicted in place of" in str(report)
        plain = fusion.explain(F.scaled_dot_product_attention, *operands, options={"inner": "eager"})
    assert "reproducible" not in str(plain)


def test_attention_that_cannot_have_it_is_an_error() -> None:
    operands = [torch.randn(1, 2, 100, 16) for _ in range(3)]
    run = torch.compile(F.scaled_dot_product_attention, backend="fusion", options=OPTIONS | {"emitter": "reference"})
    with torch.no_grad(), pytest.raises(Exception, match="emitter 'reference' on device 'cpu' follow") as caught:
        run(*operands)
    assert StrictError.__name__ in repr(caught.value)


@pytest.mark.parametrize("other", [{"approximate": "polynomial"}, {"sequences": "zigzag"}, {"sequences": "mesh"}])
def test_options_that_contradict_it_are_refused(other: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="reproducible"):
        Options.parse({"reproducible": True, **other})
    assert Options.parse({"reproducible": True}).strict
