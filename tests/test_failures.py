"""docs/failures.md says which test guards which kind of failure; this keeps it true."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LINES = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
ROWS = {match[1]: line for line in LINES if (match := re.match(r"\| (D\d\d) \|", line))}


def named() -> dict[str, set[str]]:
    """Kind -> test files whose text names it."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for kind in re.findall(r"\bD\d\d\b", path.read_text(encoding="utf-8")):
            found.setdefault(kind, set()).add(path.relative_to(TESTS).as_posix())
    return found


def test_the_catalogue_is_whole() -> None:
    assert list(ROWS) == [f"D{number:02}" for number in range(1, 39)]
    assert all("https://github.com/" in line for line in ROWS.values())


def test_every_guard_exists_and_names_its_kind() -> None:
    found = named()
    for kind, line in ROWS.items():
        guards = re.findall(r"[\w/]*test_\w+\.py", line)
        assert guards or "later" in line, kind
        for guard in guards:
            assert (TESTS / guard).is_file(), f"{kind}: {guard}"
        if guards and "later" not in line and kind != "D30":
            assert found.get(kind, set()) & set(guards), f"{kind}: none of {guards} names it"


def test_every_named_kind_is_in_the_catalogue() -> None:
    assert set(named()) <= set(ROWS)
