"""Arguments for a class whose configuration is the signature of its `__init__`: `arguments(cls, rules)`."""

import inspect
import re
from typing import Any

from tests.models.shrink import fit


def arguments(model_class: type, rules: list[tuple[str, Any]], **special: Any) -> dict[str, Any]:
    """Keyword arguments for `model_class`: by the first of `rules`, (pattern of the whole name, value), that fits.

    A value is fitted to the default (a list keeps its length), as for configurations; a function makes the value from
    the default. Where the default tells nothing, None among them, it stays. `special` wins.
    """
    made: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(model_class.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in special:
            continue
        value = next((value for pattern, value in rules if re.fullmatch(pattern, name)), None)
        default = parameter.default
        if value is None or default is None or isinstance(default, (bool, str)):
            continue
        fitted = value(default) if callable(value) else value if default is parameter.empty else fit(default, value)
        if fitted is not None:
            made[name] = fitted
    return made | special
