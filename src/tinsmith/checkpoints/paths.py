"""How saved weights are named, and where a name leads to inside a store.

A name comes from a client, and becomes part of a file's path. It is checked here, once, and what
has passed may be used with any store: it stays inside, means one place only, and fits every file
system and every URL.

What a scheduler writes under a name goes to a place of its own each time, its *edition*: the epoch
of the scheduler's lease (`ledger/base.py`) and a unique number. So a scheduler that
was replaced by a newer one, and does not know it yet, replaces no files that the newer one's
entries name. Clients know the name; the ledger says which edition it stands for.
"""

from __future__ import annotations

import glob
import re
import secrets
import urllib.parse
from typing import Self

import msgspec

from tinsmith.errors import ValidationError, shown

LONGEST_NAME = 128
"""Of a run's id and of a checkpoint's name, in characters."""
LONGEST_ENCODED = 240
"""The same in a file's name, in bytes. File systems end at 255."""

KINDS = ("weights", "sampler_weights", "external_weights")
"""Kinds of checkpoints that a client can name."""
SNAPSHOTS = "snapshots"
"""States of models, which the scheduler keeps for itself. The position is the name."""
SAMPLERS = "samplers"
"""Weights of samplers that were made without a name; the sampler stands in place of the run."""
UPLOADS = "uploads"
"""Files of uploads that are not finished; the upload stands in place of the run."""

_INTERNAL = (SNAPSHOTS, SAMPLERS, UPLOADS)
_SCHEME = "tinker://"
_LARGEST_POSITION = 2**63 - 1
# Their meaning in a path, in a URL or in the encoding below would make two names of one.
_FORBIDDEN = frozenset("/\\%?#")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_KEPT_AS_IT_IS = "._-:=@+,~"  # with letters and digits
_EDITIONS = "editions"
_MARK = "#"
"""Between a path and its edition; no name holds it."""
_TOKEN = re.compile(r"[0-9a-f]{16}")
"""What an uploaded file is called: each is another, also if it is sent again."""
_EDITION = re.compile(r"([1-9][0-9]{0,18})-[0-9a-f]{16}")


