"""Segments: refusals of the handshake, memory that is not there, who may unlink."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.python import _layout, segments
from kernels.python.arena import Arena
from kernels.python.errors import ShmAbsent, ShmInUse, ShmMismatch, ShmNoSpace
from kernels.python.expert import ExpertShape
from kernels.python.job_server import JobServer
from kernels.python.region import Region
from tests.tier import harness
from tests.tier.harness import CHECKPOINT, EXPERTS, TOP_K, Stage


def patch(path: str, struct: type[ctypes.Structure], field: str, value: int) -> int:
    """Overwrites a header field of a segment and returns what was there."""
    descriptor = getattr(struct, field)
    with open(path, "r+b") as file:
        file.seek(descriptor.offset)
        before = int.from_bytes(file.read(descriptor.size), "little")
        file.seek(descriptor.offset)
        file.write(value.to_bytes(descriptor.size, "little"))
    return before


HEADER_FIELDS = ["magic", "abi_version", "layout_hash", "arithmetic_version", "total_bytes"]


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_region_of_another_kind_is_refused_with_both_values(made: Stage, field: str) -> None:
    """Attaching checks every header word and prints what it found and what it expected."""
    found = 0x1234
    expected = patch(made.ctl_path, _layout.AbiCtlHeader, field, found)
    if field == "total_bytes":
        found, expected = expected, found  # there the file's size is what was found
    with pytest.raises(ShmMismatch, match=f"{field} is 0x{found:x}, expected 0x{expected:x}"):
        Region.attach(made.ctl_path)
    with pytest.raises(ShmMismatch, match=field):
        JobServer(made.ctl_path, made.arena_path)


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_an_arena_of_another_kind_is_refused_with_both_values(made: Stage, field: str) -> None:
    """The arena's handshake is as strict as the region's."""
    found = 0x1234
    expected = patch(made.arena_path, _layout.AbiArenaHeader, field, found)
    if field == "total_bytes":
        found, expected = expected, found
    with pytest.raises(ShmMismatch, match=f"{field} is 0x{found:x}, expected 0x{expected:x}"):
        Arena.attach(made.arena_path)


def test_a_stale_generation_is_refused_with_both_values(made: Stage) -> None:
    """A reader that expects one creation does not take another one for it."""
    stale = made.region.generation ^ 1
    with pytest.raises(ShmMismatch, match=f"generation is 0x{made.region.generation:x}, expected 0x{stale:x}"):
        Region.attach(made.ctl_path, generation=stale)
    with pytest.raises(ShmMismatch, match=f"generation is 0x{made.arena.generation:x}"):
        Arena.attach(made.arena_path, generation=made.arena.generation ^ 1)
    assert Region.attach(made.ctl_path, generation=made.region.generation).generation == made.region.generation


def test_a_region_of_another_arena_is_refused(made: Stage) -> None:
    """The server maps the arena that the region's jobs name, or none."""
    patch(made.ctl_path, _layout.AbiCtlHeader, "arena_generation", 77)
    with pytest.raises(ShmMismatch, match=f"generation is 0x{made.arena.generation:x}, expected 0x4d"):
        JobServer(made.ctl_path, made.arena_path)
    with pytest.raises(ShmMismatch, match="belongs to arena generation 0x4d"):
        made.engine()


@pytest.mark.parametrize("keep", [0, 100, 4096, -4096])
def test_a_truncated_segment_is_refused(made: Stage, keep: int) -> None:
    """A segment that is shorter than its header says is refused before anything of it is used."""
    for path, attach in ((made.ctl_path, Region.attach), (made.arena_path, Arena.attach)):
        copy = path + "-copy"
        data = pathlib.Path(path).read_bytes()
        pathlib.Path(copy).write_bytes(data[:keep])
        with pytest.raises(ShmMismatch, match=r"truncated: it has \d+ bytes|total_bytes is 0x[0-9a-f]+, expected 0x[0-9a-f]+"):
            attach(copy)
        os.unlink(copy)


def test_counts_that_contradict_the_offsets_are_refused(made: Stage) -> None:
    """Offsets are what the counts give, or the header is not believed."""
    patch(made.ctl_path, _layout.AbiCtlHeader, "num_buffers", 5)
    with pytest.raises(ShmMismatch, match="offsets in the header"):
        Region.attach(made.ctl_path)


def test_a_missing_segment_is_told_apart(shm_dir: pathlib.Path) -> None:
    """Absent is not broken: the server waits for it."""
    with pytest.raises(ShmAbsent, match="does not exist"):
        Arena.attach(str(shm_dir / "nothing"))


