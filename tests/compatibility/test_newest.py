"""What is new in a release of the official SDK is found and reported."""

from __future__ import annotations

import sys

import pytest

from tests.compatibility import newest
from tests.compatibility.newest import Sdk, changes, dumped
from tests.compatibility.sdks import NEWEST, folder_of


@pytest.fixture(scope="module")
def supported() -> Sdk:
    return dumped(sys.executable)


def test_the_supported_release_has_nothing_new(supported: Sdk) -> None:
    assert supported.release == NEWEST
    assert len(supported.surface) > 200
    assert changes(supported.surface, supported.surface) == ([], [])


def test_what_a_release_added_to_the_one_before_is_found(supported: Sdk) -> None:
    """A new class, method, type and field of 0.36, and a type that it dropped."""
    before = dumped(sys.executable, folder_of("0.35.0"))

    found = changes(before.surface, supported.surface)

    assert before.release == "0.35.0"
    assert "tinker.AdminClient" in found.added
    assert "tinker.ServiceClient.create_custom_loss" in found.added
    assert "tinker.types.SessionSearchRequest" in found.added
    assert "tinker.types.ClientConfigResponse(custom_loss_server_side=)" in found.added
    assert found.removed == ["tinker.types.CheckpointArchiveUrlResponse"]
    # A class that is new is listed once, without its methods.
    assert not [line for line in found.added if line.startswith("tinker.AdminClient.")]


def test_a_new_parameter_and_a_new_field_are_found() -> None:
    known = {"tinker.TrainingClient": [], "tinker.TrainingClient.forward": ["data", "loss_fn"]}
    found = {"tinker.TrainingClient": ["holder"], "tinker.TrainingClient.forward": ["data", "mask"]}

    assert changes(known, found) == (
        ["tinker.TrainingClient(holder=)", "tinker.TrainingClient.forward(mask=)"],
        ["tinker.TrainingClient.forward(loss_fn=)"],
    )


@pytest.mark.parametrize(
    ("added", "status"), [({}, 0), ({"tinker.types.CheckpointSearchRequest": ["limit"]}, 1)]
)
def test_the_exit_status_says_whether_something_is_new(
    added: dict[str, list[str]],
    status: int,
    supported: Sdk,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = Sdk("0.99.0", {**supported.surface, **added})
    monkeypatch.setattr(sys, "argv", ["newest"])
    monkeypatch.setattr(newest, "installed", lambda _: "new")
    monkeypatch.setattr(newest, "dumped", lambda python: other if python == "new" else supported)

    assert newest.main() == status

    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(f"tinker 0.99.0 has {len(added)} names")
    assert all(f"new  {name}" in said.splitlines() for name in added)


def test_a_release_that_cannot_be_installed_is_not_taken_for_one_without_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: str) -> str:
        raise newest.InstallError("pip could not install tinker")

    monkeypatch.setattr(sys, "argv", ["newest"])
    monkeypatch.setattr(newest, "installed", fails)

    assert newest.main() == 2
    assert "pip could not install tinker" in capsys.readouterr().err