class CheckpointPath(msgspec.Struct, frozen=True, order=True):
    """What a checkpoint is called: its run, its kind, its name. Checked when made.

    `str()` gives the form that `parse` reads: `tinker://<run>/<kind>/<name>`, and for what the
    service keeps for itself `snapshots/<model>/<position>`, `samplers/<sampler>/weights` and
    `uploads/<upload>/<token>`; with an edition, `#<edition>` behind it.
    """

    run_id: str
    kind: str
    name: str
    edition: str = ""
    """Empty for what a client means by the name, and for files that have no edition: those from
    before there were any, imports and copies."""

    def __post_init__(self) -> None:
        _check("run id", self.run_id)
        if self.kind == SNAPSHOTS:
            _check_position(self.name)
        elif self.kind == UPLOADS:
            _check_token(self.name)
        elif self.kind in KINDS or (self.kind == SAMPLERS and self.name == KINDS[0]):
            _check("name", self.name)
        else:
            raise ValidationError(
                f"kind is {shown(self.kind)}", remedy=f"known kinds are {', '.join(KINDS)}"
            )
        if self.edition and not _EDITION.fullmatch(self.edition):
            raise ValidationError(
                f"invalid edition {shown(self.edition)}: expected <epoch>-<16 hex digits>",
                remedy="leave it out",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str()` gives.

        Raises:
            ValidationError: It has another form, or a part of it is not allowed.
        """
        before, mark, edition = text.partition(_MARK)
        parts = before.split("/")
        if len(parts) == 3 and parts[0] in _INTERNAL and bool(mark) == bool(edition):
            return cls(parts[1], parts[0], parts[2], edition)
        parts = before.removeprefix(_SCHEME).split("/")
        is_named = before.startswith(_SCHEME) and len(parts) == 3 and parts[1] not in _INTERNAL
        if not is_named or bool(mark) != bool(edition):
            raise ValidationError(
                f"invalid checkpoint path {shown(text, 200)}",
                remedy="expected tinker://<training run>/<kind>/<name>",
            )
        return cls(parts[0], parts[1], parts[2], edition)

    @classmethod
    def of(cls, run_id: str, checkpoint_id: str) -> Self:
        """A run's checkpoint by the id that listings show: `<kind>/<name>`."""
        return cls.parse(f"{_SCHEME}{run_id}/{checkpoint_id}")

    @classmethod
    def snapshot(cls, model_id: str, position: int) -> Self:
        """The state of a model before the command with this number."""
        return cls(model_id, SNAPSHOTS, str(position))

    @classmethod
    def sampler(cls, sampler_id: str) -> Self:
        """The weights that a sampler was made with, if they have no name of their own."""
        return cls(sampler_id, SAMPLERS, KINDS[0])

    @classmethod
    def uploaded(cls, upload_id: str) -> Self:
        """A new place for a file of an upload: nobody has written there."""
        return cls(upload_id, UPLOADS, secrets.token_hex(8))

    def in_edition(self, edition: str) -> Self:
        """An edition of it."""
        return msgspec.structs.replace(self, edition=edition)

    def new_edition(self, epoch: int | None) -> Self:
        """Where a scheduler writes it now: nobody has written there. Without an epoch, itself."""
        return self if epoch is None else self.in_edition(f"{epoch}-{secrets.token_hex(8)}")

    @property
    def epoch(self) -> int:
        """Of the scheduler that wrote this edition; 0 without one."""
        match = _EDITION.fullmatch(self.edition)
        return int(match[1]) if match else 0

    @property
    def checkpoint_id(self) -> str:
        """The kind and the name, as listings show them."""
        return f"{self.kind}/{self.name}"

    @property
    def is_internal(self) -> bool:
        """Whether the service keeps it for itself, and no client can name it."""
        return self.kind in _INTERNAL

    @property
    def position(self) -> int:
        """Of a snapshot: the number of the first command that it does not hold."""
        assert self.kind == SNAPSHOTS
        return int(self.name)

    @property
    def parts(self) -> tuple[str, ...]:
        """Where it is inside a store, as names of folders."""
        parts: tuple[str, ...] = ("runs", _encoded(self.run_id), self.kind, _encoded(self.name))
        if self.is_internal:
            parts = (self.kind, _encoded(self.run_id), self.name)
        return (_EDITIONS, *parts, self.edition) if self.edition else parts

    @classmethod
    def from_parts(cls, parts: tuple[str, ...]) -> Self | None:
        """The path that leads to this place; None if no path does."""
        try:
            decoded = [urllib.parse.unquote(part, errors="strict") for part in parts]
            edition = ""
            if decoded[:1] == [_EDITIONS]:
                edition, decoded = decoded[-1], decoded[1:-1]
            if len(decoded) == 3:
                found = cls(decoded[1], decoded[0], decoded[2], edition)
            elif len(decoded) == 4:
                found = cls(decoded[1], decoded[2], decoded[3], edition)
            else:
                return None
        except ValueError:
            return None
        return found if found.parts == parts else None

    def __str__(self) -> str:
        edition = f"{_MARK}{self.edition}" if self.edition else ""
        if self.is_internal:
            return f"{self.kind}/{self.run_id}/{self.name}{edition}"
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}{edition}"


def places(run_id: str | None = None) -> tuple[str, ...]:
    """Where checkpoints are inside a store, of one run or of all, as patterns of folders."""
    run = "*" if run_id is None else glob.escape(_encoded(run_id))
    named = (f"runs/{run}/*/*", *(f"{kind}/{run}/*" for kind in _INTERNAL))
    return (*named, *(f"{_EDITIONS}/{place}/*" for place in named))


def folders(run_id: str | None = None) -> tuple[str, ...]:
    """The folders of a store below which all checkpoints are, of one run or of all."""
    top = ("runs", *_INTERNAL)
    if run_id is None:
        return (*top, _EDITIONS)
    of_run = tuple(f"{folder}/{_encoded(run_id)}" for folder in top)
    return (*of_run, *(f"{_EDITIONS}/{folder}" for folder in of_run))


def _check(field: str, text: str) -> None:
    if not 1 <= len(text) <= LONGEST_NAME:
        raise ValidationError(f"{field} has {len(text)} characters; expected 1 to {LONGEST_NAME}")
    if not text.isprintable() or _FORBIDDEN & set(text):
        raise ValidationError(
            f"{field} {shown(text)} contains a character that is not allowed",
            remedy=f"use printable characters other than {' '.join(sorted(_FORBIDDEN))}",
        )
    if text != text.strip(". ") or _DEVICE.fullmatch(text):
        raise ValidationError(
            f"{field} {shown(text)} is reserved by file systems",
            remedy="do not start or end it with a dot or a space, or use the name of a device",
        )
    if len(_encoded(text)) > LONGEST_ENCODED:
        raise ValidationError(
            f"{field} takes {len(_encoded(text))} bytes as a file name; "
            f"the maximum is {LONGEST_ENCODED}",
            remedy="use fewer characters, or plain letters",
        )


def _check_position(text: str) -> None:
    if not (text.isascii() and text.isdigit() and text == str(int(text[:20]))):
        raise ValidationError(f"position is {shown(text)}; expected a number of at least 0")
    if int(text) > _LARGEST_POSITION:
        raise ValidationError(f"position is {text}; the maximum is {_LARGEST_POSITION}")


def _check_token(text: str) -> None:
    if not _TOKEN.fullmatch(text):
        raise ValidationError(f"invalid token {shown(text)}: expected 16 hex digits")


def _encoded(text: str) -> str:
    """The text as a file's name in ASCII; two texts never have the same."""
    return urllib.parse.quote(text, safe=_KEPT_AS_IT_IS)
