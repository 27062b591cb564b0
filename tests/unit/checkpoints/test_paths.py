from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.checkpoints.paths import LONGEST_NAME, CheckpointPath
from tinsmith.errors import ValidationError


@pytest.mark.parametrize(
    "name", ["000010", "final", "step-1.5", "größe 1", "a:b", "A", "a" * LONGEST_NAME, "x@y=z,~+"]
)
def test_ordinary_names_are_accepted_and_round_trip(name: str) -> None:
    path = CheckpointPath("session-1:train:0", "weights", name)

    assert CheckpointPath.parse(str(path)) == path
    assert CheckpointPath.of("session-1:train:0", path.checkpoint_id) == path
    assert CheckpointPath.from_parts(path.parts) == path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 characters; expected 1 to 128"),
        ("a" * 129, "129 characters; expected 1 to 128"),
        ("é" * 100, "600 bytes as a file name; the maximum is 240"),
        ("..", "reserved by"),
        (".", "reserved by"),
        (".hidden", "reserved by"),
        ("end.", "reserved by"),
        (" a", "reserved by"),
        ("NUL", "reserved by"),
        ("com1.txt", "reserved by"),
        ("a\0b", "not allowed"),
        ("a\nb", "not allowed"),
        ("a\\b", "not allowed"),
        ("a%2fb", "not allowed"),
        ("a?b", "not allowed"),
        ("\ud800", "not allowed"),
        ("\u202etxt", "not allowed"),
        ("a/b", "not allowed"),
    ],
)
def test_hostile_names_are_rejected_with_the_field_and_the_limit(name: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"^name .*{why}"):
        CheckpointPath("run", "weights", name)
    with pytest.raises(ValidationError, match=f"^run id .*{why}"):
        CheckpointPath(name, "weights", "name")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "tinker://run/weights",
        "tinker://run/weights/a/b",
        "tinker://run/other/a",
        "tinker://run/snapshots/3",
        "tinker://run/samplers/weights",
        "http://run/weights/a",
        "/run/weights/a",
        "snapshots/run/-1",
        "snapshots/run/01",
        "snapshots/run/1e3",
        "snapshots/run/٣",
        "snapshots/run/",
        f"snapshots/run/{2**63}",
        "snapshots/run/1/2",
        "samplers/run/other",
    ],
)
def test_invalid_paths_are_rejected(text: str) -> None:
    with pytest.raises(ValidationError):
        CheckpointPath.parse(text)


def test_snapshots_have_internal_paths_of_their_own() -> None:
    snapshot = CheckpointPath.snapshot("s:train:0", 12)

    assert str(snapshot) == "snapshots/s:train:0/12"
    assert snapshot.position == 12
    assert snapshot.is_internal
    assert snapshot.parts == ("snapshots", "s:train:0", "12")
    assert CheckpointPath.parse(str(snapshot)) == snapshot


@given(st.text(max_size=140), st.text(max_size=140))
def test_any_name_is_rejected_or_maps_to_one_safe_location(first: str, second: str) -> None:
    places = {}
    for name in (first, second):
        try:
            path = CheckpointPath("run", "weights", name)
        except ValidationError:
            continue
        assert all(part.isascii() and part.isprintable() for part in path.parts)
        assert all(0 < len(part) <= 240 and part[0] != "." for part in path.parts)
        assert not any("/" in part or "\\" in part for part in path.parts)
        assert CheckpointPath.from_parts(path.parts) == path
        places[name] = path.parts
    assert len(set(places.values())) == len(places)


@given(st.lists(st.text(max_size=20), max_size=5))
def test_any_location_belongs_to_at_most_one_path(parts: list[str]) -> None:
    path = CheckpointPath.from_parts(tuple(parts))

    assert path is None or path.parts == tuple(parts)
