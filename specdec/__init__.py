"""Speculative decoding of Hugging Face language models: the same text as your model alone, in fewer passes."""

__version__ = "0.1.0"
