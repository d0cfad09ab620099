"""The walk against its reference on random trees, and what opcheck and torch.compile make of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specdec_kernels import reference, verify_walk

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def walks(draw) -> tuple[torch.Tensor, ...]:
    """Trees of unequal size, few tokens so that matches (and siblings with the same token) are common."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    parents = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)] for _ in range(rows)]
    token = st.integers(-1, 3)  # -1: no usable logit
    tokens, chosen = ([[draw(token) for _ in range(nodes)] for _ in range(rows)] for _ in range(2))
    count = [draw(st.integers(1, nodes)) for _ in range(rows)]
    return tuple(torch.tensor(x) for x in (tokens, parents, count, chosen))


@given(case=walks())
def test_equal_to_the_reference(device: str, case) -> None:
    case = tuple(x.to(device) for x in case)
    for got, expected in zip(verify_walk(*case), reference.verify_walk(*case), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("nodes", [1, 2, 31, 33, 61, 1024])
def test_sizes(device: str, nodes: int) -> None:
    """A chain that is accepted as a whole, at sizes around those of a warp and a block."""
    tokens = torch.arange(nodes, device=device)[None].repeat(2, 1)
    parents = tokens - 1
    count = torch.tensor([nodes, (nodes + 1) // 2], device=device)
    path, length, bonus = verify_walk(tokens, parents, count, tokens + 1)
    assert length.tolist() == [nodes - 1, (nodes + 1) // 2 - 1]
    assert bonus.tolist() == count.tolist()
    assert path[0].tolist() == list(range(1, nodes))
    assert (path[1, int(length[1]) :] == -1).all()


def test_too_many_nodes_are_refused() -> None:
    wide = torch.zeros(1, 1025, dtype=torch.long)
    with pytest.raises(ValueError, match="1025 nodes; expected at most 1024"):
        verify_walk(wide, wide, torch.tensor([1]), wide)


CASE = torch.tensor([[5, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]), torch.tensor([[8, 1, 9, 6]])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.specdec.verify_walk.default, CASE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_compile_traces_it() -> None:
    compiled = torch.compile(verify_walk, fullgraph=True)
    assert [x.tolist() for x in compiled(*CASE)] == [x.tolist() for x in verify_walk(*CASE)]
