"""Files from plain addresses: in pieces, over several connections, resumed and checked.

Each file is asked for its size first. Where the server gives parts of a file, it is cut into
pieces that are fetched beside each other, and that a later run goes on with; where it does not,
the file is fetched in one piece, from its beginning. A connection that breaks is made again from
the byte where it broke. What arrives must be as long as the server said.

Uses threads and the standard library's client: these addresses are signed, belong to other
servers, and get no credential of ours.
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
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, BinaryIO

from tinsmith.cli import unix_http
from tinsmith.cli.failures import CommandError
from tinsmith.cli.staging import Staging
from tinsmith.observe.progress import Progress
from tinsmith.observe.sizes import size_text

PIECE_BYTES = 16 * 1024 * 1024
READ_BYTES = 256 * 1024
READ_TIMEOUT_S = 30.0
MOST_ATTEMPTS = 5
"""How often a piece is tried without a byte of progress."""
RETRY_S = 0.5
SIGN_BEFORE = datetime.timedelta(minutes=5)
STOP_WAIT_S = 2.0

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_EMPTY = re.compile(r"bytes \*/0")
_EXPIRED = frozenset({401, 403, 410})
_PASSING = frozenset({408, 429, 500, 502, 503, 504})

Sign = Callable[[], tuple[dict[str, str], datetime.datetime | None]]
"""Asks for addresses: by file name, and until when they are good."""


class DownloadError(CommandError):
    """A file could not be fetched whole."""


class _PassingError(Exception):
    """What happened may not happen again."""


class Addresses:
    """Where the files are; asked for anew before they expire, and when one was refused."""

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
        """A file's address now; another one than `refused`, if that can be."""
        with self._lock:
            now = datetime.datetime.now(datetime.UTC)
            is_old = self._expires is not None and now >= self._expires - SIGN_BEFORE
            if is_old or self._urls.get(name) == refused:
                self._urls, self._expires = self._signed()
            if name not in self._urls:
                raise DownloadError(f"the service no longer has an address for {name}")
            return self._urls[name]


@dataclasses.dataclass
class Piece:
    """A part of a file and how much of it is here; `stop` None means to its unknown end."""

    name: str
    start: int
    stop: int | None
    done: int = 0

    @property
    def left(self) -> int | None:
        """How many bytes are missing, where that is known."""
        return None if self.stop is None else self.stop - self.start - self.done


@dataclasses.dataclass
class File:
    """What a server says of a file, and its pieces."""

    name: str
    size: int | None
    tag: str | None
    gives_parts: bool
    path: pathlib.Path
    pieces: list[Piece]

    def noted(self) -> dict[str, Any]:
        """What a later run needs in order to go on."""
        pieces = [[piece.start, piece.stop, piece.done] for piece in self.pieces]
        return {"size": self.size, "tag": self.tag, "pieces": pieces}


