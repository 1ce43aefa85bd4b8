"""Train a small GPT on two processes of this machine: data parallel, sharded, with heads or sequences split.

    python examples/distributed.py [data|sharded|heads|dtensors|sequence ...]

The model is plain PyTorch, and `DistributedDataParallel`, `fully_shard` (FSDP2) and `parallelize_module` (tensor
parallelism by DTensor) are applied as usual; then the whole model is compiled with `backend="fusion"`. With split heads
the attention of each process gets its own heads as local tensors ("heads") or as DTensors of all heads ("dtensors").
With a split sequence a process has half of the tokens of every text, and `fusion.sequence_parallel` computes attention
over all of them: in this way texts are trained that are longer than one process can hold. Every way starts from the
same weights and sees the same tokens as an eager run in one process, and has to arrive at its losses.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusion

Options = dict[str, Any]
Model = Callable[[Tensor], Tensor]
Found = tuple[Tensor, list[Tensor], int]
"""Losses `[STEPS]`, the sums of gradients, and the number of attentions that were compiled to kernels: blocks that
share their compiled code count once."""

PROCESSES, STEPS, LAYERS = 2, 4, 2
BATCH, LENGTH, TOKENS = 4, 128, 64
HEADS, HEAD_WIDTH = 4, 16
WIDTH = HEADS * HEAD_WIDTH
TOLERANCE = 1e-4
"""Between losses of about 4, and gradients: sums over processes round in another order, and every step adds to that."""
VANISHING = 1e-4
"""Gradients below this are compared as if they were of this size: that of the keys' bias is zero but for rounding."""


class Attention(nn.Module):
    """Attention as it is written down: `q`, `k`, `v` `[batch, heads, N, HEAD_WIDTH]`, `bias` `[N, N]`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / HEAD_WIDTH**0.5 + bias).softmax(-1) @ v


class Block(nn.Module):
    """Attention, then an MLP. The number of heads is not written down: a process may hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`x` is `[batch, N, WIDTH]`, `bias` `[N, N]` with -inf after the diagonal; the result is like `x`."""
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(self.attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def alibi(length: int, device: torch.device) -> Tensor:
    """`[length, length]`, with -inf after the diagonal."""
    position = torch.arange(length, device=device)
    distance = position - position[:, None]
    return (distance / 8).masked_fill(distance > 0, float("-inf"))


class GPT(nn.Module):
    """Tokens `[batch, N]` in, scores `[batch, N, TOKENS]` of the next token out. Causal, with ALiBi."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        bias = alibi(ids.shape[1], ids.device)
        x = self.token(ids)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


def data_parallel(model: GPT, options: Options) -> Model:
    """Every process has all weights and half of the batch; gradients are averaged."""
    return torch.compile(DistributedDataParallel(model), backend="fusion", options=options)


def sharded(model: GPT, options: Options) -> Model:
    """Every process has half of each weight and half of the batch; weights are gathered when a block needs them."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.compile(model, backend="fusion", options=options)


def heads_split(model: GPT, options: Options, local: bool = True) -> Model:
    """Every process has half of the heads and the whole batch; attention works on its own heads (`local`), or on
    DTensors of all of them."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    plan: dict[str, ParallelStyle] = {
        name: ColwiseParallel(use_local_output=local) for name in ("query", "key", "value")
    }
    plan |= {"up": ColwiseParallel()} | {name: RowwiseParallel() for name in ("out", "down")}
    if not local:  # the bias meets DTensors, and is one then
        plan["attention"] = PrepareModuleInput(
            input_layouts=(None, None, None, Replicate()), desired_input_layouts=(None, None, None, Replicate())
        )
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return torch.compile(model, backend="fusion", options=options)


def heads_of_dtensors(model: GPT, options: Options) -> Model:
    """As `heads_split`, with DTensors inside of attention."""
    return heads_split(model, options, local=False)


