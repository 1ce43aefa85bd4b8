"""Validation: does a spec compute what the graph computes? Asked of every attention before it is put in place.

The analysis (`passes`) does algebra and index arithmetic; nothing here trusts either. The graph's own operations are
replayed on a sample of elements (`replay`, `operations`, `layouts`), over made-up tensors (`samples`); the spec's
programs are evaluated on the same sample (`program`); results and gradients are compared by one rule (`tolerance`).
What is known of the mask is checked against its predicate (`mask_check`).
"""

from fusion.validation import assembled, operations, products  # noqa: F401  (they fill the table of `replay`)
from fusion.validation.sites import Verdict, validate

__all__ = ["Verdict", "validate"]
