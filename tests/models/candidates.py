"""Architectures to try, by package: `candidates("timm")` maps their names to what builds and feeds them.

A package is a module of tests/models/packages with a function `candidates()`. It says by rules how its models are made
small and what inputs they take; a model that no rule fits is tried all the same, and its error is the result.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models.build import random_model, reference, settle
from tests.models.inputs import Inputs

PACKAGES = ("transformers", "timm", "diffusers", "x-transformers", "vit-pytorch")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One architecture. make: the model as its package builds it. kinds: of inputs to try, the likeliest first.

    feed: keyword arguments of a kind for a model and a batch. kind: the one that `inputs` makes. prepare: whether
    weights are to be made random here and the model set to eval mode, where `make` does not do that itself.
    """

    name: str
    package: str
    class_name: str
    make: Callable[[], nn.Module]
    kinds: Callable[[nn.Module], list[str]]
    feed: Callable[[str, nn.Module, int], Inputs]
    kind: str = ""
    prepare: bool = True

    @property
    def family(self) -> str:
        """What the table of a run groups by."""
        return self.package

    def build(self) -> nn.Module:
        """The model: random from a fixed seed, float32, eval mode; where the kind is known, settled to its inputs."""
        if not self.prepare:
            return self.make()
        model = random_model(self.make)
        if self.kind:
            settle(model, self.inputs(model))
        return model

    def inputs(self, model: nn.Module, *, batch: int = 2, seed: int = 0) -> Inputs:
        """Keyword arguments for `model` of this candidate's kind."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.feed(self.kind, model, batch)

    def reference(self, model: nn.Module, inputs: Inputs) -> Any:
        """What `model` computes in float64."""
        return reference(model, inputs)


def candidates(package: str) -> dict[str, Candidate]:
    """Name -> candidate, for one of `PACKAGES`."""
    return importlib.import_module(f"tests.models.packages.of_{package.replace('-', '_')}").candidates()
