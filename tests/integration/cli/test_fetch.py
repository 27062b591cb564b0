"""Downloads in ranges: complete, resumed, and with every known fault."""

from __future__ import annotations

import datetime
import hashlib
import pathlib
import threading
from collections.abc import Iterator

import pytest

from tinsmith.cli import fetch as fetch_module
from tinsmith.cli.command_errors import CommandError
from tinsmith.cli.fetch import DownloadError, Fetch, SignedUrls
from tinsmith.cli.partial_download import PartialDownload
from tinsmith.observe.terminal import Progress
from tinsmith.testing import ScriptedService, running_service

PIECE = 1000
CONTENT = hashlib.shake_256(b"weights").digest(10 * PIECE + 7)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait."""
    monkeypatch.setattr(fetch_module, "RETRY_S", 0.0)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running_service() as service:
        yield service


@pytest.fixture
def whole_files() -> Iterator[ScriptedService]:
    """A service without range requests."""
    with running_service(downloads_in_parts=False) as service:
        yield service


def addresses(*urls: str) -> SignedUrls:
    return SignedUrls(lambda: ({f"file-{n}": url for n, url in enumerate(urls)}, None))


def fetched(
    where: SignedUrls, target: pathlib.Path, *, resume: bool = True, connections: int = 4
) -> dict[str, bytes]:
    """Download to a folder, and read what is in it."""
    with PartialDownload(target, resume=resume) as staging:
        bar = Progress("Downloading", None, in_bytes=True)
        total = Fetch(where, staging, bar, connections=connections, range_bytes=PIECE).run()
        assert bar.done == bar.total == total
        staging.place(staging.files)
    files = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): path.read_bytes() for path in files}


def test_files_of_all_sizes_arrive_complete(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    contents = [CONTENT, b"", b"x", CONTENT[:PIECE], CONTENT[: PIECE + 1]]
    urls = [service.downloads.put(f"f{n}", content) for n, content in enumerate(contents)]

    files = fetched(addresses(*urls), tmp_path / "target")

    assert files == {f"file-{n}": content for n, content in enumerate(contents)}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_pieces_are_fetched_concurrently(service: ScriptedService, tmp_path: pathlib.Path) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    hold = service.faults.hold(
        on="download", when=lambda asked: asked.headers["range"] != "bytes=0-0"
    )
    got: list[dict[str, bytes]] = []
    thread = threading.Thread(target=lambda: got.append(fetched(where, tmp_path / "target")))
    thread.start()

    hold.wait_held(4)
    service.faults.clear()
    thread.join(30)

    assert got == [{"file-0": CONTENT}]


def test_no_credential_is_sent_to_file_servers(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    fetched(addresses(service.downloads.put("f", b"x")), tmp_path / "target")

    assert all("x-api-key" not in asked.headers for asked in service.requests("download"))
    assert all("authorization" not in asked.headers for asked in service.requests("download"))


def test_a_server_without_range_support_sends_the_file_in_one_piece(
    whole_files: ScriptedService, tmp_path: pathlib.Path
) -> None:
    files = fetched(addresses(whole_files.downloads.put("f", CONTENT)), tmp_path / "target")

    assert files == {"file-0": CONTENT}


@pytest.mark.parametrize("gives_parts", [True, False])
def test_a_truncated_reply_is_detected_and_resumed(
    gives_parts: bool,
    service: ScriptedService,
    whole_files: ScriptedService,
    tmp_path: pathlib.Path,
) -> None:
    chosen = service if gives_parts else whole_files
    where = addresses(chosen.downloads.put("f", CONTENT))
    chosen.faults.add(on="download", half_reply=True, nth=2)

    files = fetched(where, tmp_path / "target")

    assert files == {"file-0": CONTENT}


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 429},
        {"reset": True},
        {"lose_reply": True},
        {"half_reply": True},
    ],
)
def test_transient_faults_are_retried(
    fault: dict[str, object], service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", times=3, **fault)

    files = fetched(where, tmp_path / "target", connections=1)

    assert files == {"file-0": CONTENT}


def test_a_connection_that_always_breaks_still_makes_progress(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    content = CONTENT[: 2 * PIECE]
    where = addresses(service.downloads.put("f", content))
    service.faults.add(
        on="download",
        times=None,
        half_reply=True,
        when=lambda asked: _length(asked.headers["range"]) > 100,
    )

    assert fetched(where, tmp_path / "target") == {"file-0": content}


def _length(asked: str) -> int:
    start, stop = asked.removeprefix("bytes=").split("-")
    return int(stop) - int(start) + 1


def test_an_interrupted_download_resumes_where_it_stopped(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(
        on="download",
        times=None,
        reset=True,
        when=lambda asked: asked.headers["range"].startswith("bytes=5000-"),
    )
    with pytest.raises(DownloadError) as refused:
        fetched(where, tmp_path / "target", connections=1)
    service.faults.clear()
    service.forget_requests()

    files = fetched(where, tmp_path / "target", connections=1)

    assert files == {"file-0": CONTENT}
    assert "run the command again" in str(refused.value.remedy)
    asked = [one.headers["range"] for one in service.requests("download")]
    assert asked == [
        "bytes=0-0",
        *(f"bytes={n}000-{n}999" for n in range(5, 10)),
        "bytes=10000-10006",
    ]


def test_a_partial_piece_is_kept_too(service: ScriptedService, tmp_path: pathlib.Path) -> None:
    where = addresses(service.downloads.put("f", CONTENT[:PIECE]))
    service.faults.add(on="download", nth=2, half_reply=True)
    service.faults.add(
        on="download", times=None, reset=True, when=lambda a: a.headers["range"] == "bytes=500-999"
    )
    with pytest.raises(DownloadError):
        fetched(where, tmp_path / "target", connections=1)
    service.faults.clear()
    service.forget_requests()

    files = fetched(where, tmp_path / "target")

    assert files == {"file-0": CONTENT[:PIECE]}
    assert [a.headers["range"] for a in service.requests("download")] == [
        "bytes=0-0",
        "bytes=500-999",
    ]


def test_nothing_has_the_final_name_before_the_download_is_complete(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    good, bad = service.downloads.put("good", b"x"), service.downloads.put("bad", CONTENT)
    service.faults.add(on="download", times=None, status=404, when=lambda a: "bad" in a.path)

    with pytest.raises(DownloadError, match="404"):
        fetched(addresses(good, bad), tmp_path / "target")

    assert [path.name for path in tmp_path.iterdir()] == ["target.partial"]


def test_no_partial_file_is_kept_without_resume(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=5, status=404)

    with pytest.raises(DownloadError):
        fetched(where, tmp_path / "target", resume=False)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changed_since_the_interruption_is_fetched_again(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=5, status=404)
    with pytest.raises(DownloadError):
        fetched(where, tmp_path / "target", connections=1)
    other = CONTENT[::-1]
    service.downloads.put("f", other)

    assert fetched(where, tmp_path / "target") == {"file-0": other}


def test_a_file_that_changes_during_the_download_is_rejected(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))

    def change(_: object) -> bool:
        service.downloads.put("f", CONTENT[::-1])
        return False

    service.faults.add(
        on="download", when=lambda asked: asked.number == 3 and change(asked), status=500
    )

    with pytest.raises(DownloadError, match="has changed on the server"):
        fetched(where, tmp_path / "target", connections=1)


def test_a_piece_with_another_etag_is_rejected(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=3, delay_s=0.001, headers={"ETag": '"another"'})

    with pytest.raises(DownloadError, match="has changed on the server"):
        fetched(where, tmp_path / "target", connections=1)


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_wrong_announced_size_is_rejected(
    size: int, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    wrong = {"Content-Range": f"bytes 0-0/{size}"}
    service.faults.add(on="download", nth=1, delay_s=0.001, headers=wrong)

    with pytest.raises(DownloadError, match="has changed on the server"):
        fetched(where, tmp_path / "target")

    assert not (tmp_path / "target").exists()


def test_urls_are_signed_again_before_they_expire_and_after_a_rejection(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    url = service.downloads.put("f", CONTENT)
    signed: list[str] = []

    def sign() -> tuple[dict[str, str], datetime.datetime]:
        signed.append(f"{url}?signature={len(signed)}")
        minutes = 1 if len(signed) == 1 else 60  # the first is about to expire
        lifetime = datetime.timedelta(minutes=minutes)
        return {"file-0": signed[-1]}, datetime.datetime.now(datetime.UTC) + lifetime

    service.faults.add(
        on="download", times=None, status=403, when=lambda a: a.query["signature"] == "1"
    )

    files = fetched(SignedUrls(sign), tmp_path / "target", connections=1)

    assert files == {"file-0": CONTENT}
    assert len(signed) == 3
    used = {asked.query["signature"] for asked in service.requests("download")}
    assert used == {"1", "2"}


def test_a_url_that_stays_rejected_ends_the_download(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", times=None, status=403)

    with pytest.raises(DownloadError, match="403"):
        fetched(where, tmp_path / "target")

    assert len(service.requests("download")) == fetch_module.MAX_ATTEMPTS


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_only_http_urls_are_fetched(url: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadError, match="unsupported URL scheme"):
        fetched(addresses(url), tmp_path / "target")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "", ".", "a//b", "a\\b", "a\nb", "a\x00b"]
)
def test_a_name_outside_the_folder_is_rejected_before_any_request(
    name: str, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    url = service.downloads.put("f", CONTENT)

    with pytest.raises(CommandError, match="unsafe file name"):
        fetched(SignedUrls(lambda: ({name: url}, None)), tmp_path / "deep" / "target")

    assert service.requests("download") == []
    assert [path.name for path in tmp_path.rglob("*evil*")] == []


@pytest.mark.parametrize(
    "state",
    [
        "not json",
        "[]",
        '{"file-0": 3}',
        '{"file-0": {"size": 10007, "tag": null, "pieces": [[0, 10007, 10007]]}}',
        '{"file-0": {"size": 10007, "pieces": [[0, null, 1]]}}',
    ],
)
def test_an_invalid_resume_state_is_ignored(
    state: str, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "target.partial" / "files").mkdir(parents=True)
    (tmp_path / "target.partial" / "state.json").write_text(state)
    (tmp_path / "target.partial" / "files" / "left-over").write_bytes(b"of another download")

    files = fetched(addresses(service.downloads.put("f", CONTENT)), tmp_path / "target")

    assert files == {"file-0": CONTENT}


def test_two_downloads_cannot_write_to_the_same_target(tmp_path: pathlib.Path) -> None:
    with PartialDownload(tmp_path / "target"), pytest.raises(CommandError, match="another process"):
        PartialDownload(tmp_path / "target").__enter__()
