"""One draw per node from processed logits, by the Gumbel maximum with counter-based noise; greedy without noise.

    token = argmax_v x[v] + g(seed, stream, position, v),   g = -log(-log(1 - u)),   u from Philox 4x32-10

The key is the seed and the counter (position, stream, v // 4), whose four words belong to four neighbouring tokens
(Salmon et al., SC 2011). The noise is a multiple of 2^-20 made in fp64, so that Triton, C++ and torch come to the same
bits (see `reference.gumbel`), and so to the same token: the one addition is fp32 in all three.

A row is split over programs; each looks at blocks of BLOCK tokens, makes the words, bounds the noise by the bits of a
float (log2 lies above its chords), and pays for the two fp64 logarithms only if some token of the block can still win;
after the first blocks few can. The last program to arrive merges. Ties to the lowest id; -1 for a row with a NaN or
without a finite maximum. Inputs bf16, fp16 or fp32, strided in all but the last dimension; the
sum is fp32. Deterministic.

Limit: reads B M V elements once, 8.6 us for 61 x 151936 in fp32 at 4.3 TB/s; Philox takes about 12 integer operations
a token and is the longer part, some 20 us there; greedy is bound by memory. Declines V of 2^31 and more.
"""

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, last_arrival, tl, triton, unit_stride
from specdec_kernels.aot import Variant
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _gumbel(word):
    """As `reference.gumbel`: uint32 -> fp32."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)  # 2^-32, 1 - 2^-24
    noise = -tl.log(-tl.log(1.0 - v.to(tl.float64)))
    return ((noise + 6442450944.0) - 6442450944.0).to(tl.float32)  # 1.5 * 2^32


@triton.jit
def _gumbel_bound(word):
    """At least `_gumbel`: -log(-log(1 - v)) <= -log(v), and the bits of a float are nearly its log2."""
    bits = (word >> 1).to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
    return 109.5176 - bits.to(tl.float32) * 8.262958294867817e-08  # log(2) * 158 and 1e-4 for roundings; log(2) * 2^-23


@triton.jit
def _sample_kernel(
    token_ptr, logits_ptr, seeds_ptr, positions_ptr,  # [B * M], [B, M, V], [B], [B * M]
    best_ptr, id_ptr, ticket_ptr,  # [B * M, splits] twice; [B * M], zero before and after
    nodes, vocab, stride_row, stride_node, span, splits, stream,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    NONE: tl.constexpr = 2147483647  # an id behind all others
    row = (tl.program_id(0) // splits).to(tl.int64)
    part = tl.program_id(0) % splits
    logits_ptr += row // nodes * stride_row + row % nodes * stride_node
    if not GREEDY:
        seed = tl.load(seeds_ptr + row // nodes)
        position = tl.load(positions_ptr + row).to(tl.uint32)
    lane = tl.arange(0, BLOCK)
    four = tl.arange(0, BLOCK // 4)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], NONE, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    leader = float("-inf")
    start = part * span
    end = tl.minimum(start + span, vocab)
    while start < end:
        index = start + lane
        x = tl.load(logits_ptr + index, mask=index < end, other=float("-inf")).to(tl.float32)
        bad = tl.where(x == x, bad, 1)
        if GREEDY:
            token = tl.where(x > best, index, token)
            best = tl.where(x > best, x, best)
        else:
            counter = (start // 4 + four).to(tl.uint32)
            a, b, c, d = tl.philox(seed, position + counter * 0, counter * 0 + stream, counter, counter * 0)
            word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
            if tl.max(x + _gumbel_bound(word)) > leader:
                value = x + _gumbel(word)
                token = tl.where(value > best, index, token)
                best = tl.where(value > best, value, best)
                leader = tl.max(best)
        start += BLOCK
    top = tl.max(best)
    id1 = tl.min(tl.where(best == top, token, NONE))
    best_ptr += row * splits
    id_ptr += row * splits
    tl.store(best_ptr + part, tl.where(tl.max(bad) > 0, float("inf"), top))
    tl.store(id_ptr + part, id1)

    if last_arrival(ticket_ptr + row, splits):
        at = tl.arange(0, SPLITS)
        held = at < splits
        tops = tl.load(best_ptr + at, mask=held, other=float("-inf"))
        top = tl.max(tops)
        id1 = tl.min(tl.where(tops == top, tl.load(id_ptr + at, mask=held, other=NONE), NONE))
        usable = (top > float("-inf")) & (top < float("inf"))
        tl.store(token_ptr + row, tl.where(usable, id1, -1).to(tl.int64))


def config(rows: int, vocab: int) -> dict[str, int]:
    """How a row is cut: about 8 programs for each of 132 processors, BLOCK tokens at a time."""
    width = min(1024, block(vocab, 128))
    return {"BLOCK": width, "splits": min(-(-vocab // width), max(1, 1056 // max(rows, 1)), 64), "num_warps": 4}


def workspace_size(rows: int, vocab: int) -> tuple[int, int, int]:
    """Elements of `launch`'s workspace: values (fp32), ids (int32), tickets (int32, zero)."""
    splits = config(rows, vocab)["splits"]
    return rows * splits, rows * splits, rows


