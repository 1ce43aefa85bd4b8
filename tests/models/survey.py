"""Try many architectures: `python -m tests.models.survey [--packages timm] [--names bert] [--backend fusion]`.

Every architecture of a package (tests/models/candidates.py) is made small, given inputs of the kind that its signature
asks for, and run in eager mode; with `--backend` it is then compiled and compared, and the table shows sites found by
an independent count, sites fused, and why the rest were not. A model that fails is a row, not the end of the run. Rows
go to the file of `--record` as they come; names that are there already are not tried again.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from tests.models.build import Entropy
from tests.models.candidates import PACKAGES, Candidate, candidates
from tests.models.gradients import exact_losses_and_gradients, losses_and_gradients
from tests.models.harness import Outcome, check, check_gradients, table
from tests.numerics import leaves

LARGEST = 100_000_000
"""Parameters of a model that is tried."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Row:
    """What happened to one architecture. error: why it did not run in eager mode, or differs when it is compiled.

    versions: those of the package and of torch.
    total: attention sites, by an independent count where that finds more.
    unfused: (reason, place in the source). unvalidated: the same of fused sites.
    """

    name: str
    package: str = "transformers"
    class_name: str = ""
    versions: str = ""
    kind: str = ""
    entropy: float = float("nan")
    seconds: float = 0.0
    error: str = ""
    where: str = ""
    compiled: bool = False
    total: int = 0
    fused: int = 0
    graphs: int = 0
    share: float = float("nan")
    unfused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unvalidated: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        """What compiling gave."""
        self.total, self.fused, self.graphs, self.share = outcome.total, outcome.fused, outcome.graphs, outcome.share
        self.unfused = [(left.reason, left.location) for left in outcome.unfused]
        self.unvalidated = [(left.reason, left.location) for left in outcome.unvalidated]


class TimedOut(Exception):
    """One architecture took too long."""


@contextlib.contextmanager
def time_limit(seconds: int):
    """Raise TimedOut in the main thread after `seconds` of processor time, which a busy machine does not shorten."""

    def stop(signum, frame):
        raise TimedOut(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def find_inputs(candidate: Candidate, model, batch: int = 2):
    """The first kind of inputs with which `model` runs: (kind, inputs, seconds). Raises the first error otherwise."""
    first: Exception | None = None
    for kind in candidate.kinds(model):
        try:
            inputs = dataclasses.replace(candidate, kind=kind).inputs(model, batch=batch)
            start = time.perf_counter()
            with torch.no_grad():
                model(**inputs)
            return kind, inputs, time.perf_counter() - start
        except TimedOut:
            raise
        except Exception as error:
            first = first or error
    raise first or NotImplementedError("no kind of inputs for this signature")


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if "/models/" in f.filename and "site-packages" in f.filename), frames[-1])
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno} {last.line}"


def try_eager(candidate: Candidate, arguments: argparse.Namespace) -> Row:
    """Build and run one architecture."""
    row = Row(name=candidate.name, package=candidate.package, class_name=candidate.class_name)
    row.versions = f"{importlib.metadata.version(row.package)}, torch {torch.__version__.partition('+')[0]}"
    try:
        with time_limit(arguments.limit):
            model = candidate.build()
            size = sum(p.numel() for p in model.parameters())
            if size > LARGEST:
                raise MemoryError(f"{size / 1e6:.0f} M parameters")
            row.kind, inputs, row.seconds = find_inputs(candidate, model, arguments.batch)
            model = dataclasses.replace(candidate, kind=row.kind).build()
            with Entropy() as entropy, torch.no_grad():
                result = model(**inputs)
            if entropy.shares:
                row.entropy = sum(entropy.shares) / len(entropy.shares)
            _check_that_it_can_be_compared(model, inputs, result)
            candidate.reference(model, inputs)
            if arguments.gradients:
                _check_that_it_has_gradients(model.requires_grad_(True), inputs)
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        if len(str(error).split("\n")) > 1:
            row.error += " | " + " ".join(str(error).split("\n")[1:])[:120]
        row.where = _where(error)
    return row


def _check_that_it_can_be_compared(model, inputs, result) -> None:
    """Raise where a comparison with float64 would say nothing."""
    if not any(tensor.isfinite().any() for _, tensor in leaves(result)):
        raise ArithmeticError("no finite number in the result")
    with torch.no_grad():
        again = dict(leaves(model(**inputs)))
    if not all(torch.equal(tensor.nan_to_num(), again[path].nan_to_num()) for path, tensor in leaves(result)):
        raise ArithmeticError("draws random numbers, or keeps state: two runs in eager mode differ")


