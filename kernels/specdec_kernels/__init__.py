"""Ops of tree speculative decoding, usable from any decoder.

Every op takes a leading row dimension (one row = one request), decides in fp32, breaks ties towards the lowest index,
and never trusts a NaN. A module an op: the Triton kernel and its `launch` for hot loops, the registered
`torch.ops.specdec.<op>`, and the public function, which is all that most callers want. On a CPU the ops run in C++
where that was built. `reference` defines what is right: plain torch, without Triton.
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
)
from specdec_kernels.verify_walk import verify_walk

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
