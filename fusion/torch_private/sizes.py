"""Symbolic sizes: what is known of them, and the functions that their expressions are made of."""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy import functions

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # before torch 2.12
    from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint

__all__ = ["free_unbacked_symbols", "functions", "optimization_hint", "statically_known_true"]
