"""What every emitter needs of a spec and is an expression: decided here once, printed by each in its own way.

What a mask says of a tile is asked of the mask itself (`MaskFacts.visits`, `MaskFacts.whole`).
"""
