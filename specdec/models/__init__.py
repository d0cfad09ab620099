"""Causal language models as the loop sees them: pending ids and tree nodes in, logits and features out."""
