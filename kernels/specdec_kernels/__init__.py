"""Ops of tree speculative decoding, usable from any decoder.

Every op takes a leading row dimension (one row = one request), decides in fp32, breaks ties towards the lowest index,
and never trusts a NaN. A module an op: the Triton kernel and its `launch` for hot loops, the registered
`torch.ops.specdec.<op>`, and the public function, which is all that most callers want. On a CPU the ops run in C++
where that was built. `reference` defines what is right: plain torch, without Triton.
"""

from specdec_kernels.confidence_gate import confidence_gate
from specdec_kernels.kv_commit import kv_commit
from specdec_kernels.margin_scan import cascade_scalars, margin_scan
from specdec_kernels.merge_attention import merge_attention
from specdec_kernels.reference import (
    ancestor_words,
    ancestors,
    gumbel,
    philox,
    uniforms,
)
from specdec_kernels.rejection_walk import rejection_walk
from specdec_kernels.sample_tokens import greedy_tokens, sample_tokens
from specdec_kernels.topk_logprobs import topk_logprobs
from specdec_kernels.tree_attention import tree_attention
from specdec_kernels.trust_walk import trust_walk
from specdec_kernels.verify_walk import verify_walk

__all__ = [
    "ancestor_words",
    "ancestors",
    "cascade_scalars",
    "confidence_gate",
    "greedy_tokens",
    "gumbel",
    "kv_commit",
    "margin_scan",
    "merge_attention",
    "philox",
    "rejection_walk",
    "sample_tokens",
    "topk_logprobs",
    "tree_attention",
    "trust_walk",
    "uniforms",
    "verify_walk",
]
