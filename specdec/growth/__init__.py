"""How a tree grows: one file per policy, each a pure function from draft logits to the next layer."""
