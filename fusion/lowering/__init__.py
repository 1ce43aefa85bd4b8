"""What every emitter needs of a spec and is an expression: decided here once, printed by each in its own way.

    score_programs   variants of the score program, in units of a scale that costs nothing
    dead_rows        whether a row may need keys that its mask lets a kernel skip
    numbers          constants of float32, and how large an integer can be
    rows             the end of a row: its maximum and sum, and what its output is multiplied by
    row_gradients    what the gradient needs of rows that are scaled by something else than one over their sum
    further_gradients
                     what the gradient needs of weights, and statistics of them, that are further outputs
    ranges           in which interval a value lies
    gradients        which gradients a backward computes, as expressions, and over what each is summed

What a mask says of a tile is asked of the mask itself (`MaskFacts.visits`, `MaskFacts.whole`).
"""
