"""The state of a batch against lists: what is committed, where a text ends, and who reads tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.rows import Rows, Stopping

pytestmark = pytest.mark.usefixtures("one_thread")


def commit(rows: Rows, accepted: list[list[int]], bonus: list[int]):
    """One round in which row b accepts the tokens `accepted[b]`, which lie at scattered nodes, and draws `bonus[b]`."""
    width = max(len(tokens) for tokens in accepted)
    nodes = torch.full((len(rows), 2 * width + 1), 99)
    path = torch.full((len(rows), width), -1)
    for row, tokens in enumerate(accepted):
        for level, token in enumerate(tokens):
            nodes[row, 2 * level + 2] = token
            path[row, level] = 2 * level + 2
    tree = SimpleNamespace(tokens=nodes, count=torch.full((len(rows),), nodes.shape[1]))
    length = torch.tensor([len(tokens) for tokens in accepted])
    for name in rows.cached:
        rows.cached[name] = rows.length + length
    gained = rows.extend(tree, path, length, torch.tensor(bonus))
    return rows.fetch(tree, path, length, gained)


@given(st.data())
def test_rounds_against_lists(data) -> None:
    """Texts grow by accepted tokens and bonus, end at the first end-of-text token or at the budget, and then stay."""
    eos = data.draw(st.sets(st.integers(0, 9), max_size=2))
    budget = data.draw(st.integers(1, 12))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    rows = Rows(prompts, budget, [0] * len(prompts), Stopping(frozenset(eos)))
    rows.start_cache("target")
    texts: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    while not rows.finished:
        room = [budget - len(text) - 1 if reason is None else 0 for text, reason in zip(texts, reasons, strict=True)]
        assert rows.room.tolist() == room
        assert rows.max_room == max(room)
        accepted = [data.draw(st.lists(st.integers(0, 9), max_size=min(most, 4))) for most in room]
        bonus = [data.draw(st.integers(0, 9)) for _ in prompts]
        gains = commit(rows, accepted, bonus)
        for row, gain in enumerate(gains):
            if reasons[row] is not None:
                assert gain.tokens == gain.path == []
                continue
            emitted = [*accepted[row], bonus[row]]
            stop = next((i + 1 for i, token in enumerate(emitted) if token in eos), None)
            texts[row] += emitted[:stop]
            assert gain.tokens == emitted[:stop]
            reasons[row] = "eos" if stop else "length" if len(texts[row]) == budget else None
        assert rows.finish_reasons == reasons
        assert rows.new_tokens == texts
        for row, prompt in enumerate(prompts):
            length = int(rows.length[row])
            assert rows.ids[row, :length].tolist() == prompt + texts[row]
            assert rows.roots[row] == (prompt + texts[row])[-1]
            assert rows.host.length[row] == length
            assert rows.host.cached["target"][row] == int(rows.cached["target"][row]) <= length
    assert not rows.active.any()


@pytest.mark.parametrize(
    ("emitted", "kept", "reason"),
    [
        ([4, 5, 6], 3, None),
        ([4, 2, 6], 2, "eos"),
        ([2], 1, "eos"),
        ([4, 5, 2], 3, "eos"),
        ([4, 3, 2], 2, "eos"),
        ([1, 8, 9, 4], 3, "stop"),
        ([9, 4], 1, "stop"),
    ],
)
def test_where_a_text_ends(emitted, kept, reason) -> None:
    """D07: only the block's last token was looked at, and one of several ids known. D08: so with stop strings."""
    stopping = Stopping(frozenset({2, 3}), ("89",), lambda ids: "".join(map(str, ids)))
    assert stopping.cut([7, 8], emitted) == (kept, reason)


def whole_runs(ids: list[int]) -> str:
    """One byte an id, 0 is empty; a run that is no UTF-8 is replaced whole, as byte fallback does it."""
    try:
        return bytes(i for i in ids if i).decode()
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(ids)


@pytest.mark.parametrize("decode", [whole_runs, lambda ids: bytes(i for i in ids if i).decode(errors="replace")])
@given(
    text=st.text("ab\N{EURO SIGN}\N{GRINNING FACE}\0", min_size=60, max_size=120),
    stop=st.text("ab\N{EURO SIGN}\N{GRINNING FACE}", min_size=2, max_size=6),
    size=st.integers(1, 5),
)
def test_the_end_of_a_text_is_enough_to_find_a_stop_string(decode, text: str, stop: str, size: int) -> None:
    """D08: in blocks of any size, with characters of several ids and ids of no character."""
    ids = list(text.encode())
    stopping = Stopping(strings=(stop,), decode=decode)
    found = None
    for start in range(0, len(ids), size):
        kept, reason = stopping.cut(ids[:start], ids[start : start + size])
        if reason:
            found = start + kept
            break
    assert found == next((n for n in range(1, len(ids) + 1) if stop in decode(ids[:n])), None)


