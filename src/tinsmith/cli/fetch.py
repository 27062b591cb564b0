"""Downloads files over several connections, with retries, resumption and a check of their size.

If the server supports range requests, a file is split into ranges that are downloaded in parallel
and that a later run can resume; otherwise it is downloaded as a whole, from the start. After a
broken connection the range continues at the byte where it broke.

Uses threads and the standard library's HTTP client: the URLs are signed and may belong to other
servers, so none of the API client's credentials or retries apply.

An embedded service listens on a Unix socket in its data folder. The URLs have the form
`http+unix://<quoted path of the socket>/<path of the file>`. Only sockets of the user's own
embedded services are opened: a URL comes from a service, and must not make the client talk to other
programs on this machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import http.client
import os
import pathlib
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from tinsmith.cli.command_errors import CommandError
from tinsmith.cli.partial_download import PartialDownload
from tinsmith.observe.terminal import Progress, size_text

SCHEME = "http+unix"
SOCKET = "embedded.sock"


class _Connection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Override: connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def opened(
    url: str,
    headers: dict[str, str],
    timeout_s: float,
    *,
    method: str = "GET",
    body: Any = None,
) -> http.client.HTTPResponse:
    """Send a request and return the response; the body is a file.

    Raises:
        HTTPError: The response has an error status, as with `urllib`.
        OSError: The connection failed, or the socket is not that of an embedded service.
    """
    parts = urlsplit(url)
    path = unquote(parts.netloc)
    _check(pathlib.Path(path))
    connection = _Connection(path, timeout_s)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    # The response owns the socket, and closes it.
    connection.request(method, target, body=body, headers={"Connection": "close", **headers})
    reply = connection.getresponse()
    if reply.status >= 400 and reply.status != 416:
        raise urllib.error.HTTPError(url, reply.status, reply.reason, reply.headers, reply)
    return reply


def _check(path: pathlib.Path) -> None:
    if path.name != SOCKET or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} is not the socket of one of your embedded services")


RANGE_BYTES = 16 * 1024 * 1024
READ_BYTES = 256 * 1024
READ_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 5
"""Attempts per range without a byte of progress."""
RETRY_S = 0.5
RENEW_BEFORE = datetime.timedelta(minutes=5)
STOP_WAIT_S = 2.0

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_EMPTY = re.compile(r"bytes \*/0")
_EXPIRED = frozenset({401, 403, 410})
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a request is sent again."""

Sign = Callable[[], tuple[dict[str, str], datetime.datetime | None]]
"""Returns URLs by file name, and when they expire."""


class DownloadError(CommandError):
    """A file could not be downloaded completely."""


class _TransientError(Exception):
    """A failure that may not happen again."""


