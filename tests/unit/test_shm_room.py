"""A file system of shared memory that is too small: the worker and the doctor say the same, with a way for each way of running."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cli.doctor import sharedmem
from kernels.python.arena import Arena
from kernels.python.errors import ShmNoSpace
from kernels.python.region import Region
from services.common import memory, shm_room
from services.common.errors import ConfigError
from services.gpu_worker.backends import cpu
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings

GIB = shm_room.GIB
TINY = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"


@pytest.mark.parametrize("need", [5 << 20, GIB - (64 << 20), GIB, 107 * GIB])
def test_the_doctor_and_the_worker_say_the_same(tmp_path: Path, need: int) -> None:
    """The sizes and the fix, in the same words."""
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    lacking = free + need
    plenty = memory.Memory(10 * lacking, 0, 0, capped=True, host_available=10 * lacking)
    (found,) = sharedmem.room(str(tmp_path), "x", lacking, plenty)
    # What is free on a disk that others use changes from one look to the next.
    told = [re.sub(r"has \S+ \S+ free", "", text) for text in (found.message, shm_room.too_small(str(tmp_path), free, lacking))]
    assert told[0] == told[1]
    assert found.fix == shm_room.how_to_enlarge(str(tmp_path), lacking)


def test_the_size_that_is_named_is_enough() -> None:
    """Whole GiB, with room for the control region."""
    for need in (1, GIB - shm_room.SLACK_BYTES, GIB, 107 * GIB - 1):
        size = int(re.findall(r"remount,size=(\d+)G /mnt/shm on bare metal", shm_room.how_to_enlarge("/mnt/shm", need))[0])
        assert size * GIB >= need + shm_room.SLACK_BYTES > (size - 1) * GIB


@pytest.mark.parametrize("segment", [Arena, Region])
def test_a_worker_without_room_names_the_setting_and_one_fix(
    tmp_path: Path, segment: type[Arena] | type[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its segments does not fit."""

    def full(*_: object, **__: object) -> None:
        raise ShmNoSpace("make it at least 69 MiB (--shm-size=69m)")

    settings = GpuWorkerSettings.load({}, shm_dir=str(tmp_path), instance="small")
    checkpoint = Checkpoint(TINY)
    monkeypatch.setattr(segment, "attach_or_create" if segment is Arena else "create", full)
    with pytest.raises(ConfigError, match=r"^GLM53_SHM_DIR: .* free, the expert records need \d+ MiB\. Make it at least 1 GiB: ") as caught:
        cpu.load(settings, checkpoint, lambda *_: None, "asked for")
    assert f"mount -o remount,size=1G {tmp_path} on bare metal" in caught.value.message
    assert "69" not in caught.value.message.replace(str(tmp_path), "").partition("Make it")[2]
    assert caught.value.param == "GLM53_SHM_DIR"
