"""What the service asks of the system when it starts."""

from __future__ import annotations

import resource

import pytest

from tinsmith.service.run.lifecycle import _allow_connections

WITHOUT_END = 2**63 - 1


@pytest.mark.parametrize(
    ("soft", "hard", "most", "had"),
    [
        (1024, 4096, 4096, 4096),
        (4096, 4096, 4096, 4096),
        (256, WITHOUT_END, 10_240, 10_240),
        (256, WITHOUT_END, 200_000, 65_536),
        (100_000, WITHOUT_END, 200_000, 100_000),
        (256, WITHOUT_END, 256, 256),
    ],
)
def test_the_file_descriptor_limit_is_raised_to_the_maximum(
    soft: int, hard: int, most: int, had: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is fewer than the system says."""
    limits = soft, hard

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if wanted[0] > most:
            raise ValueError("current limit exceeds maximum limit")
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)

    _allow_connections()

    assert limits == (had, hard)
