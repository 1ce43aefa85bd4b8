"""accelerate, and with it the Trainer of transformers: "fusion" as the name of a backend."""

from __future__ import annotations

from typing import Any

from fusion.errors import MissingPackageError

NAME = "FUSION"


def register() -> None:
    """Let accelerate take "fusion" for a backend: `TrainingArguments(torch_compile_backend="fusion")`,
    `Accelerator(dynamo_backend="fusion")`, `TorchDynamoPlugin(backend="fusion")`.

    Its list of backends is a closed enum; the name is added through Python's hook for missing values, for as long as
    the process runs or until `unregister`. Does nothing where accelerate knows the name by itself. Raises
    MissingPackageError without accelerate.
    """
    backends = _backends()
    if NAME in backends:
        return
    member: Any = str.__new__(backends, NAME)
    member._name_ = member._value_ = NAME
    backends._missing_ = classmethod(lambda _, value: member if value == NAME else None)
    backends.__reduce_ex__ = lambda self, _: (type(self), (self._value_,))  # copies: by name before Python 3.11.4


def unregister() -> None:
    """Undo `register`. Plugins that were created in between keep their backend."""
    backends = _backends()
    if "_missing_" in vars(backends):
        del backends._missing_, backends.__reduce_ex__


def _backends() -> Any:
    try:
        from accelerate.utils import DynamoBackend
    except ImportError as problem:
        raise MissingPackageError(
            f"fusion.integrations.accelerate needs accelerate, which cannot be imported ({problem}); install it"
        ) from problem
    return DynamoBackend
