"""TriSpec's margin at every node: how far the most likely token leads.

    margin = p1 - p2 = (1 - e^(x2 - x1)) / S,   S = sum_v e^(x[v] - x1),   x1, x2 = the two largest logits of the row

at temperature 1 on raw logits, with x1's id, x1, x2, logsumexp = x1 + log S, p1 = 1 / S and x1 - x2 from the same pass.
A row is split over programs; each keeps a running (x1, its id, x2, S) a lane, and the last to arrive merges. TriSpec
(arXiv 2601.23180) compares the margin with its threshold to route a round: see `trust_walk`. `cascade_scalars` gives
what the rules of SpecCascade (arXiv 2405.19261) compare.

Inputs bf16, fp16 or fp32, strided in all but the last dimension; all else fp32. Ties to the lowest id; x2 = x1 then. A
row with a NaN or without a finite maximum: token -1, margins 0, the rest NaN; it is never confident. V = 1: x2 = -inf,
margin 1. Deterministic: the order of the sums depends on V and the number of rows alone. Limit: reads B N V elements
once, 4.3 us for 61 x 151936 in bf16 at 4.3 TB/s, 8.6 us in fp32. Declines V of 2^31 and more.
"""

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, last_arrival, tl, triton, unit_stride
from specdec_kernels.aot import Variant
from specdec_kernels.reference import CascadeScalars, Margins
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FIELDS = 6  # of Margins behind the token


@triton.jit
def _merge(first, token, second, total, none: tl.constexpr):
    """Lanes or parts to one: the largest and its lowest id, the second largest, the sum relative to the largest."""
    top1 = tl.max(first)
    id1 = tl.min(tl.where(first == top1, token, none))
    top2 = tl.max(tl.where(token == id1, second, first))
    # lanes that hold nothing but -inf weigh nothing, unless all do
    return top1, id1, top2, tl.sum(total * tl.exp(tl.where(first == top1, 0.0, first - top1)))


@triton.jit
def _margin_kernel(
    token_ptr, values_ptr,  # [rows], [6, rows]
    logits_ptr,  # [rows / nodes, nodes, V]
    parts_ptr, ids_ptr, ticket_ptr,  # [rows, splits, 3], [rows, splits], [rows] zero before and after
    rows, nodes, vocab, stride_row, stride_node, span, splits,
    NORMALISE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    NONE: tl.constexpr = 2147483647  # an id behind all others
    row = (tl.program_id(0) // splits).to(tl.int64)
    part = tl.program_id(0) % splits
    logits_ptr += row // nodes * stride_row + row % nodes * stride_node
    lane = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], float("-inf"), tl.float32)
    second = first
    total = tl.zeros([BLOCK], tl.float32)
    token = part * span + lane
    start = part * span
    end = tl.minimum(start + span, vocab)
    while start < end:
        index = start + lane
        x = tl.load(logits_ptr + index, mask=index < end, other=float("-inf")).to(tl.float32)
        above = x > first
        # one exponential for both directions; equal ones apart, since inf - inf is NaN
        e = tl.exp(-tl.abs(tl.where(x == first, 0.0, x - first))) if NORMALISE else tl.where(x == x, 0.0, x)
        total = tl.where(above, total * e + 1.0, total + e)
        second = tl.where(above, first, tl.where(x > second, x, second))
        token = tl.where(above, index, token)
        first = tl.where(above, x, first)
        start += BLOCK
    top1, id1, top2, total1 = _merge(first, token, second, total, NONE)
    parts_ptr += row * splits * 3
    ids_ptr += row * splits
    tl.store(parts_ptr + part, top1)
    tl.store(parts_ptr + splits + part, top2)
    tl.store(parts_ptr + 2 * splits + part, total1)
    tl.store(ids_ptr + part, id1)

    if last_arrival(ticket_ptr + row, splits):
        at = tl.arange(0, SPLITS)
        held = at < splits
        firsts = tl.load(parts_ptr + at, mask=held, other=float("-inf"))
        seconds = tl.load(parts_ptr + splits + at, mask=held, other=float("-inf"))
        totals = tl.load(parts_ptr + 2 * splits + at, mask=held, other=0.0)
        top1, id1, top2, total1 = _merge(firsts, tl.load(ids_ptr + at, mask=held, other=NONE), seconds, totals, NONE)
        # a NaN has made the sum a NaN, which tl.max drops
        usable = (total1 == total1) & (top1 > float("-inf")) & (top1 < float("inf"))
        if not NORMALISE:
            total1 = tl.full((), float("nan"), tl.float32)
        bad = float("nan")
        values_ptr += row
        tl.store(token_ptr + row, tl.where(usable, id1, -1).to(tl.int64))
        tl.store(values_ptr, tl.where(usable, top1, bad))
        tl.store(values_ptr + rows, tl.where(usable, top2, bad))
        tl.store(values_ptr + 2 * rows, tl.where(usable, top1 + tl.log(total1), bad))
        tl.store(values_ptr + 3 * rows, tl.where(usable, 1.0 / total1, bad))
        tl.store(values_ptr + 4 * rows, tl.where(usable, (1.0 - tl.exp(top2 - top1)) / total1, 0.0))
        tl.store(values_ptr + 5 * rows, tl.where(usable, top1 - top2, 0.0))


