"""`fusion.install`: the rewrite as a pass of Inductor's, for `torch.compile(model)` without our backend."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fusion import inductor_passes
from fusion.backend import fuse
from fusion.errors import OptionError
from fusion.options import Options
from fusion.report.report import publish
from fusion.runtime.specialized import register_inductor_codegen
from fusion.torch_private.inductor import config


def install(options: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[Any]:
    """From now on `torch.compile(model)` fuses attentions: the rewrite becomes a pass of Inductor's, after those that
    others have put there.

    options: of our backend; they take the place of those of an earlier `install`. It holds for this thread, as all
    settings of Inductor's do, and for what is compiled later: a function that is compiled already stays as it is until
    `torch.compiler.reset()`. Models compiled with `backend="fusion"` go their own way.

    Returns a context manager, which brings back what was installed before; `uninstall` takes the pass out, too. Raises
    OptionError for options that do not exist, or that need the backend: `inner`, `verify="run"`, `approximate`.
    """
    chosen, previous = _parsed(options), inductor_passes.installed()
    uninstall()
    _put(_settings(chosen))
    installed = contextlib.ExitStack()
    if previous is not None:
        installed.callback(lambda: _put(_settings(previous)))
    installed.callback(uninstall)
    return installed


def uninstall() -> None:
    """Take out what `install` put in. What others put there stays, and so does what is compiled."""
    _put(inductor_passes.without_ours())


def inductor_options(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of Inductor that `install` makes, for one model: `torch.compile(model, options=...)`.

    options: of our backend. Passes that stand in `torch._inductor.config` at this moment are part of the settings, and
    run before ours. Raises OptionError as `install` does.
    """
    return _settings(_parsed(options))


def _parsed(options: Mapping[str, Any] | None) -> Options:
    chosen = Options.parse(options)
    if chosen.inner == "inductor" and chosen.verify != "run" and chosen.approximate is None:
        return chosen
    raise OptionError(
        "a pass of Inductor's was asked for with inner, verify='run' or approximate, which act around a compiled "
        f"graph; use torch.compile(model, backend='fusion', options={dict(options or {})!r})."
    )


def _settings(options: Options) -> dict[str, Any]:
    register_inductor_codegen()
    return inductor_passes.with_rewrite(options, _rewritten)


def _rewritten(graph: GraphModule, inputs: Sequence[Any], options: Options) -> GraphModule | None:
    """The graph with its attentions fused, None where there are none; its report goes to those who collect them."""
    fused, report = fuse(graph, inputs, options)
    publish(report)
    return fused if report.fused else None


def _put(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)
