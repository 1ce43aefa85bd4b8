"""fusion: an attention compiler for unmodified PyTorch models.

    model = torch.compile(model, backend="fusion")
    print(fusion.explain(model, *inputs))

Importing loads torch and little else: torch loads the backend by its entry point at first use, and the names below load
on access.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "collect_certificates": "fusion.approximate.certificates",
    "collect_reports": "fusion.report.report",
    "compare": "fusion.api.compare",
    "explain": "fusion.api.explain",
    "export_mlir": "fusion.api.export",
    "FusionError": "fusion.errors",
    "inductor_options": "fusion.api.rewrite",
    "install": "fusion.api.rewrite",
    "Machine": "fusion.machine",
    "last_certificates": "fusion.approximate.certificates",
    "Options": "fusion.options",
    "plan": "fusion.planning.plan",
    "Problem": "fusion.planning.problem",
    "Report": "fusion.report.report",
    "rewrite": "fusion.api.rewrite",
    "sequence_parallel": "fusion.sequences.parallel",
    "uninstall": "fusion.api.rewrite",
    "verify": "fusion.api.verify",
}
__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def _register() -> None:
    """Register the backend without an entry point, and the artifacts of `torch.compiler.load_cache_artifacts`."""
    from importlib.metadata import entry_points

    import_module("fusion.caching")
    if entry_points(group="torch_dynamo_backends", name="fusion"):
        return

    def fusion(module: Any, example_inputs: Any, **keywords: Any) -> Any:
        return import_module("fusion.backend").fusion(module, example_inputs, **keywords)

    import_module("fusion.torch_private.dynamo").register_backend(fusion)
    import_module("fusion.integrations.nested_tensors").register()  # nothing says when it is about to be used


_register()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("fusion-attention")
        except metadata.PackageNotFoundError:
            return "0 (a checkout that is not installed)"
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fusion' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
