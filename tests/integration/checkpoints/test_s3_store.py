"""Checkpoints in a real S3 server: large files, errors in between, parts that are left over."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.contract.s3_proxy import (
    Fault,
    FaultyS3,
    loses_reply,
    never_answers,
    replies,
    resets,
    truncates,
)
from tests.contract.s3_server import BUCKET, S3Server
from tinsmith.checkpoints import url_store
from tinsmith.checkpoints.archive import STORED_ARCHIVE, Archive, archive_url
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.url_store import UrlStore
from tinsmith.errors import CheckpointNotFoundError, CheckpointUnavailableError

FILE = "adapter_model.safetensors"
SMALL = "adapter_config.json"
MIB = 1 << 20
LARGE = bytes(range(256)) * (11 * MIB // 256)
"""Three parts of the size that the tests choose, which is the smallest that S3 allows."""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.remove()


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """What stores find at AWS_ENDPOINT_URL."""
    proxy = FaultyS3(s3.endpoint)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setattr(url_store, "PART_BYTES", 5 * MIB)
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: FaultyS3, tmp_path: Path) -> UrlStore:  # noqa: ARG001 - the store's endpoint
    return new_store(tmp_path)


def new_store(tmp_path: Path, *, work: str = "work", bucket: str = BUCKET) -> UrlStore:
    return UrlStore(f"s3://{bucket}/{tmp_path.name}", tmp_path / work, grace_s=0.0)


def path(name: str = "a") -> CheckpointPath:
    return CheckpointPath("run", "weights", name)


def save(store: UrlStore, content: bytes = LARGE, name: str = "a") -> None:
    with store.begin(path(name)) as staging:
        (staging.folder / FILE).write_bytes(content)
        (staging.folder / SMALL).write_bytes(content[:100])
        staging.commit(overwrite=True)


def content(store: UrlStore, name: str = "a") -> bytes:
    with store.open(path(name)) as reading:
        return (reading.folder / FILE).read_bytes()


def refusal(store: UrlStore) -> CheckpointUnavailableError | None:
    """Save; what was wrong, if anything was."""
    try:
        save(store)
    except CheckpointUnavailableError as error:
        return error
    return None


def objects(store: UrlStore) -> list[str]:
    """Everything below the store's URL."""
    root = f"{store._root}/"
    return [name for name in store._fs.find(root) if name.startswith(root)]


def uploads(store: UrlStore) -> list[Any]:
    """Uploads that were begun and neither completed nor aborted."""
    found = store._fs.call_s3(
        "list_multipart_uploads", Bucket=BUCKET, Prefix=store._root.partition("/")[2]
    )
    return list(found.get("Uploads", ()))


def test_a_large_file_is_uploaded_in_parts(store: UrlStore, proxy: FaultyS3) -> None:
    save(store)

    assert sum(request.is_part for request in proxy.seen) == 3
    assert sum(request.is_completion for request in proxy.seen) == 1
    assert content(store) == LARGE
    assert uploads(store) == []


@pytest.mark.parametrize(
    "fault",
    [replies(500, "InternalError"), replies(503, "SlowDown"), resets, loses_reply],
    ids=["500", "SlowDown", "reset", "lost reply"],
)
def test_an_error_in_the_middle_of_a_save_is_retried(
    store: UrlStore, proxy: FaultyS3, fault: Fault
) -> None:
    """The second part, and the manifest; each fails once."""
    proxy.fail(fault, lambda request: request.is_part, skip=1)
    proxy.fail(fault, lambda request: request.is_upload and request.is_manifest)

    save(store)

    assert proxy.faults_left == 0
    assert content(store) == LARGE


def test_a_save_that_fails_at_any_request_leaves_the_old_checkpoint(
    store: UrlStore, proxy: FaultyS3
) -> None:
    save(store, b"old")
    refused = 0
    for skip in range(20):
        proxy.fail(replies(400, "InvalidRequest"), lambda _: True, skip=skip, times=1000)
        told = refusal(store)
        proxy.heal()
        if told is None:
            break
        assert not told.is_lasting
        refused += 1
        assert content(store) == b"old"
        store.sweep()
        assert len(objects(store)) == 3, "two files of one version, and its manifest"
        assert uploads(store) == []

    # Reading the manifest, the small file, the beginning of the upload, three parts, its
    # completion, the new manifest.
    assert refused == 8
    assert content(store) == LARGE


