"""The intermediate representation: expressions of one score element, and the specification of one attention.

Imports no other part of the package. `expr` has the expression DAG, `integers` its exact integer arithmetic, `ops` the
primitive operations of the score language, `spec` the `AttentionSpec` that emitters take, `mask_facts` the facts about
its mask.
"""

from fusion.ir.expr import Expr, Kind
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.spec import AttentionSpec, AuxOutput, Mixing, Normalizer, Operand, Output, Reduction

__all__ = [
    "AttentionSpec", "AuxOutput", "Expr", "Kind", "MaskFacts", "Mixing", "Normalizer", "Operand", "Output", "Reduction",
]  # fmt: skip
