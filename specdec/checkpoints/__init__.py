"""Readers and writers of published file formats: the embedded default target and draft heads."""