@pytest.mark.parametrize(
    "fault", [loses_reply, replies(404, "NoSuchUpload")], ids=["lost reply", "NoSuchUpload"]
)
def test_a_lost_reply_to_a_completed_upload_can_be_retried(
    store: UrlStore, proxy: FaultyS3, fault: Fault
) -> None:
    """A server may answer the second request to complete an upload with NoSuchUpload."""
    proxy.fail(fault, lambda request: request.is_completion)
    told = refusal(store)
    if told is not None:
        assert not told.is_lasting
        save(store)
    assert proxy.faults_left == 0
    assert content(store) == LARGE


def test_parts_of_an_upload_that_was_not_aborted_are_deleted_by_a_sweep(
    store: UrlStore, proxy: FaultyS3
) -> None:
    """As after an outage in the middle: the request to abort it fails too."""
    refuses = replies(400, "InvalidRequest")
    proxy.fail(refuses, lambda request: request.is_part, skip=2, times=1000)
    proxy.fail(refuses, lambda request: request.method == "DELETE", times=1000)
    assert refusal(store) is not None
    proxy.heal()
    assert len(uploads(store)) == 1
    with pytest.raises(CheckpointNotFoundError):
        store.info(path())

    store.sweep()

    assert uploads(store) == []
    assert objects(store) == []


