"""Download models from the Hugging Face hub, with `huggingface_hub` if it is installed.

The settings of that library apply: the endpoint, the token, proxies, offline mode. Only the files
at the top of the repository that a model needs are downloaded, and no code. Each is compared with
the hub's digest. An interrupted download resumes.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.files.base import ReportProgress, check_room, is_full, reporting_growth
from tinsmith.engine.model.weight_files import refuse_quantised
from tinsmith.errors import (
    BaseModelDamagedError,
    BaseModelError,
    BaseModelFormatError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
)

_WANTED = re.compile(
    r"(?!consolidated)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json|jinja|txt|model)"
    r"|LICENSE(\.[a-z]+)?|NOTICE(\.[a-z]+)?|README\.md"
)
_SPARE_BYTES = 16 << 20
_ASK_TIMEOUT_S = 20.0


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """One model repository on the hub."""

    name: str
    revision: str | None = None
    """A branch, tag or commit; None means the head of the main branch."""

    @property
    def kind(self) -> str:
        """The name of this kind of source, in commands and manifests."""
        return "hub"

    @property
    def caution(self) -> str:
        """How the model differs from the published one: it does not."""
        return "as it was published"

    def fetch(self, work: Path, report: ReportProgress) -> tuple[Path, dict[str, str]]:
        """Download the files of one commit and verify their digests; resumes an earlier attempt."""
        try:
            import huggingface_hub
        except ImportError as exc:
            raise BaseModelUnavailableError(
                "huggingface_hub is not installed",
                remedy="pip install huggingface_hub",
            ) from exc
        report("contacting the Hub", 0, None)
        try:
            info = huggingface_hub.HfApi().model_info(
                self.name, revision=self.revision, files_metadata=True, timeout=_ASK_TIMEOUT_S
            )
            # The hub has the content of `config.json`: check it before gigabytes are downloaded.
            refuse_quantised(self.name, info.config or {})
            files = _wanted_files(self.name, info.siblings or [])
            total = sum(file.size or 0 for file in files)
            # One folder per commit: files of two commits must not mix.
            folder = work / str(info.sha)
            _keep_only(work, folder)
            check_room(work, total + _SPARE_BYTES)
            with reporting_growth("downloading", folder, total, report):
                huggingface_hub.snapshot_download(
                    self.name,
                    revision=info.sha,
                    local_dir=folder,
                    allow_patterns=[file.rfilename for file in files],
                    tqdm_class=_silent_bar(),
                )
        except BaseModelError:
            raise
        # The HTTP library it uses, and so the errors it raises, change with its version.
        except Exception as exc:
            raise self._as_ours(exc) from exc
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's resume data
        checked = 0
        for file in files:
            report("checking", checked, total)
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
                f"{self.name} is a gated model, and you have no access to it",
                remedy="accept its terms on the Hub, then set HF_TOKEN or run `hf auth login`",
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            at = f" at {self.revision}" if self.revision else ""
            return BaseModelNotFoundError(
                f"the Hub has no model {self.name}{at}",
                remedy="check the spelling; a private model needs HF_TOKEN",
            )
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return BaseModelUnavailableError(f"{first_line:.200}")


def _wanted_files(name: str, listed: list[Any]) -> list[Any]:
    """The files of a repository that make up a model.

    Raises:
        BaseModelFormatError: There are no weights that can be loaded without running code.
    """
    wanted = [file for file in listed if _WANTED.fullmatch(file.rfilename)]
    names = [file.rfilename for file in wanted]
    if "config.json" not in names or not any(file.endswith(".safetensors") for file in names):
        raise BaseModelFormatError(
            f"{name} has no config.json or no safetensors files",
            remedy="convert it to safetensors, and use the path of its folder as the model's name",
        )
    return wanted


def _keep_only(work: Path, folder: Path) -> None:
    for left in work.iterdir():
        if left != folder:
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(exist_ok=True)


def _check(path: Path, file: Any) -> None:
    """Compare a file with the hub's digest: SHA-256 for LFS files, git's blob id for others.

    Raises:
        BaseModelDamagedError: They differ. The file is deleted, so the next attempt downloads it.
    """
    with path.open("rb") as content:
        if file.lfs is not None:
            digest, promised = hashlib.file_digest(content, "sha256").hexdigest(), file.lfs.sha256
        else:
            digest, promised = git_digest(content.read()), file.blob_id
    if digest != promised:
        path.unlink()
        raise BaseModelDamagedError(
            f"{file.rfilename} was damaged in transit: digest {digest}, expected {promised}",
            remedy="run the command again; only this file is downloaded again",
        )


def git_digest(content: bytes) -> str:
    """The git blob id of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _silent_bar() -> Any:
    """A progress bar for the library that shows nothing: we report the progress ourselves."""
    library: Any = importlib.import_module("huggingface_hub.utils")

    class Silent(library.tqdm):  # type: ignore[misc]  # the library is untyped
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent
