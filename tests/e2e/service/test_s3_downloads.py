"""Downloads of exported files and archives that come straight from a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tinsmith
from tests.contract.s3_proxy import FaultyS3
from tests.contract.s3_server import BUCKET, SECRET_KEY, S3Server
from tests.e2e.service.served import BASE_MODEL, START_S, Served
from tests.e2e.service.training_run import API_KEY, WAIT_S
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.url_store import UrlStore

WEIGHTS = "adapter_model.safetensors"


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
    """Sees every request that S3 gets."""
    proxy = FaultyS3(s3.endpoint)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def served(proxy: FaultyS3, tmp_path: Path) -> Iterator[Served]:  # noqa: ARG001 - its endpoint
    served = Served(tmp_path, "--checkpoints", f"s3://{BUCKET}/{tmp_path.name}")
    yield served
    served.end()


def exported(served: Served) -> str:
    """The path of an export."""
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1, timeout=WAIT_S)
        return training.save_weights_external("one").result(WAIT_S).path


def links(served: Served, path: str) -> dict[str, str]:
    return dict(rest_client(served).get_external_weights_urls(path).result(WAIT_S).urls)


def rest_client(served: Served) -> tinsmith.RestClient:
    return tinsmith.RestClient(base_url=served.base_url, api_key=API_KEY)


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def redirect(url: str) -> str:
    """Where a link leads to; it is not followed."""
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.build_opener(_Stay).open(url, timeout=START_S)
    with told.value as reply:
        assert reply.code == 307
        assert reply.headers["Cache-Control"] == "no-store"
        assert reply.read() == b""
        return str(reply.headers["Location"])


def fetched(url: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=START_S) as reply:
        return int(reply.status), reply.headers, reply.read()


def test_links_to_exported_files_lead_to_the_store(served: Served, proxy: FaultyS3) -> None:
    served.start()
    urls = links(served, exported(served))
    proxy.seen.clear()

    at_store = redirect(urls[WEIGHTS])

    assert f"http://{urlsplit(at_store).netloc}" == proxy.endpoint
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in at_store
    assert "X-Amz-Expires=300" in at_store
    assert SECRET_KEY not in at_store
    assert not any(WEIGHTS in seen.target for seen in proxy.seen), "the service does not read it"
    status, headers, content = fetched(urls[WEIGHTS])
    assert status == 200
    assert "attachment" in headers["Content-Disposition"]
    assert int(fetched(urls[WEIGHTS], "HEAD")[1]["Content-Length"]) == len(content)
    status, headers, part = fetched(urls[WEIGHTS], Range="bytes=8-99")
    assert (status, part) == (206, content[8:100])


def saved(served: Served, api_key: str = API_KEY) -> str:
    """The path of a training checkpoint."""
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=api_key) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1, timeout=WAIT_S)
        return training.save_state("one").result(WAIT_S).path


def at_service(served: Served, path: str, prefix: str = "") -> str:
    """Where a checkpoint is in the API."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"{served.base_url}/api/v1{prefix}/training_runs/{run}/checkpoints/{checkpoint}"


def archive_link(served: Served, path: str) -> str:
    rest = rest_client(served)
    return rest.get_checkpoint_archive_url_from_tinker_path(path).result(WAIT_S).url


def test_links_to_archives_lead_to_the_store_which_gets_each_once(
    served: Served, proxy: FaultyS3, tmp_path: Path
) -> None:
    served.start()
    path = saved(served)
    through = f"{at_service(served, path, '/tinsmith')}/archive.tar"
    expected = fetched(through, **{"X-API-Key": API_KEY})[2]
    proxy.seen.clear()
    link = archive_link(served, path)
    at_store = redirect(link)
    assert f"http://{urlsplit(at_store).netloc}" == proxy.endpoint
    assert "X-Amz-Expires=300" in at_store
    _, headers, content = fetched(link)
    assert content == expected
    assert ".tar" in headers["Content-Disposition"]
    assert fetched(link, Range="bytes=8-99")[2] == expected[8:100]
    assert int(fetched(link, "HEAD")[1]["Content-Length"]) == len(expected)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tinsmith", "checkpoint", "download", path),
            *("-o", str(tmp_path / "downloaded")),
        ],
        env={**os.environ, "TINKER_BASE_URL": served.base_url, "TINKER_API_KEY": API_KEY},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "downloaded").rglob(WEIGHTS))
    of_archive = [seen for seen in proxy.seen if "archive" in seen.target]
    assert [seen.is_upload for seen in of_archive].count(True) == 1
    reads = [seen.target for seen in of_archive if seen.method == "GET" and ".tar?" in seen.target]
    assert reads
    assert all("X-Amz-Signature=" in target for target in reads), "the service reads none of it"


