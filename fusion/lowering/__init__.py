"""Emitter-independent parts of a kernel, as expressions: decided once for all emitters, each of which prints them.

The state of a tile under a mask comes from the mask itself (`MaskFacts.visits`, `MaskFacts.whole`).
"""