def test_a_stop_string_does_not_cost_the_whole_text_for_every_token() -> None:
    seen = []
    stopping = Stopping(strings=("never",), decode=lambda ids: seen.append(len(ids)) or "x" * len(ids))
    assert stopping.cut([1] * 5000, [1] * 4) == (4, None)
    assert sum(seen) < 500


def test_the_context_ends_a_text() -> None:
    """D15: a token may follow the last position, but nothing is computed behind it."""
    rows = Rows([[1] * 6, [1] * 2], 8, [0, 0], context=8)
    assert rows.limit == [9, 9]
    commit(rows, [[3, 3], [3]], [4, 4])
    assert rows.finish_reasons == ["context", None]
    rows = Rows([[1] * 6], 2, [0], context=8)
    commit(rows, [[5]], [6])
    assert rows.finish_reasons == ["length"]


def test_an_unusable_draw_names_step_and_node() -> None:
    """D26: a NaN became id 0, or an id beyond the vocabulary; both look like text."""
    rows = Rows([[1], [1]], 8, [0, 0])
    commit(rows, [[], []], [5, 5])
    with pytest.raises(FloatingPointError, match=r"row 1, new token 4: .* node 4 "):
        commit(rows, [[3, 3], [3, 3]], [4, -1])


def test_an_ended_row_may_draw_anything() -> None:
    rows = Rows([[1], [1]], 3, [0, 0], Stopping(frozenset({7})))
    commit(rows, [[], []], [7, 5])
    commit(rows, [[], []], [-1, 5])
    assert rows.new_tokens == [[7], [5, 5]]


def test_two_models_of_one_name() -> None:
    rows = Rows([[1]], 4, [0])
    rows.start_cache("target")
    with pytest.raises(ValueError, match="two models of one generation are called 'target'"):
        rows.start_cache("target")


# --- who reads tensors -----------------------------------------------------------------------------------------------

READERS = {
    "rows.py": {"Rows.fetch"},
    "tree.py": {"Layer.narrow"},
    "stats.py": {"Round.tree"},
    "prompts.py": {"encode", "_encode_one"},  # a prompt may come as a tensor
}
NOT_IN_THE_LOOP = ("training/", "evaluation/", "checkpoints/", "cli", "loading", "cost", "report")
READS = {"item", "tolist", "cpu", "numpy", "nonzero"}


def reads(path: Path) -> set[str]:
    """Functions of a file that call `.item()`, `.tolist()`, ... or `bool`, `int`, `float` of something computed."""
    found = set()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = (*scope, child.name) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else scope
            if isinstance(child, ast.Call):
                called = child.func
                if isinstance(called, ast.Attribute) and called.attr in READS:
                    found.add(".".join(inner))
                if isinstance(called, ast.Name) and called.id in {"bool", "int", "float"} and _computed(child):
                    found.add(".".join(inner))
            visit(child, inner)

    visit(ast.parse(path.read_text()), ())
    return found


def _computed(call: ast.Call) -> bool:
    """Whether the argument could be a tensor: not a constant, a plain name, or something of the host's."""
    return bool(call.args) and isinstance(call.args[0], (ast.Call, ast.Subscript, ast.BinOp, ast.Compare))


def test_tensors_are_read_in_few_places() -> None:
    """A hidden read waits for the device. One a round, in `fetch`; one a draft layer in eager mode, in `narrow`."""
    root = Path(specdec.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    found = {name: reads(path) for name, path in files.items() if not name.startswith(NOT_IN_THE_LOOP)}
    assert len(found) > 20
    found = {name: functions for name, functions in found.items() if functions}
    assert found == READERS


def test_the_lint_sees_a_read(tmp_path: Path) -> None:
    code = "class A:\n    def f(self, x):\n        if bool((x > 0).all()): return x.sum().item()\n"
    (tmp_path / "a.py").write_text(code)
    assert reads(tmp_path / "a.py") == {"A.f"}
