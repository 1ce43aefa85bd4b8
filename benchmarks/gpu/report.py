"""The report of benchmarks/gpu in Markdown: the targets and whether they were met, then every table behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.common.results import table
from benchmarks.gpu.cells import COMPETITORS, SDPA, Cell
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import CONTESTANTS, MEMORY_GROWTH
from fusion.machine import Machine

PROGRAMS = ("alibi", "softcap", "window", "bias", "table", "packed")
FILLING = 256 << 20  # bytes; decoding less than this does not fill a device's memory bus
MOST_KERNELS = 6  # that are listed of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is wanted. values: measured, by where; needed: the least of them (`at_most`: the greatest) that will do."""

    title: str
    needed: float
    values: dict[str, float]
    at_most: bool = False

    @property
    def worst(self) -> tuple[str, float] | None:
        choose: Callable = max if self.at_most else min
        return choose(self.values.items(), key=lambda pair: pair[1]) if self.values else None

    @property
    def met(self) -> bool | None:
        """Whether the worst will do; None where nothing was measured."""
        if self.worst is None:
            return None
        return self.worst[1] <= self.needed if self.at_most else self.worst[1] >= self.needed

    def line(self) -> list[str]:
        wanted = f"{'<=' if self.at_most else '>='} {self.needed:g}"
        if self.worst is None:
            return [self.title, wanted, "-", "", "not measured"]
        values = sorted(self.values.values())
        span = f"{values[0]:.2f}" if len(values) == 1 else f"{values[0]:.2f} to {values[-1]:.2f} ({len(values)})"
        return [self.title, wanted, span, self.worst[0], "met" if self.met else "NOT MET"]


def ratios(cells: Iterable[Cell], *peers: str) -> dict[str, float]:
    return {str(cell.place): ratio for cell in cells if (ratio := cell.ratio(*peers)) is not None}


def bandwidth_share(cell: Cell, machine: Machine | None) -> float | None:
    """Of the device's memory bandwidth that fusion reaches, counting every operand and the output once."""
    if machine is None or "fusion" not in cell.seconds:
        return None
    return cell.bytes / cell.seconds["fusion"] / machine.main.bandwidth


def targets(found: Findings, machine: Machine | None) -> list[Target]:
    """The project's first targets on a GPU, bfloat16."""
    forward = [c for c in found.cells if c.place.direction == "forward" and not c.place.decoding]
    common = [c for c in forward if c.place.d == 128]
    backward = [c for c in found.cells if c.place.direction == "backward" and c.place.d == 128]
    decoding = [c for c in found.cells if c.place.row == "decode" and (c.bytes >= FILLING or found.rehearsal)]
    shares = {str(c.place): share for c in decoding if (share := bandwidth_share(c, machine)) is not None}
    faults = sum(map(bool, found.checks.values()))
    off = {each.model: each.farthest("fusion", "eager") / (each.noise or 1e-30) for each in found.losses}
    growth = {each.model: value for each in found.memory if (value := each.growth("fusion")) is not None}
    return [
        Target(title="checks with a fault", needed=0, at_most=True, values={"": faults} if found.checks else {}),
        Target(title="full forward, d = 128, speed over FlexAttention's", needed=1.15,
               values=ratios((c for c in common if c.place.row == "full"), "flex")),
        Target(title="score programs forward, d = 128, over FlexAttention's", needed=1.1,
               values=ratios((c for c in common if c.place.row in PROGRAMS), "flex")),
        Target(title="causal forward, d = 128, over cuDNN's", needed=0.85,
               values=ratios((c for c in common if c.place.row == "causal"), "sdpa cudnn")),
        Target(title="backward, d = 128, over FlexAttention's", needed=1, values=ratios(backward, "flex")),
        Target(title="decoding, share of the memory bandwidth", needed=0.8, values=shares),
        Target(title="d = 512 forward, over the best SDPA's", needed=2,
               values=ratios((c for c in forward if c.place.d == 512), *(f"sdpa {k}" for k in (*SDPA, "math")))),
        Target(title="losses: distance from eager's, in rounding's noise", needed=1, at_most=True, values=off),
        Target(title="peak memory of training: exponent of N", needed=MEMORY_GROWTH, at_most=True, values=growth),
    ]  # fmt: skip


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cell_lines(cells: list[Cell], machine: Machine | None) -> tuple[list[str], list[list[str]]]:
    """TFLOP/s by competitor, GB/s where the queries are few."""
    head = ["variant", "pass", "B x H", "N", "d", *COMPETITORS]
    head += ["of peak", "over flex", "over best", "predicted / measured", "host us"]
    lines = []
    for cell in cells:
        place, ours = cell.place, cell.seconds.get("fusion")
        work, unit = (cell.bytes / 1e9, " GB/s") if place.decoding else (cell.flop / 1e12, "")
        speeds = [f"{_figure(work / cell.seconds[n])}{unit}" if n in cell.seconds else "-" for n in COMPETITORS]
        share = bandwidth_share(cell, machine) if place.decoding else None
        if not place.decoding and machine is not None and ours:
            share = cell.flop / ours / machine.flops(place.dtype)
        ratio, peers = cell.ratio("flex"), cell.best_peer
        lines.append([
            place.row, place.direction, f"{place.B} x {place.H}", str(place.N), str(place.d), *speeds,
            "-" if share is None else f"{share:.0%}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{peers / ours:.2f}" if ours and peers else "-",
            f"{cell.predicted / ours:.2f}" if ours and cell.predicted else "-",
            f"{cell.host['fusion'] * 1e6:.0f}" if "fusion" in cell.host else "-",
        ])  # fmt: skip
    return head, lines