def test_a_half_made_arena_cannot_be_attached(shm_dir: pathlib.Path) -> None:
    """Until it is sealed an arena has no name; what its maker leaves when it dies is cleared by the next one."""
    path = segments.arena_path(shm_dir, "half")
    arena = Arena.create(path, harness.default_shapes(), EXPERTS, CHECKPOINT)
    with pytest.raises(ShmAbsent):
        Arena.attach(path)
    temporaries = list(shm_dir.glob("*.tmp"))
    assert len(temporaries) == 1
    assert segments.reclaim_temporaries(path) == [], "its maker lives"
    shutil.copy(temporaries[0], str(temporaries[0]).replace(".tmp", "0.tmp"))  # the same without a living maker
    assert len(segments.reclaim_temporaries(path)) == 1
    arena.close()
    del arena
    assert list(shm_dir.iterdir()) == []


def test_a_ready_arena_is_taken_over(shm_dir: pathlib.Path) -> None:
    """A restarted worker finds its records again, with the same bytes, and owns them; another checkpoint's are replaced."""
    path = segments.arena_path(shm_dir, "again")
    shapes = harness.default_shapes()
    first = Arena.attach_or_create(path, shapes, EXPERTS, CHECKPOINT)
    assert not first.reattached
    harness.fill(first)
    generation, record = first.generation, first.record(2, 3).copy()
    with pytest.raises(ShmInUse, match="belongs to a running worker"):
        Arena.attach_or_create(path, shapes, EXPERTS, CHECKPOINT)
    first.close()
    second = Arena.attach_or_create(path, shapes, EXPERTS, CHECKPOINT)
    assert second.reattached
    assert second.generation == generation
    assert np.array_equal(second.record(2, 3), record)
    second.close()
    for other_shapes, experts, checkpoint, message in (
        (shapes, EXPERTS, bytes(32), "checkpoint_hash is 0001"),
        (shapes, EXPERTS + 1, CHECKPOINT, "experts_per_layer is 0x8, expected 0x9"),
        ([shapes[0], shapes[0], shapes[2]][::-1], EXPERTS, CHECKPOINT, "other expert shapes"),
    ):
        keep = pathlib.Path(path).read_bytes()
        third = Arena.attach_or_create(path, other_shapes, experts, checkpoint)
        assert not third.reattached
        assert message in third.note
        third.close()
        del third
        pathlib.Path(path).write_bytes(keep)
    os.unlink(path)


def test_an_arena_whose_writer_died_while_writing_is_not_taken_over(shm_dir: pathlib.Path) -> None:
    """An odd generation means a torn record: the arena is made again."""
    with harness.stage(shm_dir) as made:
        copy = made.arena_path + "x"
        shutil.copy(made.arena_path, copy)
        patch_generation(copy, slot=5, value=3)
        arena = Arena.attach_or_create(copy, harness.default_shapes(), EXPERTS, CHECKPOINT)
        assert not arena.reattached
        assert "slot 5 has generation 3" in arena.note


