"""All errors that this package raises on purpose, under one base class.

Each message says what was asked, what was found, and what to do.
"""

from __future__ import annotations


class FusionError(Exception):
    """Base of all errors of this package."""


class UnknownMachineError(FusionError, KeyError):
    """A machine was asked for by a name that is not known."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class ProblemError(FusionError, ValueError):
    """Sizes that no attention can have: negative, zero where there must be something, heads that do not divide."""


class NoFittingTileError(FusionError, ValueError):
    """The fast memory is too small for the smallest legal tile of a kernel."""


class OptionError(FusionError, ValueError):
    """An option of the backend that does not exist or has a value it cannot take."""


class EmitterError(OptionError):
    """An unknown emitter was asked for, or one that does not serve the device of an attention."""


class RefusedChoiceError(FusionError, ValueError):
    """An emitter cannot run the planned choice for a call."""


class StrictError(FusionError, RuntimeError):
    """`strict=True`, and an attention could not be fused."""


class MissingPackageError(FusionError, ImportError):
    """An optional package was needed that is not installed."""


class ShardingError(FusionError, RuntimeError):
    """An attention of DTensors for which no process could compute its part."""


class OperandError(FusionError, TypeError):
    """A tensor is not of the dtype that an attention was found with."""


class UnsupportedSizeError(FusionError, ValueError):
    """A size that the integer arithmetic of kernels does not hold, or more parameters than a kernel has room for."""


class LargeTableError(FusionError, ValueError):
    """The gradient of a tensor that is read at computed indices, too large for every thread to keep a copy."""


class ApproximationError(FusionError, ValueError):
    """An approximation was asked for that does not exist."""


class ComparisonError(FusionError, RuntimeError):
    """The callable to be explained, verified or compared cannot be run, or is missing."""


class RewriteError(FusionError, ValueError):
    """`fusion.rewrite` cannot rewrite its argument."""


class IntegrationError(FusionError, ValueError):
    """A request of another library that its integration cannot fulfil."""


class TargetError(FusionError, ValueError):
    """The target named on the command line cannot be found, loaded or called."""


class KernelTextError(FusionError, RuntimeError):
    """A generated module is not valid Python: a defect of this package. The message has the numbered text around it."""


class MlirExportError(FusionError, ValueError):
    """An attention cannot be written as an MLIR module, or such a module cannot run."""


class KernelProofError(FusionError, RuntimeError):
    """A kernel computes another function than its spec: a defect of this package. It is not used."""


class KernelCompilationError(FusionError, RuntimeError):
    """Generated MLIR was refused: a defect of this package. The message has the numbered text around the place."""
