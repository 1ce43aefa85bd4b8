"""Recognition of attention in pulled-back weights: softmax in any spelling, and reasons why other weights are none."""
