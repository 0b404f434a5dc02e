"""The cpu_expert service: settings, exit codes, waiting and refusing."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from kernels.python import _layout
from kernels.python.expert import variants
from services.common.errors import ConfigError, PeerError
from services.common.lifecycle import ExitCode
from services.cpu_expert import worker
from services.cpu_expert.settings import CpuExpertSettings, parse_cpus
from services.cpu_expert.worker import ExpertWorker, check_cpus, resolve_threads
from tests.shm.test_region import patch
from tests.tier.harness import Stage, cpu_expert

ROOT = pathlib.Path(__file__).parents[2]


class NoSignal:
    """Never told to stop; counts the waits."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.waits = 0
        self._stop_after = stop_after

    def wait(self, timeout_s: float) -> object | None:
        self.waits += 1
        return "SIGTERM" if self._stop_after is not None and self.waits >= self._stop_after else None


def settings_for(made: Stage, **overrides: object) -> CpuExpertSettings:
    return CpuExpertSettings.load({}, instance=made.instance, shm_dir=str(made.shm_dir), **overrides)


def run_service(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cpu_expert"]
    return subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("3", [3]), ("0-2,16", [0, 1, 2, 16]), (" 1 , 2 ", [1, 2])])
def test_cpu_lists_are_read(text: str, cpus: list[int]) -> None:
    """Numbers and ranges, in the order given."""
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(("text", "part"), [("a", "'a'"), ("3-1", "'3-1'"), ("1,,x-2", "'x-2'"), ("1,1", "named twice"), ("-1", "'-1'")])
def test_bad_cpu_lists_are_refused(text: str, part: str) -> None:
    """The part that cannot be read is named, under the setting's name."""
    with pytest.raises(ConfigError, match=part) as caught:
        CpuExpertSettings.load({"GLM53_CT_CPUS": text})
    assert caught.value.param == "GLM53_CT_CPUS"


def test_threads_follow_settings_cpus_and_record_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is given wins, then the pinned CPUs; small experts get one thread, big ones all CPUs but two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    big = 9 << 20
    assert resolve_threads(CpuExpertSettings.load({"GLM53_CT_THREADS": "5", "GLM53_CT_CPUS": "0-2"}), big)[0] == 5
    assert resolve_threads(CpuExpertSettings.load({"GLM53_CT_CPUS": "0-2"}), big)[0] == 3
    assert resolve_threads(CpuExpertSettings.load({}), big)[0] == 10
    assert resolve_threads(CpuExpertSettings.load({}), 40960)[0] == 1


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GLM53_CT_THREADS": "many"}, "GLM53_CT_THREADS"),
        ({"GLM53_CT_ISA": "sse2"}, "GLM53_CT_ISA"),
        ({"GLM53_CT_CPU": "0"}, "GLM53_CT_CPUS"),
    ],
)
def test_a_bad_setting_ends_with_the_config_code(env: dict[str, str], words: str) -> None:
    """Exit code 78 and the setting's name, or the closest one for a typo: respawning cannot help."""
    result = run_service(env)
    assert result.returncode == ExitCode.CONFIG
    assert words in result.stderr


def test_cpus_that_may_not_be_used_are_refused_before_anything_is_attached(tmp_path: pathlib.Path) -> None:
    """GLM53_CT_CPUS with a CPU that the machine or the container lacks ends with the settings' code and names the CPU."""
    usable = sorted(os.sched_getaffinity(0))
    check_cpus(usable)
    with pytest.raises(ConfigError, match=r"\[1023\]") as caught:
        check_cpus([usable[0], 1023])
    assert caught.value.param == "GLM53_CT_CPUS"
    done = run_service({"GLM53_CT_CPUS": "1023", "GLM53_SHM_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.CONFIG
    assert "GLM53_CT_CPUS names CPUs [1023]" in done.stderr


def test_a_kernel_that_the_host_lacks_is_a_config_error(made: Stage) -> None:
    """An instruction set that this CPU does not have is refused by name once there is something to serve."""
    missing = [isa for isa in ("avx512vbmi", "avxvnni", "avx512bw") if isa not in variants()]
    if not missing:
        pytest.skip("this CPU has every instruction set")
    with pytest.raises(ConfigError, match=missing[0]):
        ExpertWorker(settings_for(made, ct_isa=missing[0]), NoSignal()).run()


def test_a_mismatch_is_refused_with_both_values_in_the_end(made: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of another layout are waited on for a while (a worker may be restarting), then PeerError with both values."""
    monkeypatch.setattr(worker, "MISMATCH_PATIENCE_S", 0.0)
    expected = patch(made.ctl_path, _layout.AbiCtlHeader, "layout_hash", 0xBAD)
    signals = NoSignal()
    with pytest.raises(PeerError, match=f"layout_hash is 0xbad, expected 0x{expected:x}"):
        ExpertWorker(settings_for(made), signals).run()
    assert signals.waits >= 1


def test_waiting_ends_with_a_signal(tmp_path: pathlib.Path) -> None:
    """Without a worker the service waits with back-off, and stops as soon as it is told to."""
    settings = CpuExpertSettings.load({}, instance="nobody", shm_dir=str(tmp_path))
    signals = NoSignal(stop_after=4)
    ExpertWorker(settings, signals).run()
    assert signals.waits == 4


def test_sigterm_while_waiting_is_a_clean_exit(made: Stage) -> None:
    """SIGTERM before any worker exists: exit code 0."""
    elsewhere = Stage(made.shm_dir, "nobody", made.arena, made.region)
    with cpu_expert(elsewhere) as server:
        assert server.process.stderr is not None
        assert "waiting for a gpu_worker" in server.process.stderr.readline()
        code, _ = server.terminate()
        assert code == ExitCode.OK
