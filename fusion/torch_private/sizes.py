"""Symbolic sizes: their known properties, and the functions in their expressions."""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy import functions

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # before torch 2.12
    from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint

__all__ = ["free_unbacked_symbols", "functions", "optimization_hint", "statically_known_true"]
