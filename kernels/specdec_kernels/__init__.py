"""Ops of tree speculative decoding, usable from any decoder.

Every op takes a leading row dimension (one row = one request), decides in fp32, breaks ties towards the lowest index,
and never trusts a NaN. `reference` defines what is right: plain torch, without Triton.
"""

from specdec_kernels.reference import (
    ancestors,
    confidence_gate,
    gumbel,
    kv_commit,
    perturbed_argmax,
    philox,
    sample_tokens,
    topk_logprobs,
    verify_walk,
)

__all__ = [
    "ancestors",
    "confidence_gate",
    "gumbel",
    "kv_commit",
    "perturbed_argmax",
    "philox",
    "sample_tokens",
    "topk_logprobs",
    "verify_walk",
]
