"""Finding a tokenizer's files, and reading them.

Looked for in this order: the directory itself, the cache of the Hugging Face hub on this machine,
the hub. Only the first two are used when the hub is not reachable, and neither asks it anything.
What is read is kept, one copy per source, and never changed again: `tokenization/tokenizer.py`
makes the handles that users hold and copies before it changes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.client.tokenization.names import TABLE_VARIABLE, TokenizerSource, directory_of
from tinsmith.client.tokenization.single_flight import SingleFlightCache
from tinsmith.errors import TokenizerError
from tinsmith.model_files.hub_cache import cached_snapshot

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

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
NO_LIMIT = int(1e30)  # what the hub's files hold where a model's length is not known
KEPT_TOKENIZERS = 32


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """What a tokenizer knows beside its vocabulary."""

    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    additional_special: tuple[str, ...] = ()
    chat_template: str | Mapping[str, str] | None = None
    model_max_length: int = NO_LIMIT
    padding_side: str = "right"
    truncation_side: str = "right"


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as its files describe it, shared by all of its handles."""

    source: TokenizerSource
    backend: Backend
    settings: TokenizerSettings


_kept: SingleFlightCache[TokenizerSource, TokenizerParts] = SingleFlightCache(KEPT_TOKENIZERS)


def load_parts(source: TokenizerSource) -> TokenizerParts:
    """The parts of a tokenizer, read once however many threads ask.

    Raises:
        TokenizerError: The files cannot be found or read.
        ImportError: The package `tokenizers` is not installed.
    """
    return _kept.get(source, lambda: read_parts(source, find_files(source)))


def forget_parts() -> None:
    """Let go of every tokenizer; those in use stay usable."""
    _kept.clear()


# Finding


def find_files(source: TokenizerSource) -> Path:
    """The directory with the tokenizer's files, fetched from the hub if it is nowhere here."""
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
    """The snapshot that the hub's cache holds of this revision, if it has a tokenizer."""
    snapshot = cached_snapshot(source.id, source.revision)
    return snapshot if (snapshot / TOKENIZER_FILE).is_file() else None


def in_model_cache(source: TokenizerSource) -> Path | None:
    """The folder of a base model that a service of this machine has fetched, with its tokenizer.

    Such a model may have come from elsewhere because the hub cannot be reached from here.
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
    remedy = f"put its files in a directory and name that in {TABLE_VARIABLE}"
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
    except (OSError, ValueError) as exc:  # what that library derives its errors from
        raise TokenizerError(
            f"tokenizer {source.id!r} is not on this machine, and the hub gave none: {exc}",
            remedy=remedy,
        ) from exc
    return Path(found)


# Reading


def read_parts(source: TokenizerSource, directory: Path) -> TokenizerParts:
    """Read a tokenizer from its directory."""
    config = _read_json(directory / CONFIG_FILE)
    # The older file fills gaps alone: where both speak, the configuration is the newer word.
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
    """A tokenizer of the small package, from the text of its file.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as exc:
        raise ImportError(
            "tokenizers need two small packages: pip install 'tinsmith[tokenizers]'"
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
    # A file may hold the settings of its last use. They are a caller's to choose, at each call.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: Backend, directory: Path, tokens: Mapping[str, Any]) -> None:
    """Add what the other files name and the tokenizer's own file does not.

    In the order of their ids: a new token gets the next free one.
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
    """A token's text; files hold it bare or in an object with its flags."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template or templates; files of their own come before the configuration."""
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
