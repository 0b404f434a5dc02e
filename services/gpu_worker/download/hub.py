"""The hub, as far as a download needs it, through huggingface_hub: which files a revision has, and their bytes from any offset on.

The library's own download of whole files begins a file anew after a restart. Its `http_get` can go on in the middle; which part of a file
is there is for `fetch` to know.
"""

from __future__ import annotations

import errno
import io
import logging
import pathlib
import threading
from typing import Any

from services.common.errors import CheckpointError, ConfigError, Glm53Error
from services.gpu_worker.download.record import RemoteFile

log = logging.getLogger(__name__)

LIST_TIMEOUT_S = 30.0
_WANTED = (".json", ".safetensors", ".jinja", ".txt", ".model", ".md")


class Stopped(Exception):
    """Somebody asked for the end of the download."""


class PartFile(io.FileIO):
    """A file that is being fetched. Every piece is written whole, or the reason is raised; a stop ends it between two pieces."""

    def __init__(self, path: pathlib.Path, stop: threading.Event) -> None:
        super().__init__(path, "r+b" if path.exists() else "x+b")
        self.seek(0, io.SEEK_END)
        self._stop = stop

    def write(self, piece: Any) -> int:
        """As FileIO's, but never short."""
        if self._stop.is_set():
            raise Stopped
        view = memoryview(piece)
        done = 0
        while done < len(view):
            done += _write_some(self, view[done:]) or 0
        return done


def _write_some(part: PartFile, view: memoryview) -> int | None:
    return io.FileIO.write(part, view)


class Hub:
    """One repository at one revision.

    Args:
        repo: `owner/name`.
        revision: a commit.
        endpoint: the hub's URL; None for the library's own (HF_ENDPOINT).
    """

    def __init__(self, repo: str, revision: str, endpoint: str | None = None) -> None:
        # Late: a worker whose folder is there needs no hub.
        try:
            from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
        except ImportError:
            raise ConfigError(
                f"there is no checkpoint, and fetching {repo} needs the package huggingface_hub: install it, or put a checkpoint into "
                "GLM53_MODEL_DIR by hand",
                param="GLM53_MODEL_DIR",
            ) from None

        disable_progress_bars()
        self.repo, self.revision, self._endpoint = repo, revision, endpoint

    def files(self) -> list[RemoteFile]:
        """What a checkpoint needs of the repository.

        Raises:
            Glm53Error: says why they cannot be listed.
        """
        from huggingface_hub import HfApi

        try:
            info = HfApi(endpoint=self._endpoint).model_info(self.repo, revision=self.revision, files_metadata=True, timeout=LIST_TIMEOUT_S)
        except Exception as error:
            known = self.explain(error) or CheckpointError(
                f"the hub cannot be asked for {self.repo} ({type(error).__name__}: {error}): check the network, or put a checkpoint into "
                "GLM53_MODEL_DIR by hand"
            )
            raise known from error
        found = []
        for sibling in info.siblings or []:
            name = sibling.rfilename
            if not (name.endswith(_WANTED) or name.startswith("LICENSE")) or name.startswith(".") or "/" in name or "\\" in name:
                continue
            blob = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            if sibling.size is None or not blob:
                raise CheckpointError(f"the hub does not tell size and hash of {self.repo}/{name}")
            found.append(RemoteFile(name, sibling.size, blob))
        names = {file.name for file in found}
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            raise ConfigError(
                f"{self.repo} at {self.revision} is no checkpoint: it has no config.json or no .safetensors", param="GLM53_MODEL_REPO"
            )
        return found

    def read_into(self, file: RemoteFile, part: PartFile, offset: int) -> None:
        """Appends the file's bytes from `offset` on. Raises what `explain` knows, or what is worth another try."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, file.name, revision=self.revision, endpoint=self._endpoint)
        # As it is stored: a part of a compressed answer could not be gone on with.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        http_get(url, part, resume_size=offset, headers=headers, expected_size=file.size, displayed_filename=file.name)

    def explain(self, error: Exception) -> Glm53Error | None:
        """What an error means to people, or None when another try may help."""
        import httpx
        from huggingface_hub import errors as hub_errors

        if isinstance(error, Glm53Error):
            return error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CheckpointError("the disk is full: make room and start again, what was fetched is kept")
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return ConfigError(f"the checkpoint's folder cannot be written: {error.strerror}", param="GLM53_MODEL_DIR")
        if isinstance(error, hub_errors.OfflineModeIsEnabled):
            return CheckpointError("HF_HUB_OFFLINE is set: unset it, or put the checkpoint into GLM53_MODEL_DIR by hand")
        if isinstance(error, hub_errors.RevisionNotFoundError):
            return ConfigError(f"{self.repo} has no revision {self.revision}: correct GLM53_MODEL_REVISION", param="GLM53_MODEL_REVISION")
        if isinstance(error, hub_errors.GatedRepoError):
            return ConfigError(
                f"{self.repo} is gated: accept its terms on the hub with an account, and set HF_TOKEN to a token of it",
                param="GLM53_MODEL_REPO",
            )
        status = error.response.status_code if isinstance(error, hub_errors.HfHubHTTPError) else 0
        if status in (401, 403) or isinstance(error, hub_errors.RepositoryNotFoundError):
            return ConfigError(
                f"the hub refuses {self.repo} (HTTP {status}): there is no such repository, or it is private and HF_TOKEN is missing or "
                "wrong",
                param="GLM53_MODEL_REPO",
            )
        if status == 404:
            return ConfigError(f"{self.repo} at {self.revision} lacks a file that it lists: {error}", param="GLM53_MODEL_REVISION")
        if isinstance(error, hub_errors.HfHubHTTPError | httpx.HTTPError | OSError):
            return None
        return CheckpointError(f"the download failed: {type(error).__name__}: {error}")