def test_another_tenant_gets_no_archive_and_nor_does_anyone_once_it_is_deleted(
    served: Served, proxy: FaultyS3
) -> None:
    served.start()
    keys = [
        subprocess.run(
            [
                *(sys.executable, "-m", "tinsmith", "key", "create", "--tenant", tenant),
                *("--name", tenant, "--data", str(served.folder / "data")),
            ],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        ).stdout.strip()
        for tenant in ("owner", "other")
    ]
    served.kill()
    served.start()
    path = saved(served, keys[0])
    place = f"{at_service(served, path)}/archive"
    proxy.seen.clear()
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(place, **{"X-API-Key": keys[1]})
    assert refused.value.code == 404
    refused.value.close()
    assert not any(seen.is_upload and "archive" in seen.target for seen in proxy.seen)
    owner = tinsmith.RestClient(base_url=served.base_url, api_key=keys[0])
    link = owner.get_checkpoint_archive_url_from_tinker_path(path).result(WAIT_S).url
    assert fetched(link)[2]
    owner.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(link)
    assert refused.value.code == 404
    refused.value.close()


def test_a_changed_link_of_the_store_is_refused(served: Served) -> None:
    served.start()
    at_store = redirect(links(served, exported(served))[WEIGHTS])
    for changed in (
        at_store.replace(WEIGHTS, "adapter_config.json", 1),
        at_store.replace("X-Amz-Expires=300", "X-Amz-Expires=3000"),
        at_store.partition("?")[0],
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(changed)
        assert refused.value.code == 403
        refused.value.close()


def test_no_link_is_made_of_a_deleted_checkpoint(served: Served) -> None:
    served.start()
    path = exported(served)
    url = links(served, path)[WEIGHTS]
    rest_client(served).delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(url)
    assert refused.value.code == 404
    refused.value.close()


def test_files_pass_through_the_service_if_it_is_told_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.start()
    path = exported(served)
    direct = fetched(links(served, path)[WEIGHTS])[2]
    served.kill()
    monkeypatch.setenv("TINSMITH_SERVE_DIRECT_DOWNLOADS", "false")
    served.start()
    status, headers, content = fetched(links(served, path)[WEIGHTS])
    assert (status, content) == (200, direct)
    assert headers["X-Content-Type-Options"] == "nosniff", "as the service says"


def test_command_lines_and_the_official_sdk_follow_links(
    served: Served, proxy: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.start()
    path = exported(served)
    expected = fetched(links(served, path)[WEIGHTS])[2]
    monkeypatch.setenv("TINKER_BASE_URL", served.base_url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    for program in ("tinsmith", "tinker.cli"):
        proxy.seen.clear()
        folder = tmp_path / program
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", program, "checkpoint", "download", path, "-o", str(folder)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (file,) = folder.rglob(WEIGHTS)
        assert file.read_bytes() == expected
        # Ours ask for a part, the service would ask for another; each request is signed by URL.
        of_file = [seen.target for seen in proxy.seen if WEIGHTS in seen.target]
        assert of_file, program
        assert all("X-Amz-Signature=" in target for target in of_file)


@pytest.mark.usefixtures("proxy")
def test_a_link_of_the_store_expires(tmp_path: Path) -> None:
    store = UrlStore(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "work")
    path = CheckpointPath("run", "external_weights", "a b+c")
    with store.begin(path) as staging:
        (staging.folder / WEIGHTS).write_bytes(b"weights")
        manifest = staging.commit()
    url = store.signed_url(path, WEIGHTS, version=manifest.version, lifetime_s=2)
    assert url is not None
    assert fetched(url)[2] == b"weights"
    time.sleep(4.0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(url)
    assert refused.value.code == 403
    refused.value.close()
