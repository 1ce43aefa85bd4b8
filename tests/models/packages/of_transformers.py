"""Every class behind `transformers.AutoModel`, its configuration shrunk by the rules of tests/models/shrink.py."""

import functools

import torch
import transformers

from tests.models.build import build
from tests.models.candidates import Candidate
from tests.models.inputs import kinds_for, make
from tests.models.zoo import architectures


def candidates() -> dict[str, Candidate]:
    """model_type -> candidate."""
    return {
        name: Candidate(
            name=name,
            package="transformers",
            class_name=class_name,
            make=functools.partial(_build, class_name),
            kinds=kinds_for,
            # By the seed that `Candidate.inputs` has set.
            feed=lambda kind, model, batch: make(kind, model, batch=batch, seed=torch.initial_seed()),
            prepare=False,
        )
        for name, class_name in architectures().items()
    }


def _build(class_name: str):
    return build(getattr(transformers, class_name))
