"""The download: several files at a time, each gone on with where it was, checked, and moved to its name only when it is whole."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import CheckpointError, ConfigError, Glm53Error
from services.gpu_worker.download import record as records
from services.gpu_worker.download.hub import Hub, PartFile, Stopped
from services.gpu_worker.download.record import Record, RemoteFile
from services.gpu_worker.pace import Pace
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger(__name__)

Note = Callable[[float, str], None]

PARTS = ".glm53-download"  # folder of what is not whole yet
AT_ONCE = 4
# Tries in a row that brought nothing, after those that the library makes by itself.
TRIES = 4
FIRST_WAIT_S = 1.0
SPARE_BYTES = 1 << 30
_LOOK_S = 0.25
_PIECE = 4 << 20


def ensure(settings: GpuWorkerSettings, note: Note, endpoint: str | None = None) -> bool:
    """Makes sure that the checkpoint's folder is there and whole; fetches it when config.json is missing and that is allowed.

    Args:
        settings: the worker's.
        note: called with a fraction 0..1 and words; what it raises ends the download.
        endpoint: see Hub.

    Returns:
        whether anything was fetched.

    Raises:
        ConfigError: repository, revision, disk or an existing folder do not fit.
        CheckpointError: the hub cannot be reached or sends something wrong; what was fetched is kept.
    """
    folder = settings.model_folder
    repo = settings.model_repo if settings.is_set("model_repo") else ""
    revision = settings.model_revision if settings.is_set("model_revision") else ""
    if (folder / "config.json").exists():
        records.check(folder, repo, revision)
        return False
    if not settings.model_download:
        return False
    if repo and not revision and repo != type(settings).model_fields["model_repo"].default:
        raise ConfigError(
            f"GLM53_MODEL_REPO={repo} needs GLM53_MODEL_REVISION: the commit (40 hexadecimal digits) that is meant",
            param="GLM53_MODEL_REVISION",
        )
    note(0.0, f"asking for the files of {settings.model_repo}")
    try:
        hub = Hub(settings.model_repo, settings.model_revision, endpoint)
        files = hub.files()
    except Glm53Error as error:
        # Whoever mistyped a folder did not know that anything would be fetched.
        raise type(error)(
            f"GLM53_MODEL_DIR={folder} has no config.json, so {settings.model_repo} was to be fetched into it (GLM53_MODEL_DOWNLOAD=0 makes"
            f" that an error instead): {error.message}",
            param=error.param,
        ) from error
    Download(folder, hub, files).run(note)
    return True


class Download:
    """One folder that becomes a checkpoint.

    Args:
        folder: made when missing.
        hub: what comes into it.
        files: what `hub` has of a checkpoint.
    """

    def __init__(self, folder: Path, hub: Hub, files: list[RemoteFile]) -> None:
        self._folder, self._hub, self._files = folder, hub, files
        self._parts = folder / PARTS
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()

    def run(self, note: Note) -> None:
        """Fetches what is missing. Raises as `ensure`."""
        files = self._files
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make GLM53_MODEL_DIR={self._folder}: {error.strerror}", param="GLM53_MODEL_DIR") from None
        with self._alone():
            self._record = self._begin(files)
            missing = [file for file in files if file.name not in self._record.complete]
            self._check_space(missing)
            total = sum(file.size for file in files)
            pace = Pace(total, self._done())
            log.info(
                "fetching %s at %s into %s: %d files, %.1f GB, %.1f GB of them are there",
                self._hub.repo, self._hub.revision, self._folder, len(files), total / 1e9, self._done() / 1e9,
            )  # fmt: skip
            last = [file for file in missing if file.name == "config.json"]
            self._fetch_all([file for file in missing if file not in last], total, pace, note)
            self._fetch_all(last, total, pace, note)
            shutil.rmtree(self._parts, ignore_errors=True)
        log.info("%s is whole", self._folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._parts / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"another process is fetching a checkpoint into {self._folder}: wait for it") from None
            yield

    def _begin(self, files: list[RemoteFile]) -> Record:
        """The record of this download; files of an earlier one count when they are the same ones."""
        old = records.read(self._folder)
        known = {file for file in old.files if file.name in old.complete} if old is not None else set()
        there = {
            f.name for f in files if f in known and (self._folder / f.name).is_file() and (self._folder / f.name).stat().st_size == f.size
        }
        record = Record(self._hub.repo, self._hub.revision, tuple(files), frozenset(there))
        wanted = {self._part(file) for file in files}
        for path in self._parts.glob("*.part"):
            if path not in wanted:
                path.unlink()
        records.write(self._folder, record)
        return record

    def _part(self, file: RemoteFile) -> Path:
        return self._parts / f"{file.name}.{file.blob[:16]}.part"

    def _have(self, file: RemoteFile) -> int:
        """Bytes of a file that are there."""
        if file.name in self._record.complete:
            return file.size
        return max(0, min(_size(self._part(file)), file.size))

    def _done(self) -> int:
        return sum(self._have(file) for file in self._record.files)

    def _check_space(self, missing: list[RemoteFile]) -> None:
        needed = sum(file.size - self._have(file) for file in missing)
        free = shutil.disk_usage(self._folder).free
        if needed and needed + SPARE_BYTES > free:
            raise ConfigError(
                f"{self._folder} has {free / 1e9:.1f} GB free, the rest of {self._hub.repo} takes {needed / 1e9:.1f} GB and "
                f"{SPARE_BYTES / 1e9:.1f} GB are left over: make room, or name a larger disk's folder",
                param="GLM53_MODEL_DIR",
            )

    def _fetch_all(self, files: list[RemoteFile], total: int, pace: Pace, note: Note) -> None:
        # The largest first: they decide when all is done.
        for file in sorted(files, key=lambda file: -file.size):
            self._waiting.put(file)
        threads = [threading.Thread(target=self._work, name=f"download-{i}", daemon=True) for i in range(min(AT_ONCE, len(files)))]
        for thread in threads:
            thread.start()
        said = ""
        try:
            while alive := [thread for thread in threads if thread.is_alive()]:
                alive[0].join(_LOOK_S)
                done = self._done()
                words = f"fetching {self._hub.repo}: {pace.words(done)}"
                note(done / max(1, total), words)
                if words != said:
                    log.info("%s", words)
                    said = words
        finally:
            self._stop.set()
        if self._error is not None:
            raise self._error
        self._stop.clear()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._fetch(self._waiting.get_nowait())
        except (queue.Empty, Stopped):
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _fetch(self, file: RemoteFile) -> None:
        part = self._part(file)
        for attempt in (1, 2):
            self._read(file, part)
            if not file.sha256 or _sha256(part, self._stop) == file.sha256:
                break
            part.unlink()
            if attempt == 2:
                raise CheckpointError(f"{file.name} came twice with another SHA-256 than the hub tells: something on the way changes it")
            log.warning("%s has another SHA-256 than the hub tells: fetching it again", file.name)
        os.replace(part, self._folder / file.name)
        with self._lock:
            self._record = self._record.with_complete([file.name])
            records.write(self._folder, self._record)

    def _read(self, file: RemoteFile, path: Path) -> None:
        fruitless, wait_s = 0, FIRST_WAIT_S
        with PartFile(path, self._stop) as part:
            while (offset := path.stat().st_size) != file.size or file.size == 0:
                if offset > file.size:
                    part.truncate(0)
                    offset = 0
                part.seek(offset)
                try:
                    self._hub.read_into(file, part, offset)
                except Stopped:
                    raise
                except Exception as error:
                    if (known := self._hub.explain(error)) is not None:
                        raise known from error
                    gained = offset < path.stat().st_size <= file.size
                    fruitless, wait_s = (0, FIRST_WAIT_S) if gained else (fruitless + 1, wait_s * 2)
                    if fruitless >= TRIES:
                        raise CheckpointError(self._gave_up(file, path, error)) from error
                    log.warning("%s: %s; trying again in %.0f s", file.name, error, wait_s)
                    if self._stop.wait(wait_s):
                        raise Stopped from None
                if file.size == 0:
                    break
            os.fsync(part.fileno())

    def _gave_up(self, file: RemoteFile, path: Path, error: Exception) -> str:
        size = path.stat().st_size
        if size > file.size:
            return f"{file.name} has {file.size} bytes, the hub sent {size} or more: something on the way changes it"
        return (
            f"fetching {file.name} of {self._hub.repo} failed {TRIES} times in a row at {size / 1e9:.2f} of {file.size / 1e9:.2f} GB "
            f"({error}): check the network; the next start goes on from there"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            if stop.is_set():
                raise Stopped
            digest.update(piece)
    return digest.hexdigest()
