"""The service of the demo: it does not outlive the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.demo.service import Service


class Interrupted(Service):
    """Somebody presses Ctrl-C while it starts."""

    def _is_ready(self) -> bool:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_service_starts_ends_it(tmp_path: Path) -> None:
    """It is in a session of its own, where the terminal's Ctrl-C does not come."""
    service = Interrupted(tmp_path / "data", f"test/none={tmp_path}")

    with pytest.raises(KeyboardInterrupt), service:
        pytest.fail("it is not ready")

    assert service._process is not None
    assert service._process.poll() is not None
