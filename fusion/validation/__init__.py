"""Validation: does a spec compute the same function as the graph? Applied to every attention before it is replaced.

The analysis (`passes`) does algebra and index arithmetic; validation trusts neither. The graph's own operations are
replayed on a sample of elements (`replay`, `operations`, `products`), over made-up tensors (`samples`); the spec's
programs are evaluated on the same sample (`program`); results and gradients are compared by one rule (`tolerance`).
Facts about the mask are checked against its predicate (`mask_check`).
"""

from fusion.validation import operations, products  # noqa: F401  (they fill the table of `replay`)
from fusion.validation.sites import Verdict, validate

__all__ = ["Verdict", "validate"]
