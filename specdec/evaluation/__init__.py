"""Measurements of the whole package: is the text the same, and what did it cost."""