class Fetch:
    """Fetches the files of one download into its folder.

    Args:
        addresses: Where the files are.
        staging: Where they go.
        bar: Told of every byte.
        connections: How many to use at once.
        piece_bytes: How large a piece is.
    """

    def __init__(
        self,
        addresses: Addresses,
        staging: Staging,
        bar: Progress,
        *,
        connections: int = 8,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._addresses = addresses
        self._staging = staging
        self._bar = bar
        self._connections = connections
        self._piece_bytes = piece_bytes
        self._files: dict[str, File] = {}
        self._noted: dict[str, Any] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> int:
        """Fetch everything; returns how many bytes there are in all.

        Raises:
            DownloadError: A file could not be fetched whole. What is here is kept.
        """
        paths = {name: self._staging.path_of(name) for name in self._addresses.names}
        self._staging.keep_only(self._addresses.names)
        self._noted = self._staging.load()
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
            self._note(list(self._files.values()))

    def _each(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks on as many threads as there may be connections; raises the first error."""
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
            except BaseException as exc:  # noqa: BLE001 - raised again in the command's thread
                ended.put(exc)
            else:
                ended.put(None)

        # Daemons: one that hangs in a read must not keep Ctrl-C from ending the process.
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

    # Before: what there is to fetch

    def _open(self, name: str, path: pathlib.Path) -> None:
        """Ask for a file's size, and find out what an earlier run left of it."""
        size, tag, gives_parts = self._tried(name, self._asked)
        path.touch()
        noted = self._noted.get(name) if gives_parts else None
        pieces = _resumed(name, noted, size, tag, path.stat().st_size)
        if pieces is None:
            path.write_bytes(b"")
            pieces = self._cut(name, size, gives_parts)
        with self._lock:
            self._files[name] = File(name, size, tag, gives_parts, path, pieces)

    def _asked(self, url: str) -> tuple[int | None, str | None, bool]:
        """The size of a file, its tag, and whether the server gives parts of it."""
        with _opened(url, {"Range": "bytes=0-0"}) as reply:
            headers = reply.headers
            tag = headers.get("ETag")
            found = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if reply.status == 206 and found is not None:
                return int(found[3]), tag, True
            if reply.status == 416 and _EMPTY.fullmatch(headers.get("Content-Range", "")):
                return 0, tag, True
            if reply.status != 200:
                raise DownloadError(f"a file was answered with status {reply.status}")
            return _length(headers), tag, False

    def _cut(self, name: str, size: int | None, gives_parts: bool) -> list[Piece]:
        if size is None or not gives_parts:
            return [Piece(name, 0, size)]
        return [
            Piece(name, start, min(start + self._piece_bytes, size))
            for start in range(0, size, self._piece_bytes)
        ]

    # During: one piece

    def _fetch(self, piece: Piece) -> None:
        self._tried(piece.name, lambda url: self._read(piece, url), lambda: piece.done)
        self._note([self._files[piece.name]])

    def _tried(
        self,
        name: str,
        attempt: Callable[[str], Any],
        progress: Callable[[], int] = lambda: 0,
    ) -> Any:
        """Try until it works, or until it failed so often without a byte of progress."""
        failures, refused = 0, None
        while True:
            before, url = progress(), self._addresses.url(name, refused)
            refused = None
            try:
                return attempt(url)
            except urllib.error.HTTPError as exc:
                exc.close()
                problem: Exception = exc
                refused = url if exc.code in _EXPIRED else None
                if refused is None and exc.code not in _PASSING:
                    raise DownloadError(f"{name}: the server answered {exc.code}") from exc
            except (OSError, http.client.HTTPException, _PassingError) as exc:
                problem = exc
            failures = 1 if progress() > before else failures + 1
            if failures >= MOST_ATTEMPTS or self._stop.wait(RETRY_S * 2 ** (failures - 1)):
                raise DownloadError(
                    f"{name}: {problem}", remedy="run the command again to go on from here"
                ) from problem

    def _read(self, piece: Piece, url: str) -> None:
        file = self._files[piece.name]
        headers = {}
        if file.gives_parts:
            headers["Range"] = f"bytes={piece.start + piece.done}-{(piece.stop or 0) - 1}"
            if file.tag is not None and not file.tag.startswith("W/"):
                headers["If-Range"] = file.tag
        else:
            self._bar.add(-piece.done)
            piece.done = 0
        # A handle of its own: a thread that hangs in a read may outlive the download.
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
            file.size = piece.stop = piece.done  # the server's last chunk has said so
        if piece.left:
            raise _PassingError(f"the connection ended {size_text(piece.left)} too early")

    def _check_reply(self, file: File, piece: Piece, reply: Any) -> None:
        """Refuse what is not the part that was asked for, of the file that was begun."""
        if not file.gives_parts:
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
                f"{file.name} is another file now than when its download began",
                remedy="run the command again with --no-resume",
            )

    # After

    def _note(self, files: list[File]) -> None:
        """Put what has come of some files onto the disk, and then note that it is there."""
        notes = {file.name: file.noted() for file in files}
        for file in files:
            with file.path.open("rb") as written:
                os.fsync(written.fileno())
        with self._lock:
            self._noted.update(notes)
            self._staging.save(self._noted)

    def _checked(self) -> int:
        """The size of everything, if every file is as long as its server said."""
        total = 0
        for file in self._files.values():
            size = file.path.stat().st_size
            if size != file.size:
                raise DownloadError(
                    f"{file.name} has {size} bytes here, and {file.size} on the server",
                    remedy="run the command again with --no-resume",
                )
            total += size
        return total


def _length(headers: Any) -> int | None:
    """How long a reply says that it is, if it does."""
    text = headers.get("Content-Length") or ""
    return int(text) if text.isdecimal() and text.isascii() else None


def _write(out: BinaryIO, chunk: bytes) -> None:
    try:
        out.write(chunk)
        out.flush()
    except OSError as exc:  # not the network's fault, and not better at the next try
        raise DownloadError(
            f"{out.name} cannot be written: {exc.strerror}",
            remedy="make room, and run the command again to go on from here",
        ) from exc


def _resumed(
    name: str, noted: Any, size: int | None, tag: str | None, here: int
) -> list[Piece] | None:
    """The pieces that an earlier run left, if they are of the same file and `here` is enough."""
    try:
        if tag is None or noted["size"] != size or noted["tag"] != tag:
            return None  # without a tag nobody knows whether it is the same file
        pieces = [Piece(name, start, stop, done) for start, stop, done in noted["pieces"]]
        ends = [0, *(piece.stop for piece in pieces)]
        fits = [piece.start for piece in pieces] == ends[:-1] and ends[-1] == size
        is_sound = all(
            0 <= piece.done <= piece.stop - piece.start  # type: ignore[operator]  # caught below
            and (not piece.done or piece.start + piece.done <= here)
            for piece in pieces
        )
    except (TypeError, ValueError, KeyError):  # nothing was noted, or not by us
        return None
    return pieces if fits and is_sound else None


def _opened(url: str, headers: dict[str, str]) -> Any:
    """Ask for a file, without a credential.

    Raises:
        DownloadError: The address is not one of HTTP.
    """
    if url.startswith(f"{unix_http.SCHEME}://"):
        return unix_http.opened(url, {"User-Agent": "tinsmith", **headers}, READ_TIMEOUT_S)
    if not url.startswith(("http://", "https://")):  # urllib would open files too
        raise DownloadError(f"{url.partition(':')[0]!r:.40} addresses are not fetched")
    request = urllib.request.Request(url, headers={"User-Agent": "tinsmith", **headers})  # noqa: S310 - checked above
    try:
        return urllib.request.urlopen(request, timeout=READ_TIMEOUT_S)  # noqa: S310 - checked above
    except urllib.error.HTTPError as exc:
        if exc.code == 416:  # an empty file has no first byte
            return exc
        raise
