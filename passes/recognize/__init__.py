"""From pulled-back weights to attentions: softmax in any spelling, and what is not one."""
