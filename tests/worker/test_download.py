"""Fetching a checkpoint: through the real huggingface_hub from a hub that runs here, cut off, killed, wrong and refused in every way."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import pathlib
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from services.common.errors import Cancelled, CheckpointError, ConfigError, Glm53Error
from services.gpu_worker import download
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.download import fetch, record
from services.gpu_worker.download import hub as hub_module
from services.gpu_worker.download.hub import PartFile
from services.gpu_worker.settings import GpuWorkerSettings
from tests.support import random_checkpoint
from tests.support.hub_server import COMMIT, OTHER, REPO, HubServer
from tests.support.random_checkpoint import Recipe, Stored
from tests.worker.harness import until
from tests.worker.test_process import WorkerProcess

SHARD = "model-00002-of-00003.safetensors"


def no_note(_fraction: float, _words: str) -> None:
    pass


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small checkpoint in three files, and what else a repository has."""
    folder = random_checkpoint.write(tmp_path_factory.mktemp("hub") / "model", Recipe(num_layers=3, num_experts=8, num_files=3))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "README.md": b"# model\n", ".gitattributes": b"*", "picture.png": b"PNG", "sub/other.json": b"{}", "empty.txt": b""}


@pytest.fixture
def hub(contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "FIRST_WAIT_S", 0.01)
    # What the library holds before it writes; at its 10 MB a small file would never be cut in the middle.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16_384)
    server = HubServer(dict(contents))
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "models" / "one"


def settings_for(folder: pathlib.Path, **more: Any) -> GpuWorkerSettings:
    return GpuWorkerSettings.load({}, **{"model_dir": str(folder), "model_repo": REPO, "model_revision": COMMIT, **more})


