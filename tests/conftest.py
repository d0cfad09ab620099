"""Shared by all tests. This file also puts tests/ on the path, so that `oracle` can be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("specdec", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("specdec")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