class SignedUrls:
    """The signed URLs of the files; renewed before they expire, and when one is refused."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign
        self._lock = threading.Lock()
        self._urls, self._expires = self._signed()
        self.names = sorted(self._urls)

    def _signed(self) -> tuple[dict[str, str], datetime.datetime | None]:
        urls, expires = self._sign()
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=datetime.UTC)
        return urls, expires

    def url(self, name: str, refused: str | None = None) -> str:
        """The current URL of a file; a new one if it equals `refused`."""
        with self._lock:
            now = datetime.datetime.now(datetime.UTC)
            is_old = self._expires is not None and now >= self._expires - RENEW_BEFORE
            if is_old or self._urls.get(name) == refused:
                self._urls, self._expires = self._signed()
            if name not in self._urls:
                raise DownloadError(f"the service no longer has a URL for {name}")
            return self._urls[name]


@dataclasses.dataclass
class ByteRange:
    """A range of a file and its progress; `stop` is None if the size is unknown."""

    name: str
    start: int
    stop: int | None
    done: int = 0

    @property
    def left(self) -> int | None:
        """The number of missing bytes; None if unknown."""
        return None if self.stop is None else self.stop - self.start - self.done


@dataclasses.dataclass
class RemoteFile:
    """A file as described by the server, and its ranges."""

    name: str
    size: int | None
    tag: str | None
    has_ranges: bool
    path: pathlib.Path
    pieces: list[ByteRange]

    def state(self) -> dict[str, Any]:
        """The state that a later run needs to resume."""
        pieces = [[piece.start, piece.stop, piece.done] for piece in self.pieces]
        return {"size": self.size, "tag": self.tag, "pieces": pieces}


class Fetch:
    """Downloads files into the folder of a download.

    Args:
        urls: The URLs of the files.
        staging: The folder of the download.
        bar: Shows the progress.
        connections: Number of parallel connections.
        range_bytes: The size of a range.
    """

    def __init__(
        self,
        urls: SignedUrls,
        staging: PartialDownload,
        bar: Progress,
        *,
        connections: int = 8,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        self._urls = urls
        self._staging = staging
        self._bar = bar
        self._connections = connections
        self._range_bytes = range_bytes
        self._files: dict[str, RemoteFile] = {}
        self._state: dict[str, Any] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> int:
        """Download all files and return their total size.

        Raises:
            DownloadError: A file could not be downloaded completely; what has arrived is kept.
        """
        paths = {name: self._staging.path_of(name) for name in self._urls.names}
        self._staging.keep_only(self._urls.names)
        self._state = self._staging.load()
        try:
            self._each([functools.partial(self._open, *item) for item in paths.items()])
            pieces = [piece for file in self._files.values() for piece in file.pieces]
            sizes = [file.size for file in self._files.values()]
            total = None if None in sizes else sum(size or 0 for size in sizes)
            self._bar.begin(total, sum(piece.done for piece in pieces))
            self._each([functools.partial(self._fetch, p) for p in pieces if p.left != 0])
            return self._checked()
        finally:
            self._stop.set()
            self._save(list(self._files.values()))

    def _each(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks on one thread per connection, and raise the first error."""
        waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)

        def work() -> None:
            try:
                while not self._stop.is_set():
                    waiting.get_nowait()()
            except queue.Empty:
                ended.put(None)
            except BaseException as exc:  # noqa: BLE001 - raised again in the main thread
                ended.put(exc)
            else:
                ended.put(None)

        # Daemon threads: one that hangs in a read must not delay Ctrl-C.
        threads = [
            threading.Thread(target=work, daemon=True)
            for _ in range(min(self._connections, len(tasks)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                error = ended.get()
                if error is not None:
                    raise error
        except BaseException:
            self._stop.set()
            deadline = time.monotonic() + STOP_WAIT_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            raise

    # Before the download: sizes and ranges

    def _open(self, name: str, path: pathlib.Path) -> None:
        """Get the size of a file, and find what an earlier run left of it."""
        size, tag, has_ranges = self._retry(name, self._describe)
        path.touch()
        saved = self._state.get(name) if has_ranges else None
        pieces = _resumed(name, saved, size, tag, path.stat().st_size)
        if pieces is None:
            path.write_bytes(b"")
            pieces = self._split(name, size, has_ranges)
        with self._lock:
            self._files[name] = RemoteFile(name, size, tag, has_ranges, path, pieces)

    def _describe(self, url: str) -> tuple[int | None, str | None, bool]:
        """The size of a file, its ETag, and whether the server supports ranges."""
        with _opened(url, {"Range": "bytes=0-0"}) as reply:
            headers = reply.headers
            tag = headers.get("ETag")
            found = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if reply.status == 206 and found is not None:
                return int(found[3]), tag, True
            if reply.status == 416 and _EMPTY.fullmatch(headers.get("Content-Range", "")):
                return 0, tag, True
            if reply.status != 200:
                raise DownloadError(f"unexpected status {reply.status}")
            return _length(headers), tag, False

    def _split(self, name: str, size: int | None, has_ranges: bool) -> list[ByteRange]:
        if size is None or not has_ranges:
            return [ByteRange(name, 0, size)]
        return [
            ByteRange(name, start, min(start + self._range_bytes, size))
            for start in range(0, size, self._range_bytes)
        ]

    # During: one range

    def _fetch(self, piece: ByteRange) -> None:
        self._retry(piece.name, lambda url: self._read(piece, url), lambda: piece.done)
        self._save([self._files[piece.name]])

    def _retry(
        self,
        name: str,
        attempt: Callable[[str], Any],
        progress: Callable[[], int] = lambda: 0,
    ) -> Any:
        """Retry until it succeeds, or fails `MAX_ATTEMPTS` times without progress."""
        failures, refused = 0, None
        while True:
            before, url = progress(), self._urls.url(name, refused)
            refused = None
            try:
                return attempt(url)
            except urllib.error.HTTPError as exc:
                exc.close()
                problem: Exception = exc
                refused = url if exc.code in _EXPIRED else None
                if refused is None and exc.code not in TRANSIENT:
                    raise DownloadError(
                        f"{name}: the server responded with status {exc.code}"
                    ) from exc
            except (OSError, http.client.HTTPException, _TransientError) as exc:
                problem = exc
            failures = 1 if progress() > before else failures + 1
            if failures >= MAX_ATTEMPTS or self._stop.wait(RETRY_S * 2 ** (failures - 1)):
                raise DownloadError(
                    f"{name}: {problem}", remedy="run the command again to resume the download"
                ) from problem

    def _read(self, piece: ByteRange, url: str) -> None:
        file = self._files[piece.name]
        headers = {}
        if file.has_ranges:
            headers["Range"] = f"bytes={piece.start + piece.done}-{(piece.stop or 0) - 1}"
            if file.tag is not None and not file.tag.startswith("W/"):
                headers["If-Range"] = file.tag
        else:
            self._bar.add(-piece.done)
            piece.done = 0
        # Its own handle: a thread that hangs in a read may outlive the download.
        with _opened(url, headers) as reply, file.path.open("r+b") as out:
            self._check_reply(file, piece, reply)
            out.seek(piece.start + piece.done)
            while piece.left != 0 and not self._stop.is_set():
                chunk = reply.read(min(READ_BYTES, piece.left or READ_BYTES))
                if not chunk:
                    break
                _write(out, chunk)
                piece.done += len(chunk)
                self._bar.add(len(chunk))
        if piece.left is None and not self._stop.is_set():
            file.size = piece.stop = piece.done  # the end of a chunked body
        if piece.left:
            raise _TransientError(f"the connection was closed with {size_text(piece.left)} missing")

    def _check_reply(self, file: RemoteFile, piece: ByteRange, reply: Any) -> None:
        """Check that the response is the requested range of the same file."""
        if not file.has_ranges:
            is_right = reply.status == 200 and _length(reply.headers) in (None, file.size)
        else:
            found = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
            is_right = (
                reply.status == 206
                and found is not None
                and int(found[1]) == piece.start + piece.done
                and int(found[3]) == file.size
            )
        if not is_right or reply.headers.get("ETag") not in (None, file.tag):
            raise DownloadError(
                f"{file.name} has changed on the server since the download started",
                remedy="run the command again with --no-resume",
            )

    # After

    def _save(self, files: list[RemoteFile]) -> None:
        """Flush files to disk, then save their state."""
        states = {file.name: file.state() for file in files}
        for file in files:
            with file.path.open("rb") as written:
                os.fsync(written.fileno())
        with self._lock:
            self._state.update(states)
            self._staging.save(self._state)

    def _checked(self) -> int:
        """The total size, after checking each file against the size on the server."""
        total = 0
        for file in self._files.values():
            size = file.path.stat().st_size
            if size != file.size:
                raise DownloadError(
                    f"{file.name} has {size} bytes, but {file.size} on the server",
                    remedy="run the command again with --no-resume",
                )
            total += size
        return total


def _length(headers: Any) -> int | None:
    """The Content-Length, if it is valid."""
    text = headers.get("Content-Length") or ""
    return int(text) if text.isdecimal() and text.isascii() else None


def _write(out: BinaryIO, chunk: bytes) -> None:
    try:
        out.write(chunk)
        out.flush()
    except OSError as exc:  # a problem of the disk: retrying would not help
        raise DownloadError(
            f"cannot write {out.name}: {exc.strerror}",
            remedy="free disk space, then run the command again to resume the download",
        ) from exc


def _resumed(
    name: str, saved: Any, size: int | None, tag: str | None, here: int
) -> list[ByteRange] | None:
    """The ranges of an earlier run, if they belong to the same file and fit its size `here`."""
    try:
        if tag is None or saved["size"] != size or saved["tag"] != tag:
            return None  # without an ETag the file may be another one
        pieces = [ByteRange(name, start, stop, done) for start, stop, done in saved["pieces"]]
        ends = [0, *(piece.stop for piece in pieces)]
        fits = [piece.start for piece in pieces] == ends[:-1] and ends[-1] == size
        is_sound = all(
            0 <= piece.done <= piece.stop - piece.start  # type: ignore[operator]  # caught below
            and (not piece.done or piece.start + piece.done <= here)
            for piece in pieces
        )
    except (TypeError, ValueError, KeyError):  # no state, or not ours
        return None
    return pieces if fits and is_sound else None


def _opened(url: str, headers: dict[str, str]) -> Any:
    """Open a URL, without credentials.

    Raises:
        DownloadError: The URL is not an HTTP URL.
    """
    if url.startswith(f"{SCHEME}://"):
        return opened(url, {"User-Agent": "tinsmith", **headers}, READ_TIMEOUT_S)
    if not url.startswith(("http://", "https://")):  # urllib would open files too
        raise DownloadError(f"unsupported URL scheme {url.partition(':')[0]!r:.40}")
    request = urllib.request.Request(url, headers={"User-Agent": "tinsmith", **headers})  # noqa: S310 - checked above
    try:
        return urllib.request.urlopen(request, timeout=READ_TIMEOUT_S)  # noqa: S310 - checked above
    except urllib.error.HTTPError as exc:
        if exc.code == 416:  # an empty file has no first byte
            return exc
        raise
