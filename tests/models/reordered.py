"""How far eager mode's own gradients are from its own by the rule, where matrix products sum in another order.

    python -m tests.models.reordered rows.jsonl --record orders.jsonl

Of every architecture that is beyond the rule in rows of the survey with `--gradients`: the error of the compiled model
and of eager mode in some random orders, each as a share of what the rule allows. An order above 1 breaks the rule
without a compiler: the model multiplies roundings, and eager's own order was a lucky one.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.exactness import errors
from tests.models.build import cast
from tests.models.candidates import candidates
from tests.models.compatibility import is_beyond, latest
from tests.models.gradients import DRAWS, exact_losses_and_gradients, losses_and_gradients, with_small_ones_joined
from tests.models.harness import compiled
from tests.models.survey import Row, recorded

ORDERS = 8
aten = torch.ops.aten
FIRST_FACTOR = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Place of the first factor among the arguments of operations that multiply matrices."""


class Reordered(TorchDispatchMode):
    """Matrix products whose sums are in random orders."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if (n := FIRST_FACTOR.get(func)) is not None:
            a, b = args[n : n + 2]
            order = torch.randperm(a.shape[-1], generator=self.generator)
            args = (*args[:n], a.index_select(-1, order), b.index_select(-2, order), *args[n + 2 :])
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(slots=True, kw_only=True)
class Orders:
    """Largest shares of an architecture. orders: eager mode's. tensor: where the compiled model's is."""

    package: str
    name: str
    tensor: str
    compiled: float
    orders: list[float]


def orders_of(row: Row) -> Orders:
    """Measure one architecture, over the inputs of the survey."""
    entry = dataclasses.replace(candidates(row.package)[row.name], kind=row.kind)
    torch._dynamo.reset()
    model = entry.build().requires_grad_(True)
    run, _ = compiled(model, options={"inner": "eager"})
    draws = [cast(entry.inputs(model, batch=2, seed=seed), torch.float32) for seed in range(4 * DRAWS)]
    exact = exact_losses_and_gradients(model, draws)
    reference = with_small_ones_joined(exact, exact)
    eager = with_small_ones_joined(losses_and_gradients(model, model, draws), exact)

    def largest(gradients: dict[str, torch.Tensor]) -> tuple[float, str]:
        joined = with_small_ones_joined(gradients, exact)
        return max((errors(x, eager[name], reference[name], torch.float32).share, name) for name, x in joined.items())

    share, tensor = largest(losses_and_gradients(model, run, draws))
    orders = []
    for seed in range(ORDERS):
        with Reordered(seed):
            orders.append(round(largest(losses_and_gradients(model, model, draws))[0], 3))
    return Orders(package=row.package, name=row.name, tensor=tensor, compiled=round(share, 3), orders=orders)


def main(argv: list[str] | None = None) -> int:
    """Measure those that the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="+", type=Path, help="files of the survey's --record")
    parser.add_argument("--record", type=Path, required=True, help="file of JSON lines to which results are appended")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = {(each.package, each.name) for each in read(arguments.record)}
    for row in filter(is_beyond, latest(row for record in arguments.rows for row in recorded(record))):
        if (row.package, row.name) not in known:
            line = json.dumps(dataclasses.asdict(orders_of(row)))
            print(line, flush=True)
            with arguments.record.open("a") as file:
                file.write(line + "\n")
    return 0


def read(record: Path) -> list[Orders]:
    """Results of a file that `--record` wrote; none where it is not there."""
    return [Orders(**json.loads(line)) for line in record.read_text().splitlines()] if record.is_file() else []


if __name__ == "__main__":
    raise SystemExit(main())