def _check_that_it_has_gradients(model, inputs) -> None:
    """Raise where a comparison of gradients with float64 would say nothing."""
    exact_losses_and_gradients(model, [inputs])
    once, again = (losses_and_gradients(model, model, [inputs]) for _ in range(2))
    if not any(gradient.isfinite().any() for name, gradient in once.items() if name != "loss"):
        raise ArithmeticError("no finite number in the gradients")
    if not all(torch.equal(gradient.nan_to_num(), again[name].nan_to_num()) for name, gradient in once.items()):
        raise ArithmeticError("two runs in eager mode have different gradients")


def try_backend(candidate: Candidate, row: Row, arguments: argparse.Namespace) -> Outcome | None:
    """Compile one architecture that ran and compare; `row` has what was found, and what went wrong."""
    entry = dataclasses.replace(candidate, kind=row.kind)
    how = {
        "inner": arguments.inner,
        "emitter": arguments.emitter,
        "dtype": getattr(torch, arguments.dtype),
        "batch": arguments.batch,
    }
    outcome, row.compiled = None, True
    try:
        with time_limit(6 * arguments.limit):
            outcome = (
                check_gradients(entry, **how) if arguments.gradients else check(entry, backend=arguments.backend, **how)
            )
    except Exception as error:
        row.error = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")
        row.where = _where(error)
        outcome = getattr(error, "outcome", None)
        print(f"WRONG {row.name}: {row.error}\n    {row.where}", flush=True)
    if outcome is not None:
        row.take(outcome)
    return outcome


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packages", nargs="*", default=["transformers"], choices=PACKAGES)
    parser.add_argument("--names", nargs="*", help="architectures; all by default")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th name, from the i-th")
    parser.add_argument(
        "--limit", type=int, default=20, help="seconds of processor time per architecture (six times that to compile)"
    )
    parser.add_argument("--errors", action="store_true", help="list what failed, in building or in comparison")
    parser.add_argument("--backend", help="compile with this backend as well, and compare")
    parser.add_argument("--gradients", action="store_true", help="compare gradients of parameters (backend fusion)")
    parser.add_argument("--inner", default="eager", help="option of the fusion backend")
    parser.add_argument("--emitter", default="auto", help="option of the fusion backend")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--record", help="file of JSON lines to which rows are appended")
    arguments = parser.parse_args(argv)
    if arguments.gradients and arguments.backend != "fusion":
        parser.error(f"--gradients compares backend fusion, not {arguments.backend}: add --backend fusion")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the survey and print its table."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)
    every = {name: c for package in arguments.packages for name, c in candidates(package).items()}
    part, parts = map(int, arguments.part.split("/"))
    record = Path(arguments.record or os.devnull)
    done = {(row.package, row.name) for row in recorded(record)}
    names = (arguments.names or sorted(every))[part::parts]
    chosen = [c for c in map(every.__getitem__, names) if (c.package, c.name) not in done]
    rows, outcomes = [], []
    for candidate in chosen:
        row = try_eager(candidate, arguments)
        rows.append(row)
        if arguments.backend and not row.error and (outcome := try_backend(candidate, row, arguments)) is not None:
            outcomes.append(outcome)
        with record.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        gc.collect()
        if sys.stderr.isatty():
            print(f"\r{len(rows)}/{len(chosen)} {candidate.name:40}", end="", file=sys.stderr)
    _print(rows, outcomes, arguments.errors)
    return 1 if any(row.error for row in rows if row.compiled) else 0


def recorded(record: Path) -> list[Row]:
    """The rows of a file that `--record` wrote; none where it is not there."""
    lines = record.read_text().splitlines() if record.is_file() else []
    return [Row(**json.loads(line)) for line in lines]


def _print(rows: list[Row], outcomes: list[Outcome], errors: bool) -> None:
    ran = [r for r in rows if not r.error or r.compiled]
    print(f"{len(ran)} of {len(rows)} architectures run in eager mode;", dict(Counter(r.kind for r in ran)))
    for row in rows:
        if errors and row.error and not row.compiled:
            print(f"{row.name}: {row.error}\n    {row.where}")
    if outcomes:
        print(table(outcomes))
        reasons = Counter(reason for row in rows for reason, _ in row.unfused)
        for reason, count in reasons.most_common():
            print(f"{count:5} {reason}")


if __name__ == "__main__":
    raise SystemExit(main())