def config(rows: int, vocab: int) -> dict[str, int]:
    """How a row is cut: about 4 programs for each of 132 processors, BLOCK lanes a program."""
    width = min(4096, block(vocab, 256))
    blocks = -(-vocab // width)
    return {"BLOCK": width, "splits": min(blocks, max(1, 528 // max(rows, 1)), 64), "num_warps": max(4, width // 512)}


def workspace_size(rows: int, vocab: int) -> tuple[int, int, int]:
    """Elements of `launch`'s workspace: parts (fp32), ids (int32), tickets (int32, zero)."""
    splits = config(rows, vocab)["splits"]
    return 3 * rows * splits, rows * splits, rows


def launch(
    token: Tensor, values: Tensor, logits: Tensor, parts: Tensor, ids: Tensor, tickets: Tensor, normalise: bool = True
) -> None:
    """token [B, N], values [6, B, N], logits [B, N, V] with a last stride of 1, then `workspace_size(B * N, V)`.

    The tickets are zero before the first launch, and a launch leaves them so. Allocates nothing and does not wait: it
    can be captured.
    """
    rows, vocab = token.numel(), logits.shape[-1]
    assert logits.stride(-1) == 1 and all(t.is_contiguous() for t in (token, values, parts, ids, tickets))
    options = config(rows, vocab)
    splits, width = options.pop("splits"), options["BLOCK"]
    span = -(-vocab // (splits * width)) * width
    _margin_kernel[(rows * splits,)](
        token, values, logits, parts, ids, tickets,
        rows, token.shape[1], vocab, *logits.stride()[:2], span, splits,
        NORMALISE=normalise, SPLITS=block(splits), **options,
    )  # fmt: skip


def _launched(logits: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    out, logits = _fake(logits, normalise), unit_stride(logits)
    if out[0].numel():
        sizes = workspace_size(out[0].numel(), logits.shape[-1])
        dtypes = (torch.float32, torch.int32, torch.int32)
        parts, ids, tickets = (logits.new_empty(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True))
        launch(*out, logits, parts, ids, tickets.zero_(), normalise)
    return out


_op = torch.library.custom_op("specdec::margin_scan", _launched, mutates_args=(), device_types="cuda")


@_op.register_kernel("cpu")
def _cpu(logits: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    if INTERPRETED:
        return _launched(logits, normalise)
    if not _native.library:
        token, *values = reference.margin_scan(logits, normalise)
        return token, torch.stack(values)
    out, logits = _fake(logits, normalise), unit_stride(logits)
    dtype, strides = _native.DTYPES[logits.dtype], logits.stride()[:2]
    _native.call("margin_scan", *out, logits.data_ptr(), dtype, *logits.shape, *strides, int(normalise))
    return out


@_op.register_fake
def _fake(logits: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    rows, nodes, _ = logits.shape
    values = logits.new_empty((FIELDS, rows, nodes), dtype=torch.float32)
    return logits.new_empty((rows, nodes), dtype=torch.long), values


def margin_scan(logits: Tensor, normalise: bool = True) -> Margins:
    """The lead of the most likely token of every row; see the module's docstring.

    Args:
        logits: [B, N, V] bf16, fp16 or fp32, raw.
        normalise: False leaves out the sum over the row: logsumexp, probability and margin are then NaN.
    Returns:
        `Margins`, each [B, N]: token int64; top1, top2, logsumexp, probability, margin and logit_margin fp32.
    Raises:
        ValueError: another shape or dtype.

    >>> found = margin_scan(torch.tensor([[0.7, 0.2, 0.1]]).log()[None])
    >>> found.token, found.margin
    (tensor([[0]]), tensor([[0.5000]]))
    """
    if logits.dim() != 3 or logits.dtype not in DTYPES or not logits.shape[-1]:
        raise ValueError(f"margin_scan: logits {list(logits.shape)} {logits.dtype}; expected [B, N, V] of {DTYPES}")
    token, values = (_cpu if _native.direct(logits) else _op)(logits, normalise)
    return Margins(token, *values.unbind(0))


def cascade_scalars(draft_logits: Tensor, target_logits: Tensor, token_ids: Tensor | None = None) -> CascadeScalars:
    """The five numbers from which every SpecCascade rule decides at temperature 0 whether a or b comes next.

    Chow: max q >= 1 - alpha; Diff: max q >= max p - alpha; OPT: the same, alpha [a != b]; V1: q(a) >= max p - alpha;
    V2: p(a) >= max p - alpha; V3: p(a) >= (1 - alpha) max p. Two margin scans and a gather. For T > 0, Diff and Chow
    need no more; OPT needs the total variation of the two scaled distributions, and the token rules a draw from a
    mixture of them: both are sums over pairs of rows, and nothing that one scan of each row could leave behind.

    Args:
        draft_logits: [B, N, Vd]; target_logits: [B, N, V]; both raw.
        token_ids: [Vd] the draft's ids as the target's; None if they are the same.
    Returns:
        `CascadeScalars`, each [B, N]: draft_token a, draft_probability max q = q(a), target_token b, target_probability
        max p, agreed_probability p(a). A token is -1 and a probability 0 where a row is unusable.
    """
    draft, target = margin_scan(draft_logits), margin_scan(target_logits)
    a = draft.token if token_ids is None else torch.where(draft.token >= 0, token_ids[draft.token.clamp(min=0)], -1)
    known = (a >= 0) & (a < target_logits.shape[-1]) & (target.token >= 0)
    logit = target_logits.gather(-1, torch.where(known, a, 0)[..., None])[..., 0].float()
    agreed = torch.where(known, torch.exp(logit - target.top1) * target.probability, 0.0)
    q, p = (torch.where(found.token >= 0, found.probability, 0.0) for found in (draft, target))
    return CascadeScalars(a, q, target.token, p, agreed)


VARIANTS = [
    Variant(
        f"{name}_{dtype}",
        _margin_kernel,
        {
            "token_ptr": "*i64:16",
            "values_ptr": "*fp32:16",
            "logits_ptr": f"*{dtype}:16",
            "parts_ptr": "*fp32:16",
            "ids_ptr": "*i32:16",
            "ticket_ptr": "*i32:16",
            "rows": "i32",
            "nodes": "i32",
            "vocab": "i32:16",
            "stride_row": "i64:16",
            "stride_node": "i32:16",
            "span": "i32:16",
            "splits": "i32",
        },
        {"NORMALISE": normalise, "BLOCK": 4096, "SPLITS": 8},
        num_warps=8,
        wide_loads=True,
    )
    for dtype in ("fp32", "fp16", "bf16")
    for name, normalise in (("margin_scan", True), ("logit_margin", False))
]
