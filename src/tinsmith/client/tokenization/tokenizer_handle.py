"""A user's handle on a shared tokenizer: its properties, and the methods that change it.

Methods that read use the shared parts, from any number of threads. A method that changes something
first copies the native tokenizer for this handle, so that no other handle sees the change and no
thread finds the native object borrowed. Threads that use the old copy keep it; the new one replaces
it when it is ready.

A handle is pickled as the name of its tokenizer and its changes, without the vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tinsmith.client.tokenization.names import TokenizerSource
from tinsmith.client.tokenization.tokenizer_files import (
    SPECIAL_NAMES,
    TokenizerParts,
    TokenizerSettings,
    load_parts,
    new_backend,
)
from tinsmith.errors import ValidationError, shown

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

Change: TypeAlias = "tuple[tuple[str | AddedToken, ...], bool]"


class _SpecialToken:
    """A named special token, such as `eos_token`; `None` if the model has none."""

    def __set_name__(self, owner: type[TokenizerHandle], name: str) -> None:
        self.name = name

    def __get__(
        self, tokenizer: TokenizerHandle | None, owner: type[TokenizerHandle]
    ) -> str | None:
        if tokenizer is None:
            return None
        return tokenizer._settings.special.get(self.name)

    def __set__(self, tokenizer: TokenizerHandle, token: object) -> None:
        tokenizer._name_special(self.name, None if token is None else str(token))


class _SpecialTokenId:
    """The id of a named special token; setting it selects another token."""

    def __set_name__(self, owner: type[TokenizerHandle], name: str) -> None:
        self.name = name.removesuffix("_id")

    def __get__(
        self, tokenizer: TokenizerHandle | None, owner: type[TokenizerHandle]
    ) -> int | None:
        if tokenizer is None:
            return None
        token = tokenizer._settings.special.get(self.name)
        return None if token is None else tokenizer.native().token_to_id(token)

    def __set__(self, tokenizer: TokenizerHandle, number: int | None) -> None:
        token = None if number is None else tokenizer.native().id_to_token(number)
        tokenizer._name_special(self.name, token)


class TokenizerHandle:
    """The properties of a tokenizer, and one user's changes to it.

    Args:
        parts: The shared parts, as read from the files.
        copy_per_thread: Give each thread a native tokenizer of its own, which takes memory for
            each. Reading the shared one from many threads is safe; this is for programs that
            change native settings meanwhile.
    """

    bos_token = _SpecialToken()
    eos_token = _SpecialToken()
    unk_token = _SpecialToken()
    sep_token = _SpecialToken()
    pad_token = _SpecialToken()
    cls_token = _SpecialToken()
    mask_token = _SpecialToken()
    bos_token_id = _SpecialTokenId()
    eos_token_id = _SpecialTokenId()
    unk_token_id = _SpecialTokenId()
    sep_token_id = _SpecialTokenId()
    pad_token_id = _SpecialTokenId()
    cls_token_id = _SpecialTokenId()
    mask_token_id = _SpecialTokenId()

    is_fast = True

    def __init__(self, parts: TokenizerParts, *, copy_per_thread: bool = False) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._settings = parts.settings
        self._changes: tuple[Change, ...] = ()
        self._copies = threading.local() if copy_per_thread else None

    # Properties

    @property
    def name_or_path(self) -> str:
        """The tokenizer's id on the hub, or its directory."""
        return self._parts.source.id

    @property
    def source(self) -> TokenizerSource:
        """The exact source of this tokenizer."""
        return self._parts.source

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones; `len` counts all."""
        return self.native().get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.native().get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return self.native().get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens and their ids."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id, as `AddedToken` objects."""
        return dict(sorted(self.native().get_added_tokens_decoder().items()))

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """The special tokens by name, such as `eos_token`; templates use these names."""
        known: dict[str, Any] = dict(self._settings.special)
        if self._settings.additional_special:
            known["additional_special_tokens"] = self.additional_special_tokens
        return known

    @property
    def additional_special_tokens(self) -> list[str]:
        """The special tokens without a name of their own."""
        return list(self._settings.additional_special)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens without duplicates, named ones first."""
        special = [self._settings.special.get(name) for name in SPECIAL_NAMES]
        each_once = dict.fromkeys([*special, *self.additional_special_tokens])
        return [token for token in each_once if token]

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        native = self.native()
        ids = (native.token_to_id(token) for token in self.all_special_tokens)
        return [number for number in ids if number is not None]

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template, or templates by name; setting it affects only this handle."""
        return self._settings.chat_template

    @chat_template.setter
    def chat_template(self, template: str | Mapping[str, str] | None) -> None:
        self._set(chat_template=template)

    @property
    def model_max_length(self) -> int:
        """The maximum sequence length of the model; a huge number if unknown."""
        return self._settings.model_max_length

    @model_max_length.setter
    def model_max_length(self, length: int) -> None:
        self._set(model_max_length=length)

    @property
    def padding_side(self) -> str:
        """The side to pad on: `left` or `right`."""
        return self._settings.padding_side

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        self._set(padding_side=_checked_side(side))

    @property
    def truncation_side(self) -> str:
        """The side to truncate on: `left` or `right`."""
        return self._settings.truncation_side

    @truncation_side.setter
    def truncation_side(self, side: str) -> None:
        self._set(truncation_side=_checked_side(side))

    # Changes, which affect only this handle

    def add_tokens(
        self,
        new_tokens: str | AddedToken | Iterable[str | AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Add tokens to the vocabulary; returns the number of new ones.

        Each call takes as long as loading the tokenizer, so add many tokens at once.
        """
        if isinstance(new_tokens, str) or not isinstance(new_tokens, Iterable):
            new_tokens = [new_tokens]
        tokens = tuple(new_tokens)
        with _changing.lock:
            before = len(self)
            backend = _copied(self._backend)
            _add_to(backend, (tokens, special_tokens))
            self._backend = backend
            self._changes += ((tokens, special_tokens),)
            return len(self) - before

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any]) -> int:
        """Set special tokens and add new ones to the vocabulary; returns the number of new ones.

        Args:
            special_tokens_dict: Tokens by name, such as `pad_token`; unnamed ones as a list under
                `additional_special_tokens`.
        """
        named = dict(special_tokens_dict)
        additional = [str(token) for token in named.pop("additional_special_tokens", [])]
        unknown = set(named) - set(SPECIAL_NAMES)
        if unknown:
            raise ValidationError(f"unknown special token: {', '.join(sorted(unknown))}")
        count = self.add_tokens([*named.values(), *additional], True)
        for name, token in named.items():
            self._name_special(name, str(token))
        if additional:
            both = dict.fromkeys([*self._settings.additional_special, *additional])
            self._set(additional_special=tuple(both))
        return count

    @property
    def backend_tokenizer(self) -> Backend:
        """A native tokenizer that belongs to this handle and may be changed.

        With `copy_per_thread` it belongs to this thread. Otherwise it must not be changed while
        other threads use this handle. Changes made to it directly are not pickled.
        """
        if self._copies is not None:
            return self.native()
        with _changing.lock:
            if self._backend is self._parts.backend:
                self._backend = _copied(self._backend)
            return self._backend

    def native(self) -> Backend:
        """The native tokenizer that this thread uses for reading."""
        if self._copies is None:
            return self._backend
        original, copy = getattr(self._copies, "pair", (None, None))
        if copy is None or original is not self._backend:
            original, copy = self._backend, _copied(self._backend)
            self._copies.pair = (original, copy)
        return copy

    def _set(self, **changes: Any) -> None:
        self._settings = dataclasses.replace(self._settings, **changes)

    def _name_special(self, name: str, token: str | None) -> None:
        special = {key: value for key, value in self._settings.special.items() if key != name}
        self._set(special=special if token is None else {**special, name: token})

    def __reduce__(self) -> tuple[Any, ...]:
        settings = None if self._settings is self._parts.settings else self._settings
        is_per_thread = self._copies is not None
        return _restored, (type(self), self._parts.source, settings, self._changes, is_per_thread)


class _Changing:
    """One lock for all changes: they are rare, and a forked child must replace only this one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def renew(self) -> None:
        self.lock = threading.RLock()


_changing = _Changing()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_changing.renew)


def _restored(
    cls: type[TokenizerHandle],
    source: TokenizerSource,
    settings: TokenizerSettings | None,
    changes: tuple[Change, ...],
    copy_per_thread: bool,
) -> TokenizerHandle:
    """Restore a pickled handle, on the shared tokenizer of this process."""
    tokenizer = cls(load_parts(source), copy_per_thread=copy_per_thread)
    if changes:
        backend = _copied(tokenizer._backend)
        for change in changes:
            _add_to(backend, change)
        tokenizer._backend, tokenizer._changes = backend, changes
    if settings is not None:
        tokenizer._settings = settings
    return tokenizer


def _add_to(backend: Backend, change: Change) -> None:
    tokens, are_special = change
    if are_special:
        backend.add_special_tokens(list(tokens))
    else:
        backend.add_tokens(list(tokens))


def _copied(backend: Backend) -> Backend:
    return new_backend(backend.to_str())


def _checked_side(side: str) -> str:
    if side not in {"left", "right"}:
        raise ValidationError(f"a side must be left or right, not {shown(side)}")
    return side
