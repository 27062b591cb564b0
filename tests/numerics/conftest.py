"""Tests of tensors run on one thread: two that spin on busy cores take many times as long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.engine.model.kernels import library
from tinsmith.engine.model.kernels.library import Kernels
from tinsmith.engine.model.kernels.library_path import library_path


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


def _usable() -> list[str]:
    """The libraries whose instructions this machine has."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = {"AVX512": ["x86-64-v3", "x86-64-v4"], "AVX2": ["x86-64-v3"]}.get(capability, [])
    return sorted({*names, library._instruction_set()})


@pytest.fixture(scope="module", params=_usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of each library."""
    path = library_path(request.param)
    if not path.exists():
        pytest.skip("there was no C compiler when tinsmith was installed")
    return Kernels(path)


@pytest.fixture
def by_kernels(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for kernels gets these."""
    monkeypatch.setattr(library, "kernels", lambda: kernels)


@pytest.fixture
def products() -> Kernels:
    """Kernels that multiply, which only one of the libraries has."""
    found = library.kernels()
    if found is None or not found.has_matmul:
        pytest.skip("products are for machines that multiply bfloat16")
    return found