def model_lines(found: Findings) -> tuple[list[str], list[list[str]]]:
    head = ["model", "B x N", *(f"{who} ms" for who in CONTESTANTS), "over the best other"]
    lines = []
    for cell in found.models:
        times = [f"{cell.seconds[who] * 1e3:.2f}" if who in cell.seconds else "-" for who in CONTESTANTS]
        others = [value for who, value in cell.seconds.items() if who != "fusion"]
        ours = cell.seconds.get("fusion")
        best = f"{min(others) / ours:.2f}" if ours and others else "-"
        lines.append([cell.title, f"{cell.B} x {cell.N}", *times, best])
    return head, lines


def training_text(found: Findings) -> list[str]:
    """Losses and peak memory in sentences."""
    said = []
    for each in found.losses:
        first, last = (each.losses["eager"][at] for at in (0, -1))
        said.append(
            f"- {each.model}: {each.steps} steps, eager's loss {first:.4f} to {last:.4f}; fusion at most "
            f"{each.farthest('fusion', 'eager'):.2e} from it, two seeds of rounding at most {each.noise:.2e} from each "
            f"other: {'within' if each.agree else 'NOT within'} the noise. "
            f"A step: fusion {each.seconds['fusion'] * 1e3:.1f} ms, eager {each.seconds['eager'] * 1e3:.1f} ms."
        )
    for each in found.memory:
        for backend, sizes in each.bytes.items():
            growth = each.growth(backend)
            held = ", ".join(f"N={n} {size / 2**20:.0f} MiB" for n, size in sizes.items())
            rate = "" if growth is None else f" ~ N^{growth:.2f}"
            said.append(f"- {each.model}, peak of a training step, {backend}: {held}{rate}")
    return said


def kernel_text(found: Findings) -> list[str]:
    """What calls launch."""
    said = []
    for place, by in found.kernels.items():
        for who, launched in by.items():
            listed = "; ".join(f"`{name[:60]}` {1e6 * seconds:.0f} us" for name, seconds in launched[:MOST_KERNELS])
            more = f"; {len(launched) - MOST_KERNELS} more" if len(launched) > MOST_KERNELS else ""
            said.append(f"- {place}, {who}: {listed or 'nothing'}{more}")
    return said


def tuned_lines(found: Findings) -> tuple[list[str], list[list[str]]]:
    """Every tile that was measured, the fastest first."""
    lines = []
    for each in found.tuned:
        for tile in sorted(each.seconds, key=each.seconds.__getitem__):
            mark = "the table's" if tile == each.table else ""
            lines.append([each.title, each.kernel, tile, _figure(each.flop / each.seconds[tile] / 1e12), mark])
        lines += [[each.title, each.kernel, tile, "-", why] for tile, why in each.failed.items()]
    return ["variant", "kernel", "tile", "TFLOP/s", ""], lines


def check_text(found: Findings) -> str:
    wrong = [f"- {name}: {fault}" for name, faults in found.checks.items() for fault in faults]
    right = sum(not faults for faults in found.checks.values())
    return "\n".join([f"{right} of {len(found.checks)} checks passed.", "", *wrong]).strip()


def report(found: Findings, machine: Machine | None) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in found.environment["versions"].items() if version)
    notes = [f"- {c.place}, {who}: {why}" for c in found.cells for who, why in c.notes.items()]
    notes += [f"- {m.name}, {who}: {why}" for m in found.models for who, why in m.notes.items()]
    notes += [f"- {title}: {why}" for title, why in found.failed.items()]
    parts = [f"# GPU benchmark, {found.environment['date']}"]
    if found.rehearsal:
        parts.append("**A rehearsal without a GPU, in Triton's interpreter: no figure on this page means anything.**")
    parts += [
        f"{found.device}; {versions}; commit {found.environment['commit'] or 'unknown'}.",
        "## Targets",
        table(["target", "wanted", "measured", "worst at", ""], [each.line() for each in targets(found, machine)]),
        "## Correctness",
        check_text(found),
        "## Attention, TFLOP/s of both products over live pairs",
        "Backward counts 2.5 times the forward's products; `over`: the peer's time over fusion's. Peers' masks, biases "
        "and block masks are made outside the time. `host us`: until the call is queued.",
        table(*cell_lines(found.cells, machine)),
        "## Whole models, inference",
        table(*model_lines(found)),
        "## Training",
        "\n".join(training_text(found)),
        "## Tiles and schedules",
        table(*tuned_lines(found)),
        "## What calls launch",
        "\n".join(kernel_text(found)),
        "## Notes",
        "\n".join(notes),
        f"No time for: {', '.join(found.left) or 'nothing'}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
