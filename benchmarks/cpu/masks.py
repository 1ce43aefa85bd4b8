"""What understanding a mask is worth: attention under masks of many kinds on a CPU, against peers in one process.

    python -m benchmarks.cpu.masks                                          all cases at N = 4096, 4 heads of 64, fp32
    python -m benchmarks.cpu.masks --cases window packed --N 2048 --seconds 4
    python -m benchmarks.cpu.masks --cases packed padded --N 2048 --training    forward and gradients of q, k, v

Every result is compared with float64 first. Times are medians over turns in which every competitor of a case runs once.
Peers get what they want: FlexAttention its block mask, SDPA its flags or masks, made outside the time measured; fusion
gets eager code and what a model passes. Writes benchmarks/results/<date>-masks.md.
"""

import argparse
import datetime
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common import results
from benchmarks.common.measuring import Entry, allowed_error, largest_error, prepare
from benchmarks.common.rows import ROWS, Problem, flex_call

Make = Callable[[], Callable[[], Tensor]]


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~keep, -torch.inf), -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 + bias, -1) @ v


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return masked(q, k, v, documents[:, None, :, None] == documents[:, None, None, :])


def kept(q: Tensor, k: Tensor, tokens: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    return (j <= i) & (tokens[:, None, None, :] != 0)


def padded(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~kept(q, k, tokens), torch.finfo(q.dtype).min), -1) @ v


def padded_call(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, kept(q, k, tokens))


def documents(n: int) -> Tensor:
    """Four documents of equal length."""
    return (torch.arange(n) // -(-n // 4))[None]


def document_blocks(n: int):
    from torch.nn.attention.flex_attention import create_block_mask

    numbers = documents(n)[0]
    return create_block_mask(lambda b, h, i, j: numbers[i] == numbers[j], None, None, n, n, device="cpu")


def flex(q: Tensor, k: Tensor, v: Tensor, blocks) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return functools.partial(torch.compile(flex_attention, dynamic=False, fullgraph=True), q, k, v, block_mask=blocks)


def ours(function: Callable[..., Tensor], *operands: Tensor, **options) -> Callable[[], Tensor]:
    compiled = torch.compile(function, backend="fusion", dynamic=False, options={"strict": True, **options})
    return functools.partial(compiled, *operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """plain: the function as a model writes it, with what it takes besides q, k, v; peers: by name."""

    title: str
    plain: Callable[..., Tensor]
    extras: tuple[Tensor, ...]
    peers: dict[str, Make]


def cases(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Case]]:
    """Every case, made when it is asked for."""
    n, heads = q.shape[-2], q.shape[1]

    def row(name: str, **peers: Make) -> Case:
        problem = Problem(B=q.shape[0], H=heads, N=n, d=q.shape[-1], dtype=q.dtype)
        extras = tuple(ROWS[name].extras(problem, torch.Generator().manual_seed(0)))
        return Case(title=ROWS[name].title, plain=ROWS[name].plain, extras=extras, peers=peers)

    def from_flex(name: str) -> Make:
        extras = row(name).extras
        return lambda: flex_call(ROWS[name], (q, k, v, *extras))

    def inductor(name: str) -> Make:
        extras = row(name).extras
        return lambda: functools.partial(torch.compile(ROWS[name].plain, dynamic=False), q, k, v, *extras)

    def data(title: str, plain: Callable[..., Tensor], extra: Tensor, **peers: Make) -> Case:
        blind = {"without map": lambda: ours(plain, q, k, v, extra, tile_maps="never")}
        return Case(title=title, plain=plain, extras=(extra,), peers=blind | peers)

    def sdpa(**given) -> Make:
        return lambda: functools.partial(F.scaled_dot_product_attention, q, k, v, **given)

    numbers = documents(n)
    whole = numbers[0][:, None] == numbers[0][None, :]
    random = torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(1)) > 0.5
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    tokens = (torch.arange(n) >= n // 3).long()[None]
    lowest = torch.finfo(q.dtype).min
    additive = torch.zeros(1, 1, n, n, dtype=q.dtype).masked_fill(~causal, lowest)
    full = {"full attention": lambda: ours(ROWS["full"].plain, q, k, v)}
    return {
        "causal": lambda: row("causal", SDPA=sdpa(is_causal=True), FlexAttention=from_flex("causal")),
        "alibi": lambda: row("alibi", FlexAttention=from_flex("alibi")),
        "window": lambda: row("window", FlexAttention=from_flex("window"), Inductor=inductor("window")),
        "packed": lambda: data(
            "4 packed documents, numbers", packed, numbers, **full,
            FlexAttention=lambda: flex(q, k, v, document_blocks(n)),
        ),
        "packed mask": lambda: data("4 packed documents, bool mask", masked, whole[None, None], **full),
        "causal mask": lambda: data(
            "causal, additive float mask", biased, additive, SDPA=sdpa(attn_mask=additive)
        ),
        "random": lambda: data("random bool mask", masked, random, SDPA=sdpa(attn_mask=random)),
        "padded": lambda: data("causal, a third of padding on the left", padded, tokens),
        "padded call": lambda: data("the same, as a call of SDPA", padded_call, tokens),
    }  # fmt: skip


@dataclass(slots=True)
class Step:
    """A call and the gradients of its inputs; it returns the output, and keeps the gradients."""

    call: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    upstream: Tensor
    found: tuple[Tensor, ...] = ()

    def __call__(self) -> Tensor:
        with torch.enable_grad():
            out = self.call()
        self.found = torch.autograd.grad(out, self.inputs, self.upstream)
        return out.detach()


def measure_training(case: Case, q: Tensor, k: Tensor, v: Tensor, seconds: float) -> list[Entry]:
    """As `measure`, with the backward. Peers are those that compute the same and have one on CPUs."""
    torch._dynamo.reset()
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    extras = [x.double() if x.is_floating_point() else x for x in case.extras]
    eager = Step(lambda: case.plain(*inputs, *case.extras), inputs, upstream)
    exact = Step(lambda: case.plain(*wide, *extras), wide, upstream.double())
    outputs = eager(), exact()
    makes: dict[str, Make] = {"fusion": lambda: ours(case.plain, *inputs, *case.extras)}
    makes |= {name: make for name, make in case.peers.items() if name in ("without map", "SDPA")}
    entries = []
    for name, make in makes.items():
        entries.append(entry := Entry(name=name))
        prepare(entry, lambda make=make: Step(make(), inputs, upstream), outputs[1], allowed_error(*outputs))
        for got, theirs, true in zip(getattr(entry.call, "found", ()), eager.found, exact.found, strict=False):
            error, allowed = largest_error(got, true), allowed_error(theirs, true)
            if not error <= allowed:
                entry.error, entry.allowed = error, allowed
                entry.note = f"wrong gradient: error {error:.1e}, allowed {allowed:.1e}"
    take_turns([entry for entry in entries if entry.call is not None], seconds)
    return entries


def measure(case: Case, q: Tensor, k: Tensor, v: Tensor, seconds: float) -> list[Entry]:
    """The entries of one case, fusion first."""
    torch._dynamo.reset()
    eager = case.plain(q, k, v, *case.extras)
    wide = (x.double() if x.is_floating_point() else x for x in (q, k, v, *case.extras))
    exact = case.plain(*wide)
    allowed = allowed_error(eager, exact)
    mine = Entry(name="fusion")
    prepare(mine, lambda: ours(case.plain, q, k, v, *case.extras), exact, allowed)
    entries = [mine]
    for name, make in case.peers.items():
        entries.append(Entry(name=name))
        target = exact if name != "full attention" else ROWS["full"].plain(q.double(), k.double(), v.double())
        prepare(entries[-1], make, target, allowed)
    del eager, exact
    take_turns([entry for entry in entries if entry.call is not None], seconds)
    return entries


def take_turns(entries: list[Entry], seconds: float) -> None:
    """Time all entries in turns. Each runs once untimed before it is timed: threads of another OpenMP pool (Inductor's
    code has its own) spin for some milliseconds after their work, on the cores of whoever comes next."""
    stop, turn = time.perf_counter() + seconds, 0
    while turn < 6 or time.perf_counter() < stop:
        for entry in entries[turn % len(entries) :] + entries[: turn % len(entries)]:
            call = entry.call
            assert call is not None
            call()
            start = time.perf_counter()
            call()
            entry.times.append(time.perf_counter() - start)
        turn += 1


def line(title: str, entries: list[Entry]) -> list[str]:
    """One line of the table: ours in ms, then every peer's time over ours."""
    own = entries[0].median
    shown = []
    for entry in entries[1:]:
        ratio = f"{entry.median / own:.2f}x" if entry.median and own else "–"
        shown.append(f"{entry.name} {ratio}{' (' + entry.note + ')' if entry.note else ''}")
    return [title, f"{own * 1e3:.1f}" if own else entries[0].note, "; ".join(shown)]


def save(lines: list[list[str]], arguments: argparse.Namespace, header: list[str]) -> Path:
    """Write the table with machine, versions and commit, or add its lines to an earlier one of the same commit."""
    if arguments.append is not None:
        rows = results.table(header, lines).splitlines()[2:]
        arguments.append.write_text(arguments.append.read_text() + "\n".join(rows) + "\n")
        return arguments.append
    where = results.environment({})
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
    path = results.FOLDER / f"{stamp}-masks{'-training' if arguments.training else ''}.md"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    machine = f"{where['cpu']}, {where['threads']} threads on {where['cores']} cores"
    sizes = f"N = {arguments.N}, {arguments.heads} heads of {arguments.d}, {arguments.dtype}"
    sizes += ", forward and gradients of q, k and v" if arguments.training else ""
    text = (
        f"# Masks, {where['date']}\n\n{machine}; {versions}; commit {where['commit'] or 'unknown'}.\n\n{sizes}. "
        "Peers: their median time over fusion's, from turns in one process.\n\n"
    )
    path.write_text(text + results.table(header, lines) + "\n")
    return path


@torch.no_grad()
def main() -> int:
    """Run what the command line asks for; 1 if fusion returned a wrong result anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help="which ones (default: all)")
    parser.add_argument("--N", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=4.0, help="timing per case, all competitors together")
    parser.add_argument("--training", action="store_true", help="time the gradients of q, k and v too")
    parser.add_argument("--append", type=Path, help="add the lines to this result file")
    parser.add_argument("--no-save", action="store_true", help="print only")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (1, arguments.heads, arguments.N, arguments.d)
    q, k, v = (torch.randn(shape, generator=generator).to(getattr(torch, arguments.dtype)) for _ in range(3))
    header, lines, wrong = ["mask", "fusion ms", "peers, time over fusion's"], [], False
    known = cases(q, k, v)
    for name in arguments.cases or known:
        case = known[name]()
        entries = (measure_training if arguments.training else measure)(case, q, k, v, arguments.seconds)
        lines.append(line(case.title, entries))
        wrong |= entries[0].wrong or entries[0].median is None
        print(" | ".join(lines[-1]), flush=True)
    results.show(Console(width=160), "masks", header, lines)
    if not arguments.no_save:
        print(f"written: {save(lines, arguments, header)}")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
