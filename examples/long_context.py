"""Train on a text that does not fit the memory of one process: two and four processes with a part of its tokens each.

    python examples/long_context.py [length]

A process may allocate `LIMIT` MiB beyond what it has when training starts (RLIMIT_AS of Linux). With all tokens of the
text it runs out of memory; with a half or a quarter it does not, and comes to the losses that one process without a
limit has. Attention, causal with ALiBi, is over all tokens: `fusion.sequence_parallel` computes it.
"""

import datetime
import os
import re
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusion

LENGTH, LIMIT, STEPS = 8192, 80, 2
LAYERS, HEADS, HEAD_WIDTH, TOKENS = 2, 4, 16, 64
WIDTH = HEADS * HEAD_WIDTH
TOLERANCE = 1e-4
"""Between losses of about 4: sums over processes round in another order."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with ALiBi over whole texts `[1, HEADS, N, HEAD_WIDTH]`, as for one process."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    slopes = torch.exp2(-2.0 * torch.arange(1, HEADS + 1))[:, None, None]
    scores = q @ k.transpose(-1, -2) / HEAD_WIDTH**0.5 - slopes * (i - j)
    return scores.masked_fill(j > i, float("-inf")).softmax(-1) @ v


class Block(nn.Module):
    """Attention over the text, then an MLP."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.attend = mesh, fusion.sequence_parallel(attention, options={"sequences": "zigzag"})
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` has this process's tokens, `[1, N / processes, WIDTH]`."""
        local = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        q, k, v = (DTensor.from_local(part, self.mesh, [Shard(2)]) for part in local.contiguous())
        x = x + self.out(self.attend(q, k, v).to_local().transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


@dataclass(frozen=True)
class Run:
    """Result of one process: losses of the whole text, or the error; and the most memory that training added, in
    MiB."""

    losses: list[float]
    error: str
    added: float


def memory(field: str) -> int:
    """VmSize, VmRSS or VmHWM (the largest VmRSS) of this process, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def train(model: nn.Module, length: int) -> list[float]:
    """Losses of some steps on one text, of which each process has its part."""
    processes, rank = dist.get_world_size(), dist.get_rank()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    text = torch.randint(0, TOKENS, (1, length + 1), generator=torch.Generator().manual_seed(1))
    own = length // processes
    part = text[:, rank * own : (rank + 1) * own + 1]
    for _ in range(STEPS):
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / processes
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            assert tensor is not None
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(total.item())
    return losses


def work(rank: int, processes: int, length: int, limit: int, folder: str) -> None:
    """One process: writes its `Run`. limit: MiB, 0 for none."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=120)  # for a process that ran out of memory
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=processes, timeout=wait)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (processes,))
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Block(mesh) for _ in range(LAYERS)), nn.Linear(WIDTH, TOKENS))
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, length)  # compiles kernels, before memory counts
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial, strict=True):
            parameter.copy_(value)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
    before = memory("VmRSS")
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + (limit << 20), resource.RLIM_INFINITY))
    losses, error = [], ""
    try:
        losses = train(model, length)
    except (MemoryError, RuntimeError) as problem:
        error = str(problem)
    torch.save(Run(losses, error, (memory("VmHWM") - before) / 2**20), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run(processes: int, length: int, limit: int) -> list[Run]:
    """Training on so many processes."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # tensors that are freed are no memory of the process any more
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (processes, length, limit, folder), nprocs=processes)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(processes)]


def main(length: int = LENGTH, limit: int = LIMIT) -> int:
    """Train on one, two and four processes; 1 if the text fits one of them, or if losses differ."""
    expected = run(1, length, 0)[0]
    print(f"{length} tokens, at most {limit} MiB added to each process")
    print(f"1 process, no limit   losses {expected.losses}, {expected.added:.0f} MiB added")
    alone = run(1, length, limit)[0]
    print(f"1 process             {alone.error.splitlines()[0] if alone.error else 'fits'}")
    wrong = int(not alone.error)
    for processes in (2, 4):
        found = run(processes, length, limit)
        differences = [abs(a - b) for one in found for a, b in zip(one.losses, expected.losses, strict=False)]
        complete = all(len(one.losses) == STEPS for one in found)
        wrong += not (complete and max(differences) <= TOLERANCE)
        results = f"losses {found[0].losses}" if complete else next(one.error for one in found if one.error)
        print(f"{processes} processes           {results}, {max(one.added for one in found):.0f} MiB added")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
