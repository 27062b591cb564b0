"""Models of the Hugging Face hub, by `huggingface_hub` where it is installed.

Its own settings hold: the endpoint, the token, proxies, offline mode. What is fetched is the files
at the top of the repository that a model needs and no program. Each is compared with the digest
that the hub has for it. A download that was broken off is gone on with.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.errors import (
    BaseModelDamagedError,
    BaseModelError,
    BaseModelFormatError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
)
from tinsmith.model.weight_files import refuse_quantised
from tinsmith.model_files.base import Tell, check_room, is_full, telling_growth

_WANTED = re.compile(
    r"(?!consolidated)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json|jinja|txt|model)"
    r"|LICENSE(\.[a-z]+)?|NOTICE(\.[a-z]+)?|README\.md"
)
_SPARE_BYTES = 16 << 20
_ASK_TIMEOUT_S = 20.0


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """One repository of the hub."""

    name: str
    revision: str | None = None
    """A branch, tag or commit; None is the newest of the main branch."""

    @property
    def kind(self) -> str:
        """See `Source`."""
        return "hub"

    @property
    def caution(self) -> str:
        """See `Source`."""
        return "as it was published"

    def fetch(self, work: Path, tell: Tell) -> tuple[Path, dict[str, str]]:
        """See `Source`."""
        try:
            import huggingface_hub
        except ImportError as exc:
            raise BaseModelUnavailableError(
                "huggingface_hub is not installed",
                remedy="pip install huggingface_hub",
            ) from exc
        tell("asking the hub", 0, None)
        try:
            info = huggingface_hub.HfApi().model_info(
                self.name, revision=self.revision, files_metadata=True, timeout=_ASK_TIMEOUT_S
            )
            # Before gigabytes are fetched: the hub knows what `config.json` says.
            refuse_quantised(self.name, info.config or {})
            files = _wanted_files(self.name, info.siblings or [])
            total = sum(file.size or 0 for file in files)
            # By commit: files of two commits must not meet in one folder.
            folder = work / str(info.sha)
            _keep_only(work, folder)
            check_room(work, total + _SPARE_BYTES)
            with telling_growth("downloading", folder, total, tell):
                huggingface_hub.snapshot_download(
                    self.name,
                    revision=info.sha,
                    local_dir=folder,
                    allow_patterns=[file.rfilename for file in files],
                    tqdm_class=_silent_bar(),
                )
        except BaseModelError:
            raise
        # Which HTTP library it uses, and so what it raises, changes with its version.
        except Exception as exc:
            raise self._as_ours(exc) from exc
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming
        checked = 0
        for file in files:
            tell("checking", checked, total)
            _check(folder / file.rfilename, file)
            checked += file.size or 0
        origin = {"kind": self.kind, "repository": self.name, "commit": str(info.sha)}
        return folder, {**origin, "revision": self.revision} if self.revision else origin

    def _as_ours(self, error: Exception) -> Exception:
        from huggingface_hub import errors

        if isinstance(error, OSError) and is_full(error):
            return error
        if isinstance(error, errors.GatedRepoError):
            return BaseModelUnavailableError(
                f"{self.name} is given only to those who accepted its terms",
                remedy="accept them on its page, and set HF_TOKEN or run `hf auth login`",
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            at = f" at {self.revision}" if self.revision else ""
            return BaseModelNotFoundError(
                f"the hub has no model {self.name}{at}",
                remedy="see that it is spelt right; a private one needs HF_TOKEN",
            )
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return BaseModelUnavailableError(f"the hub: {first_line:.200}")


def _wanted_files(name: str, listed: list[Any]) -> list[Any]:
    """The files of a repository that make up a model.

    Raises:
        BaseModelFormatError: There are no weights that can be loaded without running programs.
    """
    wanted = [file for file in listed if _WANTED.fullmatch(file.rfilename)]
    names = [file.rfilename for file in wanted]
    if "config.json" not in names or not any(file.endswith(".safetensors") for file in names):
        raise BaseModelFormatError(
            f"{name} has no config.json or no weights as safetensors",
            remedy="convert it elsewhere, and give the path of the folder as the model's name",
        )
    return wanted


def _keep_only(work: Path, folder: Path) -> None:
    for left in work.iterdir():
        if left != folder:
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(exist_ok=True)


def _check(path: Path, file: Any) -> None:
    """Compare a file with the digest that the hub has: sha256 of large ones, git's of others.

    Raises:
        BaseModelDamagedError: They differ. The file is removed, so that the next try fetches it.
    """
    with path.open("rb") as content:
        if file.lfs is not None:
            digest, promised = hashlib.file_digest(content, "sha256").hexdigest(), file.lfs.sha256
        else:
            digest, promised = git_digest(content.read()), file.blob_id
    if digest != promised:
        path.unlink()
        raise BaseModelDamagedError(
            f"{file.rfilename} came with the digest {digest}, and not {promised}",
            remedy="pull again; only this file is fetched anew",
        )


def git_digest(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _silent_bar() -> Any:
    """The library's bar, which shows nothing: the progress is told in our own way."""
    library: Any = importlib.import_module("huggingface_hub.utils")

    class Silent(library.tqdm):  # type: ignore[misc]  # the library does not say what it is
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent
