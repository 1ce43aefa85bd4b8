"""Losses of real architectures, and the gradients of all of their parameters, compared by the numerics rule."""

from collections.abc import Sequence
from typing import Any

import torch

from fusion.ir.results import size_of
from tests.models.build import cast, float64_everywhere, in_float64
from tests.numerics import Errors, assert_as_exact_as_eager, leaves

DRAWS = 3
"""Inputs per model: of a single one, eager's largest error is a draw that may be small by luck."""

ZERO = 2.0**-40
FEW = 16
"""Elements of a tensor up to which eager's error is a matter of luck (and often 0)."""


def losses_and_gradients(model: torch.nn.Module, run: Any, draws: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The loss and the gradients of every draw of inputs, stacked. A loss is the distance of all outputs from random
    ones, so that every part of the model is in it."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for inputs in draws:
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for _, value in leaves(run(**inputs)):
            if value.is_floating_point() and value.requires_grad:
                target = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                total = total + (value.double() - target).square().mean()
        total.backward()
        assert any(p.grad is not None for p in model.parameters())
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found.append({"loss": total.detach().float()} | own)
    return {name: torch.stack([draw[name] for draw in found]) for name in found[0]}


def exact_losses_and_gradients(model: torch.nn.Module, draws: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same in float64, of a copy of the model."""
    exact = in_float64(model)
    with float64_everywhere():
        return losses_and_gradients(exact, exact, [cast(inputs, torch.float64) for inputs in draws])


def assert_gradients_as_exact(
    model: torch.nn.Module, run: Any, draws: Sequence[dict[str, Any]], name: str
) -> list[Errors]:
    """Assert the rule for the loss and the gradients of all parameters. run: the compiled model."""
    reference = exact_losses_and_gradients(model, draws)
    eager = losses_and_gradients(model, model, draws)
    actual = losses_and_gradients(model, run, draws)
    found = (with_small_ones_joined(given, reference) for given in (actual, eager, reference))
    return assert_as_exact_as_eager(*found, next(model.parameters()).dtype, name=name)


def with_small_ones_joined(found: dict, reference: dict) -> dict:
    """Tensors with few elements, the loss among them, side by side in one, each relative to its largest element.

    A bias of the keys shifts all scores of a row alike: its gradient is zero, and what is computed is rounding alone,
    which has no scale of its own to be measured by. It is there too, relative to the largest gradient of all.
    """
    sizes = {key: size_of(value) for key, value in reference.items()}
    joined = {key for key, value in reference.items() if value.numel() < FEW or sizes[key] <= ZERO}
    scales = {key: sizes[key] if sizes[key] > ZERO else max(sizes.values()) for key in joined}
    small = torch.cat([(found[key].double() / scales[key]).flatten() for key in sorted(joined)])
    return {key: value for key, value in found.items() if key not in joined} | {"small ones": small}
