"""`glm53 serve`: restart policy, boot failures, locks and leftovers, with real child processes."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.instance import Instance
from cli.process import MAX_BOOT_FAILURES, Service, describe_exit
from cli.serve import Supervisor
from cli.settings import ServeSettings
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def ended(service: Service) -> int:
    codes: list[int] = []

    def reaped() -> bool:
        code = service.reap()
        if code is not None:
            codes.append(code)
        return bool(codes)

    assert wait_for(reaped)
    return codes[0]


def test_a_crash_backs_off_and_is_not_hopeless() -> None:
    """A crash schedules a restart, later each time; it never stops the stack."""
    service = Service("x", python("raise SystemExit(1)"), dict(os.environ))
    waits = []
    for _ in range(3):
        service.start()
        assert ended(service) == 1
        waits.append(service.next_start - time.monotonic())
        assert not service.hopeless
    assert waits == sorted(waits)
    assert waits[2] > 1.5


@pytest.mark.parametrize("code", [ExitCode.BOOT, ExitCode.CONFIG])
def test_a_boot_failure_is_hopeless_before_the_first_ready_state(code: int) -> None:
    """A service that cannot start for a reason of its own is not respawned in a loop."""
    service = Service("x", python(f"raise SystemExit({int(code)})"), dict(os.environ))
    service.start()
    assert ended(service) == code
    assert service.hopeless


def test_a_boot_failure_after_ready_is_retried_a_few_times() -> None:
    """After a crash the peer may still be restarting: a few boot failures are forgiven, not endless ones."""
    service = Service("x", python("raise SystemExit(3)"), dict(os.environ), was_ready=True)
    for attempt in range(MAX_BOOT_FAILURES):
        assert not service.hopeless, attempt
        service.start()
        ended(service)
    assert service.hopeless


def test_exits_are_described_in_words() -> None:
    """Signals are named and SIGKILL mentions memory."""
    assert describe_exit(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(2) == "exited with code 2"


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path]:
    shm = tmp_path / "shm"
    shm.mkdir()
    return shm, tmp_path / "state"


def test_an_instance_is_served_once(dirs: tuple[Path, Path]) -> None:
    """A second server on the same instance is refused and told who holds it."""
    first, second = Instance("a", *dirs), Instance("a", *dirs)
    first.acquire()
    with pytest.raises(ConfigError, match=str(os.getpid())):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_what_a_killed_server_left_is_reclaimed(dirs: tuple[Path, Path]) -> None:
    """Segments but the arena are removed and orphaned services are ended; release removes the arena too."""
    shm, _ = dirs
    with subprocess.Popen(python("import time; time.sleep(60)")) as orphan:
        dead = Instance("a", *dirs)
        dead.acquire()
        dead.record_children({"gpu_worker": orphan.pid})
        assert dead._lock is not None
        dead._lock.close()  # what the kernel does for a killed process
        for name in ("glm53-a-ctl", "glm53-a-ctl.tmp", "glm53-a-arena", "glm53-b-ctl"):
            (shm / name).write_bytes(b"x")
        threading.Thread(target=orphan.wait, daemon=True).start()
        heir = Instance("a", *dirs)
        heir.acquire()
        assert sorted(p.name for p in shm.iterdir()) == ["glm53-a-arena", "glm53-b-ctl"]
        assert wait_for(lambda: orphan.poll() is not None)
        heir.release()
        assert sorted(p.name for p in shm.iterdir()) == ["glm53-b-ctl"]


def test_a_reused_pid_is_not_ended(dirs: tuple[Path, Path]) -> None:
    """A process that merely has an orphan's old pid is left alone."""
    with subprocess.Popen(python("import time; time.sleep(60)")) as stranger:
        dead = Instance("a", *dirs)
        dead.acquire()
        (dirs[1] / "children").write_text(f"gpu_worker {stranger.pid} 12345")
        assert dead._lock is not None
        dead._lock.close()
        heir = Instance("a", *dirs)
        heir.acquire()
        assert stranger.poll() is None
        heir.release()
        stranger.kill()


@pytest.fixture
def health_port() -> Iterator[int]:
    """A server that answers /health as a ready gateway does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": "ok", "model": "m", "mode": "fast", "mode_reason": "r"}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


SLEEP = "import signal, time; signal.signal(signal.SIGTERM, lambda *a: exit(0)); time.sleep(60)"


def supervisor(tmp_path: Path, port: int, **programs: str) -> Supervisor:
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "PORT": str(port),
        "GLM53_SHM_DIR": str(shm),
        "GLM53_STATE_DIR": str(tmp_path / "state"),
        "GLM53_BOOT_TIMEOUT_S": "20",
    }
    return Supervisor(ServeSettings.load(env), env, {name: python(code) for name, code in programs.items()})


@pytest.mark.parametrize("code", [3, 78])
def test_a_boot_failure_stops_everything_with_its_code(tmp_path: Path, code: int) -> None:
    """`glm53 serve` exits with the code of the service that could not start, and leaves nothing behind."""
    run = supervisor(tmp_path, free_port(), gpu_worker=f"raise SystemExit({code})", gateway=SLEEP)
    assert run.run() == code
    assert not (tmp_path / "state" / "children").exists()


def test_crashed_services_come_back_and_sigterm_stops_all(tmp_path: Path, health_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """A killed child is started again; SIGTERM ends every child and returns 0."""
    marks = tmp_path / "marks"
    code = f"import os; open({str(marks)!r}, 'a').write(str(os.getpid()) + '\\n'); {SLEEP}"
    run = supervisor(tmp_path, health_port, gpu_worker=code, cpu_expert=SLEEP)
    caplog.set_level("INFO")

    def script() -> None:
        assert wait_for(lambda: marks.exists() and marks.read_text().count("\n") == 1)
        assert wait_for(lambda: "loaded in" in caplog.text)
        os.kill(int(marks.read_text().split()[0]), signal.SIGKILL)
        assert wait_for(lambda: marks.read_text().count("\n") == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=script)
    thread.start()
    assert run.run() == ExitCode.OK
    thread.join()
    assert "was killed by SIGKILL" in caplog.text
    assert all(not s.running for s in run._services)
