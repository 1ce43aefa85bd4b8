"""The pull-back: one element of a tensor as an expression of its inputs' elements, by a rule per kind of operation."""
