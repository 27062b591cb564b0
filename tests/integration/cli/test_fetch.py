"""Files fetched in pieces: whole, resumed, and under every fault that we know."""

from __future__ import annotations

import datetime
import hashlib
import pathlib
import threading
from collections.abc import Iterator

import pytest

from tinsmith.cli import fetch as fetch_module
from tinsmith.cli.failures import CommandError
from tinsmith.cli.fetch import Addresses, DownloadError, Fetch
from tinsmith.cli.staging import Staging
from tinsmith.observe.progress import Progress
from tinsmith.testing import ScriptedService, running_service

PIECE = 1000
CONTENT = hashlib.shake_256(b"weights").digest(10 * PIECE + 7)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second tries come at once."""
    monkeypatch.setattr(fetch_module, "RETRY_S", 0.0)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running_service() as service:
        yield service


@pytest.fixture
def whole_files() -> Iterator[ScriptedService]:
    """A service that gives files whole, whatever part is asked for."""
    with running_service(downloads_in_parts=False) as service:
        yield service


def addresses(*urls: str) -> Addresses:
    return Addresses(lambda: ({f"file-{n}": url for n, url in enumerate(urls)}, None))


def fetched(
    where: Addresses, target: pathlib.Path, *, resume: bool = True, connections: int = 4
) -> dict[str, bytes]:
    """Download to a folder, and read what is in it."""
    with Staging(target, resume=resume) as staging:
        bar = Progress("Downloading", None, in_bytes=True)
        total = Fetch(where, staging, bar, connections=connections, piece_bytes=PIECE).run()
        assert bar.done == bar.total == total
        staging.place(staging.files)
    files = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): path.read_bytes() for path in files}


def test_files_of_all_sizes_arrive_whole(service: ScriptedService, tmp_path: pathlib.Path) -> None:
    contents = [CONTENT, b"", b"x", CONTENT[:PIECE], CONTENT[: PIECE + 1]]
    urls = [service.downloads.put(f"f{n}", content) for n, content in enumerate(contents)]

    files = fetched(addresses(*urls), tmp_path / "target")

    assert files == {f"file-{n}": content for n, content in enumerate(contents)}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_w43_pieces_are_fetched_at_the_same_time(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
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


def test_no_credential_goes_to_the_servers_of_files(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    fetched(addresses(service.downloads.put("f", b"x")), tmp_path / "target")

    assert all("x-api-key" not in asked.headers for asked in service.requests("download"))
    assert all("authorization" not in asked.headers for asked in service.requests("download"))


def test_a_server_without_parts_gives_the_file_in_one(
    whole_files: ScriptedService, tmp_path: pathlib.Path
) -> None:
    files = fetched(addresses(whole_files.downloads.put("f", CONTENT)), tmp_path / "target")

    assert files == {"file-0": CONTENT}


@pytest.mark.parametrize("gives_parts", [True, False])
def test_w43_a_short_reply_is_noticed_and_gone_on_with(
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
def test_what_passes_is_tried_again(
    fault: dict[str, object], service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", times=3, **fault)

    files = fetched(where, tmp_path / "target", connections=1)

    assert files == {"file-0": CONTENT}


def test_a_connection_that_always_breaks_gets_there_bit_by_bit(
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


def test_w43_a_broken_off_download_goes_on_where_it_stopped(
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


def test_half_a_piece_is_kept_too(service: ScriptedService, tmp_path: pathlib.Path) -> None:
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


def test_nothing_has_the_final_name_before_everything_is_there(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    good, bad = service.downloads.put("good", b"x"), service.downloads.put("bad", CONTENT)
    service.faults.add(on="download", times=None, status=404, when=lambda a: "bad" in a.path)

    with pytest.raises(DownloadError, match="404"):
        fetched(addresses(good, bad), tmp_path / "target")

    assert [path.name for path in tmp_path.iterdir()] == ["target.partial"]


def test_no_part_is_kept_if_nobody_wants_to_resume(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=5, status=404)

    with pytest.raises(DownloadError):
        fetched(where, tmp_path / "target", resume=False)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changed_since_is_fetched_anew(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=5, status=404)
    with pytest.raises(DownloadError):
        fetched(where, tmp_path / "target", connections=1)
    other = CONTENT[::-1]
    service.downloads.put("f", other)

    assert fetched(where, tmp_path / "target") == {"file-0": other}


def test_a_file_that_changes_under_way_is_refused(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))

    def change(_: object) -> bool:
        service.downloads.put("f", CONTENT[::-1])
        return False

    service.faults.add(
        on="download", when=lambda asked: asked.number == 3 and change(asked), status=500
    )

    with pytest.raises(DownloadError, match="another file now"):
        fetched(where, tmp_path / "target", connections=1)


def test_a_part_of_another_file_of_the_same_size_is_refused(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", nth=3, delay_s=0.001, headers={"ETag": '"another"'})

    with pytest.raises(DownloadError, match="another file now"):
        fetched(where, tmp_path / "target", connections=1)


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_w43_a_size_that_is_not_true_is_refused(
    size: int, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    wrong = {"Content-Range": f"bytes 0-0/{size}"}
    service.faults.add(on="download", nth=1, delay_s=0.001, headers=wrong)

    with pytest.raises(DownloadError, match="another file now"):
        fetched(where, tmp_path / "target")

    assert not (tmp_path / "target").exists()


def test_addresses_are_signed_anew_before_they_expire_and_when_one_is_refused(
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

    files = fetched(Addresses(sign), tmp_path / "target", connections=1)

    assert files == {"file-0": CONTENT}
    assert len(signed) == 3
    used = {asked.query["signature"] for asked in service.requests("download")}
    assert used == {"1", "2"}


def test_an_address_that_stays_refused_ends_the_download(
    service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    where = addresses(service.downloads.put("f", CONTENT))
    service.faults.add(on="download", times=None, status=403)

    with pytest.raises(DownloadError, match="403"):
        fetched(where, tmp_path / "target")

    assert len(service.requests("download")) == fetch_module.MOST_ATTEMPTS


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_only_http_is_fetched(url: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadError, match="addresses are not fetched"):
        fetched(addresses(url), tmp_path / "target")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "", ".", "a//b", "a\\b", "a\nb", "a\x00b"]
)
def test_a_name_that_leads_out_is_refused_before_anything_is_asked_for(
    name: str, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    url = service.downloads.put("f", CONTENT)

    with pytest.raises(CommandError, match="written elsewhere"):
        fetched(Addresses(lambda: ({name: url}, None)), tmp_path / "deep" / "target")

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
def test_notes_that_are_not_to_be_trusted_are_not(
    state: str, service: ScriptedService, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "target.partial" / "files").mkdir(parents=True)
    (tmp_path / "target.partial" / "state.json").write_text(state)
    (tmp_path / "target.partial" / "files" / "left-over").write_bytes(b"of another download")

    files = fetched(addresses(service.downloads.put("f", CONTENT)), tmp_path / "target")

    assert files == {"file-0": CONTENT}


def test_two_downloads_do_not_write_to_one_place(tmp_path: pathlib.Path) -> None:
    with Staging(tmp_path / "target"), pytest.raises(CommandError, match="another process"):
        Staging(tmp_path / "target").__enter__()
