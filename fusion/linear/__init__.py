"""Matrix products in the rest of a graph, by the library that is fastest for them on this processor.

On some processors MKL, which torch calls for float32, has less than half the speed of oneDNN, which torch contains. A
pass of Inductor's, below autograd, lets the products of forward and backward graphs go to oneDNN where a measurement
says that it is faster (docs/linear.md). Nothing is packed: operands are read in place, at every call.

    settings(module, when)   Inductor's settings for a graph: the entry point
    noting(notes)            notes for the report
"""

from fusion.linear.door import noting, settings

__all__ = ["noting", "settings"]
