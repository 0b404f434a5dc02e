"""Files that settings name and we write: what is not ours stays as it is, down to its mode and to what lies beside it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from services.common import own_file
from services.common.errors import ConfigError
from services.common.own_file import NotOursError


def begins_as_ours(file: BinaryIO) -> bool:
    return file.read(4) == b"ours"


def write(path: Path, data: bytes = b"ours, new") -> None:
    own_file.replace(path, data, begins_as_ours, "test file")


@pytest.mark.parametrize("before", [None, b"", b"ours", b"ours, and then damaged \xff"])
def test_nothing_an_empty_file_and_ours_are_written_over(tmp_path: Path, before: bytes | None) -> None:
    """Nothing else is left in the folder."""
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    own_file.refuse_another("GLM53_HEAT_FILE", path, begins_as_ours, "test file")
    write(path)
    assert path.read_bytes() == b"ours, new"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_not_ours_is_refused_with_setting_and_fix(tmp_path: Path) -> None:
    """Other bytes, a folder, a socket, a pipe, a device, a link to nowhere: told in words, and untouched by a writer, too."""
    other, folder, pipe, nowhere, at = (tmp_path / name for name in ("other", "folder", "pipe", "nowhere", "socket"))
    other.write_bytes(b"diary")
    folder.mkdir()
    os.mkfifo(pipe)
    nowhere.symlink_to(tmp_path / "none")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(at))
        before = sorted(os.listdir(tmp_path))
        for path, found in (
            (other, "it has 5 bytes that are no test file of ours"),
            (folder, "it is a folder"),
            (pipe, "it is a pipe"),
            (at, "it is a socket"),
            (Path(os.devnull), "it is a device"),
            (nowhere, "it is a link to a file that does not exist"),
        ):
            with pytest.raises(ConfigError) as caught:
                own_file.refuse_another("GLM53_HEAT_FILE", path, begins_as_ours, "test file")
            assert caught.value.param == "GLM53_HEAT_FILE"
            assert caught.value.message == (
                f"GLM53_HEAT_FILE={path} is not written to: {found}. Name a file that does not exist yet, or move what is there away"
            )
            with pytest.raises(NotOursError, match=found):
                write(path)
    assert other.read_bytes() == b"diary"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_that_cannot_be_read_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what is in it."""
    path = tmp_path / "file"
    path.write_bytes(b"ours")

    def denied(_path: Path, _mode: str) -> BinaryIO:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(NotOursError, match="it cannot be read: Permission denied"):
        write(path)


def test_a_link_stays_one_and_the_mode_stays(tmp_path: Path) -> None:
    """What the link leads to is replaced."""
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "file", tmp_path / "link"
    real.write_bytes(b"ours, old")
    real.chmod(0o640)
    link.symlink_to(real)
    write(link)
    assert link.is_symlink()
    assert real.read_bytes() == b"ours, new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file is whole, the new one's beginning is gone, and what lay beside it under a like name is there still."""
    path, beside = tmp_path / "file", tmp_path / "file.tmp"
    path.write_bytes(b"ours, old")
    beside.write_bytes(b"diary")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_bytes() == b"ours, old"
    assert beside.read_bytes() == b"diary"
    assert sorted(os.listdir(tmp_path)) == ["file", "file.tmp"]
