"""Find and read a tokenizer's files.

The files are looked up in the directory itself, in the caches on this machine, and then on the hub.
Only the last step uses the network. Tokenizers are cached, one copy per source, and never modified:
the handles of `tokenization/tokenizer.py` copy before they change anything.

`SingleFlightCache` computes each missing value once, however many threads ask at the same time. The
first caller computes the value and the others wait for it; different keys do not wait for each
other. A failure is raised for all waiting callers and is not cached: the next call tries again.

There is no lock that a forked child could inherit locked: each step is one atomic operation on a
dictionary, and flights are keyed by process id, so a child never waits for its parent's.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.client.tokenization.names import TABLE_VARIABLE, TokenizerSource, directory_of
from tinsmith.engine.files.hub_cache import cached_snapshot
from tinsmith.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlightCache(Generic[K, V]):
    """Keeps the `most` most recently computed values."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, V] = {}
        self._flights: dict[tuple[int, K], Future[V]] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`; calls `make` if it is missing and no other thread is computing it.

        Raises:
            Exception: The error that `make` raised, in this or another thread.
        """
        while True:
            if key in self._values:
                return self._values[key]
            mine: Future[V] = Future()
            flight = self._flights.setdefault((os.getpid(), key), mine)
            if flight is mine:
                return self._lead(key, mine, make)
            try:
                return flight.result()
            except CancelledError:
                continue  # that thread was interrupted, not `make`

    def clear(self) -> None:
        """Drop every value; values being computed are still delivered."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def _lead(self, key: K, flight: Future[V], make: Callable[[], V]) -> V:
        try:
            # Another thread may have finished between our lookup and our registration.
            value = self._values[key] if key in self._values else make()
        except Exception as exc:
            self._land(key)
            flight.set_exception(exc)
            raise
        except BaseException:
            self._land(key)
            flight.cancel()
            raise
        self._values[key] = value
        self._land(key)
        flight.set_result(value)
        self._trim()
        return value

    def _land(self, key: K) -> None:
        del self._flights[os.getpid(), key]

    def _trim(self) -> None:
        for oldest in list(self._values)[: -self._most]:
            self._values.pop(oldest, None)


TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
WANTED_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
NO_LIMIT = int(1e30)  # the value in the hub's files for an unknown length
KEPT_TOKENIZERS = 32


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a tokenizer, apart from its vocabulary."""

    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    additional_special: tuple[str, ...] = ()
    chat_template: str | Mapping[str, str] | None = None
    model_max_length: int = NO_LIMIT
    padding_side: str = "right"
    truncation_side: str = "right"


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as read from its files, shared by all of its handles."""

    source: TokenizerSource
    backend: Backend
    settings: TokenizerSettings


_kept: SingleFlightCache[TokenizerSource, TokenizerParts] = SingleFlightCache(KEPT_TOKENIZERS)


def load_parts(source: TokenizerSource) -> TokenizerParts:
    """The cached parts of a tokenizer; read once, however many threads ask.

    Raises:
        TokenizerError: The files cannot be found or read.
        ImportError: The package `tokenizers` is not installed.
    """
    return _kept.get(source, lambda: read_parts(source, find_files(source)))


def forget_parts() -> None:
    """Clear the cache; tokenizers in use stay valid."""
    _kept.clear()


# Finding


def find_files(source: TokenizerSource) -> Path:
    """The directory with the tokenizer's files; downloads them if they are not on this machine."""
    local = directory_of(source.id)
    if local is None and source.id.startswith(("/", ".", "~")):
        raise TokenizerError(f"there is no tokenizer in the directory {source.id!r}")
    directory = local or in_hub_cache(source) or in_model_cache(source) or _from_hub(source)
    if not (directory / TOKENIZER_FILE).is_file():
        raise TokenizerError(
            f"tokenizer {source.id!r} has no {TOKENIZER_FILE} in {directory}",
            remedy='ask for kind="transformers", which reads older formats',
        )
    return directory


def in_hub_cache(source: TokenizerSource) -> Path | None:
    """The snapshot of this revision in the hub's cache, if it contains a tokenizer."""
    snapshot = cached_snapshot(source.id, source.revision)
    return snapshot if (snapshot / TOKENIZER_FILE).is_file() else None


def in_model_cache(source: TokenizerSource) -> Path | None:
    """The folder of a base model that a service on this machine downloaded, with its tokenizer.

    The model may have come from another source because the hub is not reachable from here.
    """
    parts = source.id.split("/")
    if source.revision is not None or not all(part.strip(".") for part in parts):
        return None
    for home in (os.environ.get("TINSMITH_HOME"), "~/.tinsmith"):
        folder = Path(home or "~/.tinsmith").expanduser().joinpath("models", *parts)
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    return None


def _from_hub(source: TokenizerSource) -> Path:
    remedy = f"put its files in a directory and map the name to it in {TABLE_VARIABLE}"
    try:
        import huggingface_hub
    except ImportError as exc:
        raise TokenizerError(
            f"tokenizer {source.id!r} is not on this machine", remedy=remedy
        ) from exc
    try:
        found = huggingface_hub.snapshot_download(
            source.id, revision=source.revision, allow_patterns=list(WANTED_FILES)
        )
    except (OSError, ValueError) as exc:  # the base classes of that library's errors
        raise TokenizerError(
            f"tokenizer {source.id!r} is not on this machine, "
            f"and loading it from the Hub failed: {exc}",
            remedy=remedy,
        ) from exc
    return Path(found)


# Reading


def read_parts(source: TokenizerSource, directory: Path) -> TokenizerParts:
    """Read a tokenizer from its directory."""
    config = _read_json(directory / CONFIG_FILE)
    # `special_tokens_map.json` is the older file: the configuration takes precedence.
    tokens = {**_read_json(directory / "special_tokens_map.json"), **config}
    settings = TokenizerSettings(
        special={name: _text(tokens[name]) for name in SPECIAL_NAMES if tokens.get(name)},
        additional_special=tuple(_text(token) for token in _additional(tokens)),
        chat_template=_chat_template(directory, config),
        model_max_length=int(config.get("model_max_length") or NO_LIMIT),
        padding_side=config.get("padding_side") or "right",
        truncation_side=config.get("truncation_side") or "right",
    )
    backend = _read_backend(directory / TOKENIZER_FILE)
    _add_missing_tokens(backend, directory, tokens)
    return TokenizerParts(source, backend, settings)


def new_backend(text: str) -> Backend:
    """Create a tokenizer of the `tokenizers` package from the text of its file.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as exc:
        raise ImportError(
            "tokenizers require two small packages: `pip install 'tinsmith[tokenizers]'`"
        ) from exc
    backend: Backend = Backend.from_str(text)
    return backend


def _read_backend(path: Path) -> Backend:
    text = path.read_text(encoding="utf-8")
    try:
        backend = new_backend(text)
    except ImportError:
        raise
    except Exception as exc:  # that package raises nothing narrower
        raise TokenizerError(f"{path} cannot be read: {exc}") from exc
    # A file may contain the settings of its last use; callers choose these per call.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: Backend, directory: Path, tokens: Mapping[str, Any]) -> None:
    """Add tokens that other files list but the tokenizer's own file does not.

    They are added in the order of their ids, since a new token gets the next free id.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = tokens.get("added_tokens_decoder") or {}
    wanted = [listed[number] for number in sorted(listed, key=int)]
    older = _read_json(directory / "added_tokens.json")
    wanted += sorted(older, key=older.__getitem__)
    named = [tokens[name] for name in SPECIAL_NAMES if tokens.get(name)]
    for token in wanted:
        _add(backend, token, known, is_special=False)
    for token in [*named, *_additional(tokens)]:
        _add(backend, token, known, is_special=True)


def _add(backend: Backend, token: Any, known: set[str], *, is_special: bool) -> None:
    if _text(token) in known:
        return
    known.add(_text(token))
    added = _added_token(token, is_special=is_special)
    if added.special:
        backend.add_special_tokens([added])
    else:
        backend.add_tokens([added])


def _added_token(token: Any, *, is_special: bool) -> AddedToken:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=is_special, normalized=not is_special)
    flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    special = bool(token.get("special", is_special))
    normalized = bool(token.get("normalized", not special))
    return AddedToken(token["content"], special=special, normalized=normalized, **flags)


def _additional(tokens: Mapping[str, Any]) -> Iterator[Any]:
    yield from tokens.get("additional_special_tokens") or []
    extra = tokens.get("extra_special_tokens") or []
    yield from extra.values() if isinstance(extra, Mapping) else extra


def _text(token: Any) -> str:
    """The text of a token, which files store plainly or in an object with its flags."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template or templates; separate files take precedence over the configuration."""
    found = config.get("chat_template")
    named = {each["name"]: each["template"] for each in found} if isinstance(found, list) else {}
    if isinstance(found, str):
        named["default"] = found
    default = directory / "chat_template.jinja"
    if default.is_file():
        named = {"default": default.read_text(encoding="utf-8")}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    return named.get("default") if set(named) <= {"default"} else named


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise TokenizerError(f"{path} cannot be read: {exc}") from exc
    return content if isinstance(content, dict) else {}