def assert_whole(folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    wanted = {name for name in contents if "/" not in name and not name.startswith(".") and not name.endswith(".png")}
    assert {path.name for path in folder.iterdir()} == wanted | {record.NAME}
    assert all((folder / name).read_bytes() == contents[name] for name in wanted)
    Checkpoint(folder)


def test_a_missing_checkpoint_is_fetched_once(hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    """What a checkpoint needs comes, nothing else; config.json comes last; the next start asks nobody."""
    said: list[tuple[float, str]] = []
    assert download.ensure(settings_for(folder), lambda f, words: said.append((f, words)), hub.url)
    assert_whole(folder, contents)
    assert [name for method, name, _ in hub.requests if method == "GET"][-1] == "config.json"
    assert said[0] == (0.0, f"asking for the files of {REPO}")
    assert said[-1][0] == 1
    assert said[-1][1].startswith(f"fetching {REPO}: ")
    asked = len(hub.requests)
    hub.close()
    assert not download.ensure(settings_for(folder), no_note, hub.url)
    assert len(hub.requests) == asked


def test_a_cut_connection_is_gone_on_with(hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    """Every further request for the file begins where the part ends: no byte comes twice."""
    hub.faults.cut = {SHARD: 3}
    download.ensure(settings_for(folder), no_note, hub.url)
    assert_whole(folder, contents)
    starts = hub.asked_for(SHARD)
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert starts[1] > 0
    assert hub.sent[SHARD] <= len(contents[SHARD]) + 3 * 65_536


def test_a_network_that_stays_broken_is_told_and_the_part_is_kept(
    hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some tries without a byte it ends, says how far it was, and the next start goes on from there."""
    real = fetch.Hub.read_into

    def breaks(self: Any, file: Any, part: Any, offset: int) -> None:
        if file.name != SHARD:
            real(self, file, part, offset)
        elif offset:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        else:
            part.write(contents[SHARD][:50_000])
            raise OSError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(fetch.Hub, "read_into", breaks)
    with pytest.raises(CheckpointError, match=rf"fetching {SHARD} .* failed 4 times in a row .*unreachable.* the next start goes on"):
        download.ensure(settings_for(folder), no_note, hub.url)
    assert not (folder / "config.json").exists()
    monkeypatch.setattr(fetch.Hub, "read_into", real)
    download.ensure(settings_for(folder), no_note, hub.url)
    assert_whole(folder, contents)
    assert hub.asked_for(SHARD) == [50_000]


def test_a_killed_worker_goes_on_where_it_was(
    hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes], tmp_path: pathlib.Path
) -> None:
    """kill -9 in the middle of a large file; the next worker fetches the rest, loads, and serves by itself."""
    large = "model-large.safetensors"
    random_checkpoint.save(tmp_path / large, {"unused": Stored("U8", np.arange(44 << 20, dtype=np.uint8))})
    hub.files[large] = (tmp_path / large).read_bytes()
    hub.faults.gate = threading.Event()
    work = tmp_path / "run"
    work.mkdir()
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "GLM53_MODEL_REPO": REPO, "GLM53_MODEL_REVISION": COMMIT}
    first = WorkerProcess(work, folder, **env)
    try:
        # The library writes 10 MB at a time: two of them are in the file when half of it was sent.
        until(lambda: any(p.stat().st_size >= 20_000_000 for p in (folder / fetch.PARTS).glob(f"{large}*")), "20 MB are there", 60)
        first.process.send_signal(signal.SIGKILL)
        first.exit_code()
    finally:
        first.close()
        hub.faults.gate.set()
    assert not (folder / "config.json").exists()
    (part,) = (folder / fetch.PARTS).glob(f"{large}*")
    kept = part.stat().st_size
    hub.requests.clear()
    second = WorkerProcess(work, folder, **env)
    try:
        second.wait_ready()
        log = second.log.read_text()
    finally:
        second.close()
    assert_whole(folder, hub.files)
    assert hub.asked_for(large) == [kept]
    assert f"fetching {REPO} at {COMMIT}" in log
    assert "is whole" in log


def test_another_size_is_refused(hub: HubServer, folder: pathlib.Path) -> None:
    """A hub that sends more than it says is not believed."""
    hub.faults.longer = {SHARD: 1000}
    with pytest.raises(CheckpointError, match=rf"{SHARD}.*(changes it|instead)"):
        download.ensure(settings_for(folder), no_note, hub.url)
    assert not (folder / SHARD).exists()


def test_a_wrong_bit_is_fetched_again_and_refused_when_it_stays(hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    """The SHA-256 of large files is held to what the hub tells."""
    hub.faults.garbled = {SHARD: 2}
    with pytest.raises(CheckpointError, match=f"{SHARD} came twice with another SHA-256"):
        download.ensure(settings_for(folder), no_note, hub.url)
    hub.faults.garbled = {SHARD: 1}
    download.ensure(settings_for(folder), no_note, hub.url)
    assert_whole(folder, contents)


@pytest.mark.parametrize(
    ("status", "code", "told", "param"),
    [
        (401, "", "refuses people/model .HTTP 401.: there is no such repository, or it is private and HF_TOKEN", "GLM53_MODEL_REPO"),
        (403, "GatedRepo", "people/model is gated: accept its terms", "GLM53_MODEL_REPO"),
        (403, "", "refuses people/model .HTTP 403.", "GLM53_MODEL_REPO"),
        (404, "RepoNotFound", "refuses people/model .HTTP 404.", "GLM53_MODEL_REPO"),
        (404, "RevisionNotFound", f"people/model has no revision {COMMIT}", "GLM53_MODEL_REVISION"),
    ],
)
def test_refusals_of_the_hub_name_the_setting(hub: HubServer, folder: pathlib.Path, status: int, code: str, told: str, param: str) -> None:
    """Unknown, private and gated repositories and unknown revisions are told apart."""
    hub.faults.status, hub.faults.code = status, code
    with pytest.raises(ConfigError, match=told) as refused:
        download.ensure(settings_for(folder), no_note, hub.url)
    assert refused.value.param == param


def test_a_hub_that_cannot_be_reached_is_told(hub: HubServer, folder: pathlib.Path) -> None:
    """Nobody listens: the network is named, and the way without it."""
    hub.close()
    with pytest.raises(CheckpointError, match=r"the hub cannot be asked for people/model .*check the network, or put a checkpoint"):
        download.ensure(settings_for(folder), no_note, hub.url)


@pytest.mark.parametrize("fault", ["nobody listens", "no such repository", "no package"])
def test_whoever_mistyped_the_folder_is_told_that_it_holds_no_checkpoint(
    hub: HubServer, folder: pathlib.Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the hub: the folder, why the hub was asked, and the setting that asks none come first."""
    if fault == "nobody listens":
        hub.close()
    elif fault == "no such repository":
        hub.faults.status, hub.faults.code = 404, "RepoNotFound"
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub.utils", None)
    with pytest.raises(Glm53Error, match=f"^GLM53_MODEL_DIR={folder} has no config.json, .* fetched .*GLM53_MODEL_DOWNLOAD=0"):
        download.ensure(settings_for(folder), no_note, hub.url)


def test_a_hub_in_trouble_is_told(hub: HubServer, folder: pathlib.Path) -> None:
    """An error of the server is no refusal."""
    hub.faults.status = 500
    with pytest.raises(CheckpointError, match="cannot be asked for people/model"):
        download.ensure(settings_for(folder), no_note, hub.url)


def test_too_small_a_disk_is_refused_before_anything_comes(hub: HubServer, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes are told; what is there already is not asked for again."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=fetch.SPARE_BYTES + 1000))
    with pytest.raises(ConfigError, match=r"has 1\.1 GB free, the rest of people/model takes 0\.0 GB and 1\.1 GB are left over"):
        download.ensure(settings_for(folder), no_note, hub.url)
    assert hub.requests == []


def test_a_full_disk_ends_it_and_keeps_what_came(hub: HubServer, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left in the middle: told as what it is, without tries."""

    def full(self: PartFile, _piece: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartFile, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full: make room and start again, what was fetched is kept"):
        download.ensure(settings_for(folder), no_note, hub.url)


def test_a_piece_is_written_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than it is given."""
    with PartFile(tmp_path / "p", threading.Event()) as part:
        monkeypatch.setattr(hub_module, "_write_some", lambda part, view: io.FileIO.write(part, view[:3]))
        assert part.write(b"0123456789") == 10
    assert (tmp_path / "p").read_bytes() == b"0123456789"


def test_telling_it_to_stop_stops_it(hub: HubServer, folder: pathlib.Path) -> None:
    """What the note raises comes out at once; the threads end at their next piece."""
    hub.faults.slow_s = 0.01

    def stop(fraction: float, _words: str) -> None:
        if fraction > 0:
            raise Cancelled("told to stop")

    with pytest.raises(Cancelled):
        download.ensure(settings_for(folder), stop, hub.url)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("download-")], "the threads have ended")
    assert not (folder / "config.json").exists()


def test_two_processes_do_not_fetch_into_one_folder(hub: HubServer, folder: pathlib.Path) -> None:
    """The second one is told who is there."""
    (folder / fetch.PARTS).mkdir(parents=True)
    with (folder / fetch.PARTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is fetching a checkpoint into"):
            download.ensure(settings_for(folder), no_note, hub.url)


def test_another_revision_keeps_what_is_the_same(hub: HubServer, folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    """An interrupted download of one revision becomes another one's: equal files stay, parts of others go."""
    hub.revisions = (COMMIT, OTHER)
    hub.faults.garbled = {SHARD: 2}
    with pytest.raises(CheckpointError):
        download.ensure(settings_for(folder), no_note, hub.url)
    done = {path.name for path in folder.glob("*.safetensors")}
    hub.requests.clear()
    hub.files["tokenizer.json"] = contents["tokenizer.json"] + b"\n"
    download.ensure(settings_for(folder, model_revision=OTHER), no_note, hub.url)
    assert_whole(folder, dict(hub.files))
    assert not done & {name for _, name, _ in hub.requests}
    assert record.read(folder).revision == OTHER  # type: ignore[union-attr]


def test_a_folder_of_another_revision_is_refused(hub: HubServer, folder: pathlib.Path) -> None:
    """Both revisions are named; without the setting the folder is taken as it is; so does the hub's own command's note."""
    download.ensure(settings_for(folder), no_note, hub.url)
    with pytest.raises(ConfigError, match=f"holds revision {COMMIT}, GLM53_MODEL_REVISION is {OTHER}"):
        download.ensure(settings_for(folder, model_revision=OTHER), no_note, hub.url)
    with pytest.raises(ConfigError, match="holds people/model, GLM53_MODEL_REPO is people/other"):
        download.ensure(settings_for(folder, model_repo="people/other"), no_note, hub.url)
    assert not download.ensure(GpuWorkerSettings.load({}, model_dir=str(folder)), no_note, hub.url)
    (folder / record.NAME).unlink()
    note = folder / ".cache/huggingface/download/config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\nabc\n1.0\n")
    with pytest.raises(ConfigError, match=f"holds revision {COMMIT}, GLM53_MODEL_REVISION is {OTHER}"):
        download.ensure(settings_for(folder, model_revision=OTHER), no_note, hub.url)


def test_a_missing_or_short_shard_is_named(hub: HubServer, folder: pathlib.Path) -> None:
    """A folder that lost a file, or half of one, is refused before anything is loaded."""
    download.ensure(settings_for(folder), no_note, hub.url)
    with (folder / SHARD).open("r+b") as shard:
        shard.truncate(1000)
    with pytest.raises(CheckpointError, match=f"{SHARD} has 1000 bytes instead of"):
        download.ensure(settings_for(folder), no_note, hub.url)
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing: remove .*config.json and start again"):
        download.ensure(settings_for(folder), no_note, hub.url)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: pathlib.Path) -> None:
    """Also where nobody wrote down what belongs to a folder."""
    model = random_checkpoint.write(tmp_path / "model", Recipe(num_layers=3, num_experts=8, num_files=3))
    names = sorted(path.name for path in model.glob("*.safetensors"))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    Checkpoint(model)
    (model / names[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{names[1]} is missing: .*index\.json names it"):
        Checkpoint(model)


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path: pathlib.Path) -> None:
    """A clone without the large files."""
    model = random_checkpoint.write(tmp_path / "model", Recipe(num_layers=3, num_experts=8))
    (model / "model.safetensors").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 1\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pointer of Git LFS"):
        Checkpoint(model)


def test_settings_decide_whether_and_what(hub: HubServer, folder: pathlib.Path) -> None:
    """0 fetches nothing; another repository needs its commit; a branch is no commit."""
    assert not download.ensure(settings_for(folder, model_download=False), no_note, hub.url)
    assert not folder.exists()
    with pytest.raises(ConfigError, match="GLM53_MODEL_REPO=people/model needs GLM53_MODEL_REVISION: the commit"):
        download.ensure(GpuWorkerSettings.load({}, model_dir=str(folder), model_repo=REPO), no_note, hub.url)
    with pytest.raises(ConfigError, match="GLM53_MODEL_REVISION"):
        settings_for(folder, model_revision="main")
    with pytest.raises(ConfigError, match="GLM53_MODEL_REPO"):
        settings_for(folder, model_repo="no-owner")
    (folder.parent).mkdir(parents=True)
    folder.write_text("")
    with pytest.raises(ConfigError, match="cannot make GLM53_MODEL_DIR"):
        download.ensure(settings_for(folder), no_note, hub.url)


@pytest.mark.parametrize("missing", ["config.json", "safetensors"])
def test_a_repository_without_a_checkpoint_is_refused(hub: HubServer, folder: pathlib.Path, missing: str) -> None:
    """Before anything of it is fetched."""
    hub.files = {name: data for name, data in hub.files.items() if not name.endswith(missing)}
    with pytest.raises(ConfigError, match="is no checkpoint"):
        download.ensure(settings_for(folder), no_note, hub.url)
    assert hub.requests == []


def test_without_the_package_the_way_out_is_told(hub: HubServer, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with a checkpoint of its own has no huggingface_hub."""
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", None)
    with pytest.raises(
        ConfigError, match="needs the package huggingface_hub: install it, or put a checkpoint into GLM53_MODEL_DIR by hand"
    ):
        download.ensure(settings_for(folder), no_note, hub.url)