class AttentionOfShards(nn.Module):
    """`Attention` of texts whose tokens are split: `q`, `k`, `v` `[batch, heads, N / processes, HEAD_WIDTH]`."""

    def __init__(self, mesh: DeviceMesh, options: Options) -> None:
        super().__init__()
        self.mesh, self.attend = mesh, fusion.sequence_parallel(self.of_whole_texts, options=options)

    def of_whole_texts(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with the bias of all positions; no process makes it."""
        return Attention()(q, k, v, alibi(q.shape[2], q.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(t, self.mesh, [Shard(2)]) for t in (q, k, v))
        return self.attend(q, k, v).to_local()


def sequence_split(model: GPT, options: Options) -> Model:
    """Every process has all weights and half of the tokens of each text; gradients are averaged."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.blocks:
        block.attention = AttentionOfShards(mesh, options)
    return DistributedDataParallel(model)


WAYS: dict[str, Callable[[GPT, Options], Model]] = {
    "data": data_parallel,
    "sharded": sharded,
    "heads": heads_split,
    "dtensors": heads_of_dtensors,
    "sequence": sequence_split,
}


def train(model: Model, parameters: Sequence[nn.Parameter], share: Any) -> tuple[Tensor, list[Tensor]]:
    """Losses `[STEPS]` on this process's share of every batch, and for every weight the sum of its gradients."""
    sums = [torch.zeros(parameter.shape) for parameter in parameters]
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(0, TOKENS, (BATCH, LENGTH + 1), generator=generator)[share]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        for total, parameter in zip(sums, parameters, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            total += gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return torch.stack(losses), sums


def initial() -> GPT:
    """The model with the weights that every run starts from."""
    torch.manual_seed(0)
    return GPT()


def work(rank: int, ways: Sequence[str], folder: str, options: Options) -> None:
    """One process: trains in every way, and the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    for way in ways:
        found = trained(rank, way, options)
        if rank == 0:
            torch.save(found, f"{folder}/{way}.pt")
    dist.barrier()  # whoever leaves first would end the connections of the other
    dist.destroy_process_group()


def trained(rank: int, way: str, options: Options) -> Found:
    """What one process finds; the losses are the mean of all processes."""
    torch._dynamo.reset()
    counters.clear()
    model = initial()
    compiled = WAYS[way](model, options)
    rows, tokens = BATCH // PROCESSES, LENGTH // PROCESSES
    share: Any = slice(rank * rows, (rank + 1) * rows)
    if way in ("heads", "dtensors"):
        share = slice(None)
    elif way == "sequence":  # and the token after these, which the last of them predicts
        share = slice(None), slice(rank * tokens, (rank + 1) * tokens + 1)
    losses, gradients = train(compiled, list(model.parameters()), share)
    dist.all_reduce(losses)
    return losses / PROCESSES, gradients, counters["fusion"]["fused"]


def run(ways: Sequence[str], options: Options) -> dict[str, Found]:
    """What each way to train finds."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (ways, folder, options), nprocs=PROCESSES)
        return {way: torch.load(Path(folder) / f"{way}.pt") for way in ways}


def main(ways: Sequence[str]) -> int:
    """Run the named ways, all by default; 1 if one came to other losses or gradients than eager or fused nothing."""
    model = initial()
    expected, summed = train(model, list(model.parameters()), slice(None))
    print(f"{'eager':>8} " + " ".join(f"{loss:.5f}" for loss in expected.tolist()))
    wrong = 0
    for way, (losses, gradients, fused) in run(ways or [*WAYS], {"inner": "eager"}).items():
        difference = (losses - expected).abs().max().item()
        deviation = largest_difference(gradients, summed)
        wrong += not (difference <= TOLERANCE and deviation <= TOLERANCE and fused)
        figures = " ".join(f"{loss:.5f}" for loss in losses.tolist())
        print(
            f"{way:>8} {figures}   attentions compiled: {fused}, "
            f"largest difference {difference:.1e} of losses, {deviation:.1e} of gradients"
        )
    return min(wrong, 1)


def largest_difference(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Between gradients of weights, relative to the largest element of each."""
    pairs = zip(gradients, expected, strict=True)
    return max(((g - e).abs().max() / e.abs().max().clamp_min(VANISHING)).item() for g, e in pairs)


if __name__ == "__main__":
    assert fusion  # registers the backend where the package is not installed
    raise SystemExit(main(sys.argv[1:]))
