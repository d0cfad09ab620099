"""The doubles: plain decoding that can be checked by eye, drafts with a script, and tiny models."""
