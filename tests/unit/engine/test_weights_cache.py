"""The cache of adapter files on a machine."""

from __future__ import annotations

from pathlib import Path

from tinsmith.engine.base import WeightsId
from tinsmith.engine.files.file_digests import digest_of
from tinsmith.engine.fleet.weights_cache import WeightsCache

A, B, C = WeightsId("a"), WeightsId("b"), WeightsId("c")


def _folder(place: Path, content: bytes) -> Path:
    place.mkdir()
    (place / "adapter.safetensors").write_bytes(content)
    (place / "adapter_config.json").write_text("{}")
    return place


def test_files_are_found_after_their_source_is_gone(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 10_000)
    source = _folder(tmp_path / "source", b"1" * 100)
    digest = cache.keep(A, source)
    (source / "adapter.safetensors").unlink()
    found = cache.find(A)

    assert found is not None
    assert digest_of(found) == digest
    assert (found / "adapter.safetensors").read_bytes() == b"1" * 100
    assert cache.find(B) is None


def test_equal_files_are_kept_once_until_nobody_needs_them(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 10_000)
    cache.keep(A, _folder(tmp_path / "one", b"same"))
    cache.keep(B, _folder(tmp_path / "two", b"same"))

    assert len(list((tmp_path / "cache").iterdir())) == 1
    cache.drop(A)
    assert cache.find(B) is not None
    cache.drop(B)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_least_recently_used_files_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 250)
    for weights_id, content in ((A, b"1"), (B, b"2")):
        cache.keep(weights_id, _folder(tmp_path / weights_id, content * 100))
    assert cache.find(A) is not None
    cache.keep(C, _folder(tmp_path / C, b"3" * 100))

    assert cache.find(B) is None
    assert cache.find(A) is not None and cache.find(C) is not None
    cache.keep(B, _folder(tmp_path / "large", b"4" * 300))
    assert cache.find(B) is None
    assert cache.find(A) is not None


def test_damaged_files_are_not_used(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 10_000)
    digest = cache.keep(A, _folder(tmp_path / "source", b"good"))
    (tmp_path / "cache" / digest / "adapter.safetensors").write_bytes(b"evil")

    assert cache.find(A) is None