def test_an_upload_that_is_not_answered_is_given_up(
    store: UrlStore, proxy: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time for the whole of it, it would be sent for ever."""
    monkeypatch.setattr(url_store, "CALL_S", 2.0)
    monkeypatch.setattr(url_store, "SLOWEST_BYTES_S", 1e9)
    proxy.fail(never_answers, lambda request: request.is_part, times=1000)

    told = refusal(store)

    assert told is not None
    assert told.reason == "its endpoint cannot be reached"
    assert not told.is_lasting


def test_a_sweep_works_where_uploads_may_not_be_listed(store: UrlStore, proxy: FaultyS3) -> None:
    save(store, b"old")
    save(store, b"new")
    proxy.fail(
        replies(403, "AccessDenied"), lambda request: "uploads" in request.target, times=1000
    )

    assert store.sweep() == 1

    assert len(objects(store)) == 3
    assert content(store) == b"new"


def link(store: UrlStore) -> str:
    """A URL of the archive in the store."""
    version = store.info(path()).version
    url = archive_url(store, path(), version=version, lifetime_s=60, shown_as="a.tar")
    assert url is not None
    return url


def test_an_archive_in_the_store_is_deleted_with_its_checkpoint(store: UrlStore) -> None:
    save(store)
    with urllib.request.urlopen(link(store)) as reply:
        assert reply.read() == b"".join(Archive(store, path()).read())
    store.sweep()
    assert sum(STORED_ARCHIVE in name for name in objects(store)) == 1
    save(store, b"new")
    store.sweep()
    assert len(objects(store)) == 3, "that of the old version has gone with it"
    link(store)
    store.delete(path())
    store.sweep()
    assert objects(store) == []


def test_an_archive_whose_checkpoint_is_deleted_meanwhile_is_swept(
    store: UrlStore, tmp_path: Path
) -> None:
    save(store, b"small")
    version = store.info(path()).version

    def content() -> Iterator[bytes]:
        elsewhere = new_store(tmp_path, work="elsewhere")
        elsewhere.delete(path())
        elsewhere.sweep()
        yield b"late"

    store.keep_beside(path(), STORED_ARCHIVE, content, version=version)
    assert len(objects(store)) == 1
    store.sweep()
    assert objects(store) == []


DIES = """
import sys
from pathlib import Path
from tinsmith.checkpoints import archive, paths, url_store
url_store.PART_BYTES = 5 << 20
store = url_store.UrlStore(sys.argv[1], Path(sys.argv[2]), grace_s=0.0)
path = paths.CheckpointPath("run", "weights", "a")
archive.archive_url(store, path, version=sys.argv[3], lifetime_s=60, shown_as="a.tar")
"""


def test_a_process_that_dies_while_it_stores_an_archive_leaves_nothing_that_stays(
    store: UrlStore, proxy: FaultyS3, tmp_path: Path
) -> None:
    save(store)
    proxy.seen.clear()
    proxy.fail(never_answers, lambda request: request.is_part, skip=2, times=1000)
    version = store.info(path()).version
    arguments = (store.url, str(tmp_path / "work"), version)
    dying = subprocess.Popen([sys.executable, "-c", DIES, *arguments])
    try:
        deadline = time.monotonic() + 60.0
        while sum(request.is_part for request in proxy.seen) < 3:
            assert dying.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        dying.kill()
        dying.wait()
    proxy.heal()
    assert len(uploads(store)) == 1
    assert len(objects(store)) == 3, "no archive that could be served"

    store.sweep()

    assert uploads(store) == []
    assert list((tmp_path / "work" / "staging").iterdir()) == []
    assert content(store) == LARGE
    with urllib.request.urlopen(link(store)) as reply:
        assert reply.read() == b"".join(Archive(store, path()).read())


def test_a_download_that_breaks_off_is_continued(store: UrlStore, proxy: FaultyS3) -> None:
    save(store)
    is_file = lambda request: request.method == "GET" and FILE in request.target  # noqa: E731
    proxy.fail(truncates, is_file)
    assert b"".join(store.read(path(), FILE)) == LARGE
    proxy.fail(truncates, is_file)
    assert content(store) == LARGE
    assert proxy.faults_left == 0


def test_listing_ten_thousand_checkpoints_reads_no_manifest(
    store: UrlStore, proxy: FaultyS3, s3: S3Server
) -> None:
    """A listing has up to 1000 objects in one reply."""
    count, runs = 10_000, 50
    expected = {
        CheckpointPath(f"run-{number % runs}", "weights", f"step-{number}", "1-0123456789abcdef")
        for number in range(count)
    }
    put = {store.address(path, "checkpoint.json"): b"{}" for path in expected}
    filled = s3fs.S3FileSystem(endpoint_url=s3.endpoint, skip_instance_cache=True)
    filled.pipe(put)

    started = time.monotonic()
    found = list(store.paths())
    print(f"{count} checkpoints listed in {time.monotonic() - started:.2f} s")

    assert len(found) == count
    assert set(found) == expected
    assert not any(request.is_manifest for request in proxy.seen)
    assert len(proxy.seen) <= count / 1000 + 40
    proxy.seen.clear()
    assert len(list(store.paths("run-7"))) == count / runs
    assert len(proxy.seen) <= 40


@pytest.mark.usefixtures("proxy")
def test_a_missing_bucket_is_named_and_not_created(tmp_path: Path) -> None:
    store = new_store(tmp_path, bucket="not-there")
    uses = (
        lambda: store.check(writes=True),
        store.check,
        lambda: save(store),
        lambda: store.info(path()),
        lambda: list(store.paths()),
    )
    for use in uses:
        with pytest.raises(CheckpointUnavailableError) as refused:
            use()
        assert refused.value.reason == "its bucket does not exist"
        assert "create the bucket not-there" in str(refused.value.remedy)
        assert refused.value.is_lasting
    assert not store._fs.exists("not-there")


def test_errors_that_s3fs_does_not_know_are_the_stores_and_not_the_disks(
    store: UrlStore, proxy: FaultyS3
) -> None:
    proxy.fail(replies(507, "XStorageDown"), lambda _: True, times=1000)
    with pytest.raises(CheckpointUnavailableError) as failed:
        store.check(writes=True)
    assert failed.value.reason == "it returned an error"
    proxy.heal()
    proxy.fail(replies(403, "RequestTimeTooSkewed"), lambda _: True, times=1000)
    with pytest.raises(CheckpointUnavailableError) as failed:
        store.check(writes=True)
    assert "set the clock" in str(failed.value.remedy)