def launch(
    token: Tensor, logits: Tensor, seeds: Tensor | None, stream: int, positions: Tensor | None,
    values: Tensor, ids: Tensor, tickets: Tensor,
) -> None:  # fmt: skip
    """token [B, M], the inputs of `sample_tokens` (no seeds: greedy), then the workspace of `workspace_size(B * M, V)`.

    The tickets are zero before the first launch, and a launch leaves them so. Allocates nothing and does not wait: it
    can be captured.
    """
    rows, vocab = token.numel(), logits.shape[-1]
    given = () if seeds is None else (seeds, positions)
    assert logits.stride(-1) == 1 and all(t.is_contiguous() for t in (token, *given, values, ids, tickets))
    options = config(rows, vocab)
    splits, width = options.pop("splits"), options["BLOCK"]
    span = -(-vocab // (splits * width)) * width
    greedy = seeds is None
    _sample_kernel[(rows * splits,)](
        token, logits, token if greedy else seeds, token if greedy else positions, values, ids, tickets,
        token.shape[1], vocab, *logits.stride()[:2], span, splits, stream,
        GREEDY=greedy, SPLITS=block(splits), **options,
    )  # fmt: skip


def _launched(logits: Tensor, seeds: Tensor | None, stream: int, positions: Tensor | None) -> Tensor:
    logits, token = unit_stride(logits), _fake(logits, seeds, stream, positions)
    if token.numel():
        sizes = workspace_size(token.numel(), logits.shape[-1])
        dtypes = (torch.float32, torch.int32, torch.int32)
        values, ids, tickets = (logits.new_empty(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True))
        given = (None if t is None else t.contiguous() for t in (seeds, positions))
        launch(token, logits, next(given), stream, next(given), values, ids, tickets.zero_())
    return token


_op = torch.library.custom_op("specdec::sample_tokens", _launched, mutates_args=(), device_types="cuda")


@_op.register_kernel("cpu")
def _cpu(logits: Tensor, seeds: Tensor | None, stream: int, positions: Tensor | None) -> Tensor:
    if INTERPRETED:
        return _launched(logits, seeds, stream, positions)
    if not _native.library:
        return _referred(logits, seeds, stream, positions)
    logits, token = unit_stride(logits), _fake(logits, seeds, stream, positions)
    seeds, positions = (None if t is None else t.contiguous() for t in (seeds, positions))
    data, dtype = logits.data_ptr(), _native.DTYPES[logits.dtype]
    _native.call("sample_tokens", token, data, dtype, seeds, stream, positions, *logits.shape, *logits.stride()[:2])
    return token


def _referred(logits: Tensor, seeds: Tensor | None, stream: int, positions: Tensor | None) -> Tensor:
    """The reference, with noise made once for each distinct position: the nodes of a tree share a few."""
    if seeds is None or positions is None:
        return reference.perturbed_argmax(logits)
    distinct, index = positions.unique(return_inverse=True)
    noise = reference.gumbel(seeds, stream, distinct.expand(len(seeds), -1), logits.shape[-1])
    return reference.perturbed_argmax(logits, noise.gather(1, index[..., None].expand_as(logits)))


@_op.register_fake
def _fake(logits: Tensor, seeds: Tensor | None, stream: int, positions: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.long)


def sample_tokens(logits: Tensor, seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """One draw per node from softmax(logits); see the module's docstring.

    Args:
        logits: [B, M, V] bf16, fp16 or fp32, processed (temperature applied, excluded tokens at -inf).
        seeds: [B] int64; stream: which of the independent streams; positions: [B, M] int64, the absolute position of
            the token that is drawn. Equal positions of a row share their noise.
    Returns:
        token ids [B, M] int64; -1 where the row holds a NaN or no finite maximum.
    Raises:
        ValueError: another shape or dtype.

    >>> sample_tokens(torch.zeros(1, 3, 50), torch.tensor([7]), 0, torch.tensor([[4, 5, 4]]))
    tensor([[49, 28, 49]])
    """
    _check("sample_tokens", logits)
    for name, tensor, shape in (("seeds", seeds, logits.shape[:1]), ("positions", positions, logits.shape[:2])):
        if tensor.dtype != torch.long or tensor.shape != shape:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"sample_tokens: {name} is {given}; expected torch.int64 {list(shape)}")
    return (_cpu if _native.direct(logits) else _op)(logits, seeds, int(stream), positions)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The most likely token of every node: `sample_tokens` at temperature 0.

    Args:
        logits: [B, M, V] bf16, fp16 or fp32.
    Returns:
        token ids [B, M] int64, equal maxima to the lowest id; -1 where the row holds a NaN or no finite maximum.

    >>> greedy_tokens(torch.tensor([[[1.0, 3.0, 3.0], [0.0, float("nan"), 1.0]]]))
    tensor([[ 1, -1]])
    """
    _check("greedy_tokens", logits)
    return (_cpu if _native.direct(logits) else _op)(logits, None, 0, None)


def _check(name: str, logits: Tensor) -> None:
    if logits.dim() != 3 or logits.dtype not in DTYPES or not logits.shape[-1]:
        raise ValueError(f"{name}: logits {list(logits.shape)} {logits.dtype}; expected [B, M, V] of {DTYPES}")


VARIANTS = [
    Variant(
        f"{name}_{dtype}",
        _sample_kernel,
        {
            "token_ptr": "*i64:16",
            "logits_ptr": f"*{dtype}:16",
            "seeds_ptr": "*i64:16",
            "positions_ptr": "*i64:16",
            "best_ptr": "*fp32:16",
            "id_ptr": "*i32:16",
            "ticket_ptr": "*i32:16",
            "nodes": "i32",
            "vocab": "i32:16",
            "stride_row": "i64:16",
            "stride_node": "i32:16",
            "span": "i32:16",
            "splits": "i32",
            "stream": "i32",
        },
        {"GREEDY": greedy, "BLOCK": 1024, "SPLITS": 32},
        wide_loads=True,
    )
    for dtype in ("fp32", "fp16", "bf16")
    for name, greedy in (("sample_tokens", False), ("greedy_tokens", True))
]
