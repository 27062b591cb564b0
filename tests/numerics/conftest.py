"""Tests of tensors run on one thread: two that spin on busy cores take many times as long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.model.kernels import library


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["kernels", "PyTorch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiled kernels, and as it is done where there are none."""
    if request.param == "PyTorch":
        monkeypatch.setattr(library, "kernels", lambda: None)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many threads for torch, where bits must not follow from their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
