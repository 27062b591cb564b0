from __future__ import annotations

import json
import platform
from importlib import metadata

import pytest

from tinsmith import __version__
from tinsmith.cli import version
from tinsmith.cli.main import main


def test_json_output_is_a_single_object(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["version", "--format", "json"])

    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["tinsmith"] == __version__
    assert report["python"] == platform.python_version()
    assert report["packages"]["msgspec"] == metadata.version("msgspec")


def test_a_missing_package_is_shown_as_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "PACKAGES", ("no-such-package",))

    main(["version"])

    assert "no-such-package (not installed)" in capsys.readouterr().out
