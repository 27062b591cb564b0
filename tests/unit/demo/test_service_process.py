"""The demo's service does not outlive the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.demo.service_process import ServiceProcess


class Interrupted(ServiceProcess):
    """Ctrl-C is pressed while the service starts."""

    def _is_ready(self) -> bool:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_service_starts_stops_it(tmp_path: Path) -> None:
    """The service has its own session, so it does not receive the terminal's Ctrl-C."""
    service = Interrupted(tmp_path / "data", f"test/none={tmp_path}")

    with pytest.raises(KeyboardInterrupt), service:
        pytest.fail("it is not ready")

    assert service._process is not None
    assert service._process.poll() is not None
