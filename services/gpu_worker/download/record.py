"""What a checkpoint folder says about where its files came from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.common.errors import CheckpointError, ConfigError

NAME = "glm53-download.json"
COMMIT = re.compile(r"^[0-9a-f]{40}$")
# Where huggingface_hub's own command notes the revision of a folder that it filled.
_HUB_NOTE = Path(".cache/huggingface/download/config.json.metadata")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at a revision.

    Attributes:
        name: without folders.
        size: bytes.
        blob: SHA-256 of a large file, git's id of a small one.
    """

    name: str
    size: int
    blob: str

    @property
    def sha256(self) -> str:
        """What the contents' SHA-256 must be, or "" where the hub does not tell it."""
        return self.blob if len(self.blob) == 64 else ""


@dataclass(frozen=True)
class Record:
    """A download: what belongs to it and what of it is there."""

    repo: str
    revision: str
    files: tuple[RemoteFile, ...]
    complete: frozenset[str]

    def with_complete(self, names: Iterable[str]) -> Record:
        """The same with more files that are there."""
        return Record(self.repo, self.revision, self.files, self.complete | frozenset(names))


def read(folder: Path) -> Record | None:
    """The folder's record, or None when it has none that can be read."""
    try:
        document = json.loads((folder / NAME).read_text())
        files = tuple(RemoteFile(**fields) for fields in document["files"])
        return Record(document["repo"], document["revision"], files, frozenset(document["complete"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, record: Record) -> None:
    """Replaces the folder's record whole or not at all."""
    part = folder / (NAME + ".part")
    document = {
        "repo": record.repo,
        "revision": record.revision,
        "files": [asdict(file) for file in record.files],
        "complete": sorted(record.complete),
    }
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, folder / NAME)


def check(folder: Path, repo: str, revision: str) -> None:
    """Refuses a folder that is not what was asked for, or not whole any more. Nothing is read but names and sizes.

    Args:
        folder: with a config.json.
        repo: the repository that was asked for, "" for any.
        revision: the commit that was asked for, "" for any.

    Raises:
        ConfigError: another repository or revision; names both.
        CheckpointError: a file is gone or has another size; names it.
    """
    record = read(folder)
    found = record.revision if record is not None else _hub_revision(folder)
    remedy = "name another GLM53_MODEL_DIR, or remove the folder so that it is fetched again"
    if revision and found and found != revision:
        raise ConfigError(f"{folder} holds revision {found}, GLM53_MODEL_REVISION is {revision}: {remedy}", param="GLM53_MODEL_REVISION")
    if record is None:
        return
    if repo and record.repo != repo:
        raise ConfigError(f"{folder} holds {record.repo}, GLM53_MODEL_REPO is {repo}: {remedy}", param="GLM53_MODEL_REPO")
    for file in record.files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            problem = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
            raise CheckpointError(
                f"{path} {problem}: remove {folder / 'config.json'} and start again, so that what is missing is fetched from {record.repo}"
            )


def _hub_revision(folder: Path) -> str:
    try:
        first = (folder / _HUB_NOTE).read_text().partition("\n")[0].strip()
    except (OSError, ValueError):
        return ""
    return first if COMMIT.match(first) else ""