def patch_generation(path: str, slot: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(_layout.AbiArenaHeader.generations_offset.offset)
        offset = int.from_bytes(file.read(8), "little")
        file.seek(offset + 4 * slot)
        file.write(value.to_bytes(4, "little"))


def test_only_the_owner_unlinks(made: Stage) -> None:
    """An attacher cannot remove a segment, and its end leaves it in place."""
    arena, region = Arena.attach(made.arena_path), Region.attach(made.ctl_path)
    with pytest.raises(ValueError, match="only the owner of an arena may unlink it"):
        arena.unlink()
    with pytest.raises(ValueError, match="only the creator of a region may unlink it"):
        region.unlink()
    arena.close()
    region.close()
    del arena, region
    assert os.path.exists(made.arena_path)
    assert os.path.exists(made.ctl_path)


def test_unlink_leaves_a_successor_alone(made: Stage) -> None:
    """The old creator's unlink does not remove the region that a restarted worker put in its place."""
    old = made.region
    made.region = Region.create(made.ctl_path, made.arena, top_k=TOP_K)
    assert not old.current
    assert made.region.current
    old.unlink()
    assert made.region.current
    assert old.field("quit") == 1
    assert made.region.field("quit") == 0


def test_an_attacher_cannot_change_the_arena(made: Stage) -> None:
    """Sealed records are read-only views, and only the owner fills or rewrites."""
    with pytest.raises(ValueError, match="read-only"):
        made.arena.record(0, 0)[0] = 1
    reader = Arena.attach(made.arena_path)
    with pytest.raises(ValueError, match="only the owner"):
        reader.rewrite(0, 0, made.arena.record(0, 0))
    with pytest.raises(ValueError, match="only the owner"):
        reader.seal()


def test_rewriting_moves_the_generation(made: Stage) -> None:
    """Every rewrite gives the slot the next even generation and a checksum that fits."""
    assert made.arena.generation_of(1, 2) == 2
    record = made.arena.record(1, 3).copy()
    made.arena.rewrite(1, 2, record)
    assert made.arena.generation_of(1, 2) == 4
    assert made.arena.check(1, 2)
    assert np.array_equal(made.arena.record(1, 2), record)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts_per_layer": 0}, "0 experts"),
        ({"shapes": []}, "at least one layer"),
        ({"checkpoint_hash": b"short"}, "checkpoint_hash: expected 32 bytes, got 5"),
        ({"shapes": "widths"}, "layer 1 has hidden 256, layer 0 has 128"),
    ],
)
def test_impossible_arenas_are_refused(shm_dir: pathlib.Path, arguments: dict[str, object], message: str) -> None:
    """A count or shape that the layout cannot hold is named."""
    full: dict[str, object] = {"shapes": harness.default_shapes(), "experts_per_layer": 8, "checkpoint_hash": CHECKPOINT, **arguments}
    if full["shapes"] == "widths":
        full["shapes"] = [ExpertShape.create(128, 128, 3), ExpertShape.create(256, 128, 3)]
    with pytest.raises(ValueError, match=message):
        Arena.create(str(shm_dir / "x"), **full)  # type: ignore[arg-type]


@pytest.mark.parametrize("geometry", [{"num_buffers": 3}, {"ring_len": 1}, {"max_rows": 0}, {"top_k": 0}])
def test_impossible_regions_are_refused(made: Stage, geometry: dict[str, int]) -> None:
    """A geometry out of range is refused with the ranges."""
    with pytest.raises(ValueError, match="control region: ring_len"):
        Region.create(made.ctl_path + "x", made.arena, **{"top_k": TOP_K, **geometry})


@contextlib.contextmanager
def small_tmpfs(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    """A tmpfs of that size; skips where it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Below and above the size from which several threads take the pages.
@pytest.mark.parametrize(("size", "experts", "width"), [("1m", 16, 512), ("100m", 12, 4096)])
def test_too_small_a_tmpfs_is_refused_with_the_size_to_pass(tmp_path: pathlib.Path, size: str, experts: int, width: int) -> None:
    """All memory is reserved before anything is read: a clear error and no leftover, never SIGBUS."""
    with small_tmpfs(tmp_path / "small", size) as mount:
        shape = ExpertShape.create(width, width // 2 if width > 512 else width, 3)
        with pytest.raises(ShmNoSpace, match=r"needs \d+ bytes and .* has \d+ free: make it at least \d+ MiB \(--shm-size="):
            Arena.create(str(mount / "arena"), [shape], experts, CHECKPOINT)
        assert list(mount.iterdir()) == []


def test_all_memory_of_a_large_arena_is_taken_at_once(tmp_path: pathlib.Path) -> None:
    """Several threads take it: every block is there before the first write, and all of it reads as zeros."""
    with small_tmpfs(tmp_path / "small", "200m") as mount:
        arena = Arena.create(str(mount / "arena"), [ExpertShape.create(4096, 2048, 3)], 12, CHECKPOINT)
        (file,) = mount.iterdir()
        assert file.stat().st_size == arena.total_bytes
        assert file.stat().st_blocks * 512 >= arena.total_bytes
        assert not arena.record(0, 11).any()
        arena.close()


def test_two_arenas_that_race_for_the_last_memory_end_in_an_error(tmp_path: pathlib.Path) -> None:
    """Both see enough room and one of them finds it gone: that is told, never SIGBUS."""
    with small_tmpfs(tmp_path / "small", "160m") as mount:
        outcomes: list[object] = []

        def make(name: str) -> None:
            try:
                outcomes.append(Arena.create(str(mount / name), [ExpertShape.create(4096, 2048, 3)], 12, CHECKPOINT))
            except ShmNoSpace as error:
                outcomes.append(error)

        threads = [threading.Thread(target=make, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        made = [arena for arena in outcomes if isinstance(arena, Arena)]
        assert len(outcomes) == 2
        assert len(made) <= 1
        assert len(list(mount.iterdir())) == len(made)
        for arena in made:
            arena.close()
        del made
        outcomes.clear()
