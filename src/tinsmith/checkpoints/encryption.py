"""Files encrypted for others with age, so that only holders of their private keys can read them.

Exported weights are encrypted one by one, each under its name with `.age` behind it. `pyrage` is
loaded when something is to be encrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.disk import disk_errors
from tinsmith.errors import ValidationError

SUFFIX = ".age"
RECIPIENTS_MAX = 10
RECIPIENT_MAX = 4096
"""Of one public key, in characters; long RSA keys have about 1500."""
_FIELD = "age_encryption_recipients"


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse public keys that nothing can be encrypted for.

    Raises:
        ValidationError: There are none or too many, or one is neither an age nor an SSH key.
    """
    _parsed(recipients)


def encrypt_files(folder: Path, recipients: Sequence[str]) -> None:
    """Replace every file of a folder by its encrypted form.

    Args:
        folder: Holds plain files only, such as that of a `Staging`.
        recipients: Public keys, of age (`age1…`) or SSH (`ssh-ed25519 …`, `ssh-rsa …`); each of
            their holders can read the files.

    Raises:
        ValidationError: See `check_recipients`.
        StorageFullError: The disk is full. Some files may have been replaced.
    """
    import pyrage

    parsed = _parsed(recipients)
    with disk_errors(f"{folder} cannot be encrypted"):
        for file in sorted(folder.iterdir()):
            # Not `encrypt_file`: it keeps every other Python thread waiting until it is through.
            with file.open("rb") as plain, (folder / f"{file.name}{SUFFIX}").open("xb") as out:
                pyrage.encrypt_io(plain, out, parsed)
            file.unlink()


def _parsed(recipients: Sequence[str]) -> list[Any]:
    if not 1 <= len(recipients) <= RECIPIENTS_MAX:
        raise ValidationError(
            f"{_FIELD} has {len(recipients)} keys; expected 1 to {RECIPIENTS_MAX}"
        )
    try:
        import pyrage
    except ImportError as exc:
        raise ValidationError(
            f"{_FIELD} requires the package pyrage on the server",
            remedy="run `pip install 'tinsmith[server]'` there",
        ) from exc
    parsed: list[Any] = []
    for place, text in enumerate(recipients):
        if len(text) > RECIPIENT_MAX:
            raise ValidationError(
                f"{_FIELD}[{place}] has {len(text)} characters; the maximum is {RECIPIENT_MAX}"
            )
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            parsed.append(kind.Recipient.from_str(text.strip()))
        except (pyrage.RecipientError, UnicodeError) as exc:
            # The text is not shown: somebody may have pasted the private key.
            raise ValidationError(
                f"{_FIELD}[{place}] is not a valid age public key: {exc}",
                remedy="pass keys that start with age1, ssh-ed25519 or ssh-rsa",
            ) from exc
    return parsed
