"""`glm53 serve`: restart policy, boot failures, locks and leftovers, with real child processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from cli import instance as instance_module
from cli import probe
from cli.instance import Instance
from cli.liveness import QUIET_S, Liveness
from cli.process import BACKOFF_FIRST_S, MAX_BOOT_FAILURES, STABLE_S, Service, _die_with, describe_exit
from cli.serve import Supervisor
from cli.settings import ServeSettings
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(condition, timeout_s: float = 10.0, every_s: float = 0.02) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
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
    """A crash schedules a restart, later each time; of a service that was ready it never stops the stack."""
    service = Service("x", python("raise SystemExit(1)"), dict(os.environ), was_ready=True)
    waits = []
    for _ in range(MAX_BOOT_FAILURES + 1):
        service.start()
        assert ended(service) == 1
        waits.append(service.next_start - time.monotonic())
        assert not service.hopeless
    assert waits == sorted(waits)
    assert waits[2] > 1.5


def test_the_back_off_starts_anew_after_a_healthy_minute() -> None:
    """A child that ran for STABLE_S was healthy: its next crash waits as briefly as the first, and earlier boot failures are forgotten."""
    service = Service("x", python("raise SystemExit(3)"), dict(os.environ), was_ready=True)
    for _ in range(3):
        service.start()
        ended(service)
    assert service.next_start - time.monotonic() > 2 * BACKOFF_FIRST_S
    service.start()
    service.started_at -= STABLE_S
    ended(service)
    assert service.next_start - time.monotonic() <= BACKOFF_FIRST_S
    assert service.boot_failures == 1
    assert not service.hopeless


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


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import no_such_module", "import os; os.kill(os.getpid(), 9)"])
def test_crashing_at_every_start_is_hopeless(program: str) -> None:
    """A service that never came up and crashes again and again stops the stack soon, not when the boot timeout ends."""
    service = Service("x", python(program), dict(os.environ))
    for attempt in range(MAX_BOOT_FAILURES):
        assert not service.hopeless, attempt
        service.start()
        ended(service)
    assert service.hopeless


def test_exits_are_described_in_words() -> None:
    """Signals are named and SIGKILL mentions memory."""
    assert describe_exit(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(2) == "exited with code 2"
    assert describe_exit(-40) == "was killed by signal 40"


def test_a_child_whose_supervisor_is_gone_already_ends() -> None:
    """A supervisor that dies between fork and exec leaves no service behind that nobody would stop."""
    for parent, code in ((os.getpid(), 0), (os.getppid(), 1)):
        with subprocess.Popen(python("pass"), preexec_fn=functools.partial(_die_with, parent)) as child:
            assert child.wait(20) == code


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
    """Segments but the arena are removed and orphaned services are ended; release removes the arena too. Instance a-b is left alone."""
    shm, _ = dirs
    with subprocess.Popen(python("import time; time.sleep(60)")) as orphan:
        dead = Instance("a", *dirs)
        dead.acquire()
        dead.record_children({"gpu_worker": orphan.pid})
        assert dead._lock is not None
        dead._lock.close()  # what the kernel does for a killed process
        others = ["glm53-a-arena-ctl", "glm53-a-b-arena", "glm53-a-b-ctl", "glm53-b-ctl"]
        for name in ("glm53-a-ctl", "glm53-a-ctl.0123.tmp", "glm53-a-arena", "glm53-a-arena.4567.tmp", *others):
            (shm / name).write_bytes(b"x")
        threading.Thread(target=orphan.wait, daemon=True).start()
        heir = Instance("a", *dirs)
        heir.acquire()
        assert sorted(p.name for p in shm.iterdir()) == sorted(["glm53-a-arena", *others])
        assert wait_for(lambda: orphan.poll() is not None)
        heir.release()
        assert sorted(p.name for p in shm.iterdir()) == others


def test_orphans_that_drain_are_ended_before_their_arena_is_looked_at(dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two services that ignore SIGTERM, as a worker with streams does for a while: both are killed, and the arena's lock is free."""
    monkeypatch.setattr(instance_module, "ORPHANS_TERM_S", 0.3)
    shm, _ = dirs
    arena = shm / "glm53-a-arena"
    dead = Instance("a", *dirs)
    dead.acquire()
    arena.write_bytes(b"x")
    stubborn = (
        "import fcntl, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); file = open(sys.argv[1], 'rb');"
        "fcntl.flock(file, fcntl.LOCK_SH); print('ready', flush=True); time.sleep(60)"
    )
    with contextlib.ExitStack() as stack:
        orphans = [stack.enter_context(subprocess.Popen([*python(stubborn), str(arena)], stdout=subprocess.PIPE)) for _ in range(2)]
        for orphan in orphans:
            assert orphan.stdout is not None
            assert orphan.stdout.readline() == b"ready\n"
            threading.Thread(target=orphan.wait, daemon=True).start()
        dead.record_children({"gpu_worker": orphans[0].pid, "cpu_expert": orphans[1].pid})
        assert dead._lock is not None
        dead._lock.close()
        heir = Instance("a", *dirs)
        heir.acquire()
        assert wait_for(lambda: all(orphan.poll() == -signal.SIGKILL for orphan in orphans))
        heir.release()


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


@pytest.mark.parametrize("left", ["", "gpu_worker 17", "gpu_worker", "gpu_worker x y", "gpu_wor\0", "a b c d"])
def test_a_damaged_list_of_children_does_not_stop_a_start(dirs: tuple[Path, Path], left: str) -> None:
    """What a server left that was killed while it wrote is passed over; the next server starts."""
    dirs[1].mkdir()
    (dirs[1] / "children").write_text(left)
    heir = Instance("a", *dirs)
    heir.acquire()
    assert not (dirs[1] / "children").exists()
    heir.release()


def test_a_child_that_is_gone_already_is_not_recorded(dirs: tuple[Path, Path]) -> None:
    """A process that ended before it could be written down leaves no half line."""
    instance = Instance("a", *dirs)
    instance.acquire()
    with subprocess.Popen(python("pass")) as gone:
        gone.wait()
    instance.record_children({"gpu_worker": gone.pid, "gateway": os.getpid()})
    lines = (dirs[1] / "children").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["gateway", str(os.getpid())]]
    instance.release()


def test_a_lock_file_that_was_removed_meanwhile_excludes_nobody(dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened the lock just before its holder removed it locks the new file, not the removed one."""
    first, late = Instance("a", *dirs), Instance("a", *dirs)
    first.acquire()
    real = fcntl.flock

    def flock(file: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.release()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    late.acquire()
    with pytest.raises(ConfigError, match="already served"):
        Instance("a", *dirs).acquire()
    late.release()


def test_segments_of_a_running_worker_of_another_server_are_left_alone(dirs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two state folders, one instance name: the second server is refused, and takes nothing away from the first."""
    shm, _ = dirs
    (shm / "glm53-a-ctl").write_bytes(b"x")
    with (shm / "glm53-a-arena").open("wb") as arena:
        fcntl.flock(arena, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="running worker of another server"):
            Instance("a", shm, tmp_path / "other").acquire()
        assert sorted(p.name for p in shm.iterdir()) == ["glm53-a-arena", "glm53-a-ctl"]
    heir = Instance("a", shm, tmp_path / "other")
    heir.acquire()
    heir.release()


def test_folders_that_cannot_be_used_are_named_with_their_setting(tmp_path: Path) -> None:
    """A missing tmpfs, a state folder that cannot be made and one too long for a socket are settings errors with value and fix."""
    (tmp_path / "file").write_text("")
    (tmp_path / "locked" / "lock").mkdir(parents=True)
    writable, long = "a folder that this user can make and write to", tmp_path / ("x" * 110)
    for shm, state, start, fix in (
        (tmp_path / "missing", tmp_path / "state", f"GLM53_SHM_DIR is {tmp_path}/missing, ", ": name a tmpfs"),
        (tmp_path / "file", tmp_path / "state", f"GLM53_SHM_DIR is {tmp_path}/file, ", ": name a tmpfs"),
        (tmp_path, tmp_path / "file", f"GLM53_STATE_DIR is {tmp_path}/file: ", f": name {writable}"),
        (tmp_path, tmp_path / "file" / "state", f"GLM53_STATE_DIR is {tmp_path}/file/state: ", f": name {writable}"),
        (tmp_path, tmp_path / "locked", f"GLM53_STATE_DIR is {tmp_path}/locked: cannot open {tmp_path}/locked/lock", f": name {writable}"),
        (tmp_path, long, f"GLM53_STATE_DIR is {long}: ", ": name a shorter one"),
    ):
        with pytest.raises(ConfigError) as caught:
            Instance("a", shm, state).acquire()
        assert caught.value.param == start.split()[0]
        assert caught.value.message.startswith(start)
        assert caught.value.message.endswith(fix)


def test_a_state_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it could put a lock or a socket of their own there."""
    (tmp_path / "state").mkdir()
    mine = os.getuid()
    if mine == 0:
        os.chown(tmp_path / "state", 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match=r"^GLM53_STATE_DIR is .*/state: the folder belongs to another user \(\d+\): name a folder that"):
        Instance("a", tmp_path, tmp_path / "state").acquire()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def gateway(port: int, *answers: dict[str, object]) -> str:
    """A program that answers /health with `answers`, one after the other, the last one for ever; "ok" as status is a 200."""
    return f"""
import http.server, json, signal, threading
answers = {list(answers)!r}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(200 if answer["status"] == "ok" else 503)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *args):
        pass
signal.signal(signal.SIGTERM, lambda *a: exit(0))
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


READY = {"status": "ok", "model": "m", "mode": "fast", "mode_reason": "it fits"}

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, lambda *a: exit(0)); time.sleep(60)"


def supervisor(tmp_path: Path, port: int, settings: dict[str, str] | None = None, **programs: str) -> Supervisor:
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "PORT": str(port),
        "GLM53_SHM_DIR": str(shm),
        "GLM53_STATE_DIR": str(tmp_path / "state"),
        "GLM53_BOOT_TIMEOUT_S": "20",
        **(settings or {}),
    }
    return Supervisor(ServeSettings.load(env), env, {name: python(code) for name, code in programs.items()})


@pytest.mark.parametrize("code", [3, 78])
def test_a_boot_failure_stops_everything_with_its_code(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """`glm53 serve` exits with the code of the service that could not start, says at the end which it was, and leaves nothing behind."""
    run = supervisor(tmp_path, free_port(), gpu_worker=f"raise SystemExit({code})", gateway=SLEEP)
    assert run.run() == code
    assert caplog.messages[-1].startswith(f"stopped: gpu_worker could not start (exited with code {code}): see its last ERROR")
    assert not (tmp_path / "state" / "children").exists()


@pytest.fixture
def heard(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that is not ignored, also where the tests run under nohup (which the server respects: it would go on)."""
    number: signal.Signals = request.param
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    yield number
    signal.signal(number, before)


# Ends after its second SIGTERM, half a second later, and says so.
STUBBORN = """
import pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *a: heard.append(1))
while len(heard) < {after}:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path({done!r}).write_text("told its clients")
"""


@pytest.mark.parametrize(("after", "signals", "told"), [(2, 2, True), (9, 3, False)], ids=["two", "three"])
def test_a_second_signal_lets_the_gateway_say_its_last_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, after: int, signals: int, told: bool
) -> None:
    """It is passed on, and the service ends in its own way; a third one kills what still runs. Nothing waits for the drain's time."""
    done = tmp_path / "done"
    run = supervisor(
        tmp_path, free_port(), {"GLM53_DRAIN_TIMEOUT_S": "300"}, gpu_worker=SLEEP, gateway=STUBBORN.format(after=after, done=str(done))
    )
    caplog.set_level("INFO")

    def press() -> None:
        gateway = run._services[-1]
        assert wait_for(lambda: gateway.running and time.monotonic() - gateway.started_at > 1.0, 20)
        for number in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_for(lambda number=number: number == 0 or "second signal" in caplog.text)
            time.sleep(0.5)

    began = time.monotonic()
    thread = threading.Thread(target=press)
    thread.start()
    assert run.run() == ExitCode.OK
    thread.join()
    assert time.monotonic() - began < 100
    assert done.exists() == told
    assert not any(service.running for service in run._services)


@pytest.mark.parametrize("address", ["127.0.0.1:31555", "[::1]:31555", "unix:/tmp/glm53-test-worker.sock"])
def test_a_worker_address_of_the_users_is_honoured(tmp_path: Path, address: str) -> None:
    """The services are told the address that was set; without one a socket of the instance's own."""
    for given, expected in ({"GLM53_WORKER_ADDRESS": address}, address), ({}, f"unix:{tmp_path}/state/worker.sock"):
        run = supervisor(tmp_path, free_port(), given, gpu_worker=SLEEP, gateway=SLEEP)
        assert {service.env["GLM53_WORKER_ADDRESS"] for service in run._services} == {expected}


@pytest.mark.parametrize("address", ["a:1,b:2", "dns:///workers:30051", "127.0.0.1:0", "127.0.0.1", "unix:relative"])
def test_a_worker_address_that_no_single_worker_can_have_is_refused(tmp_path: Path, address: str) -> None:
    """Lists and names are for gateways of their own: said so, not silently replaced."""
    with pytest.raises(ConfigError, match=r"GLM53_WORKER_ADDRESS.*python -m services\.gateway"):
        supervisor(tmp_path, free_port(), {"GLM53_WORKER_ADDRESS": address}, gateway=SLEEP)


def test_an_orderly_end_leaves_no_folder(tmp_path: Path) -> None:
    """The folders that we name ourselves go when they are empty; what somebody else keeps there, and folders of the user's, stay."""
    shm = tmp_path / "shm"
    shm.mkdir()
    ours, theirs = tmp_path / "glm53-0" / "p1", tmp_path / "glm53-0" / "p2"
    instance = Instance("p1", shm, ours, own_folder=True)
    other = Instance("p2", shm, theirs, own_folder=True)
    instance.acquire()
    other.acquire()
    instance.release()
    assert not ours.exists()
    (theirs / "notes").write_text("mine")
    other.release()
    assert [path.name for path in theirs.iterdir()] == ["notes"]
    (theirs / "notes").unlink()
    other.acquire()
    other.release()
    assert not theirs.parent.exists()
    given = Instance("a", shm, theirs)
    given.acquire()
    given.release()
    assert theirs.is_dir()


def test_servers_that_come_and_go_do_not_take_each_others_folder(tmp_path: Path) -> None:
    """One removes the common folder while the other makes its lock there."""
    shm = tmp_path / "shm"
    shm.mkdir()
    problems: list[Exception] = []

    def come_and_go(name: str) -> None:
        try:
            for _ in range(200):
                instance = Instance(name, shm, tmp_path / "glm53-0" / name, own_folder=True)
                instance.acquire()
                instance.release()
        except (ConfigError, OSError) as problem:
            problems.append(problem)

    threads = [threading.Thread(target=come_and_go, args=(f"p{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize("heard", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], indirect=True)
def test_crashed_services_come_back_and_a_signal_stops_all(tmp_path: Path, caplog: pytest.LogCaptureFixture, heard: signal.Signals) -> None:
    """A killed child is started again; SIGTERM, Ctrl-C and a closed terminal end every child and return 0."""
    marks = tmp_path / "marks"
    code = f"import os; open({str(marks)!r}, 'a').write(str(os.getpid()) + '\\n'); {SLEEP}"
    port = free_port()
    run = supervisor(tmp_path, port, gpu_worker=code, gateway=gateway(port, READY))
    caplog.set_level("INFO")

    def script() -> None:
        assert wait_for(lambda: marks.exists() and marks.read_text().count("\n") == 1)
        assert wait_for(lambda: "loaded in" in caplog.text)
        os.kill(int(marks.read_text().split()[0]), signal.SIGKILL)
        assert wait_for(lambda: marks.read_text().count("\n") == 2)
        os.kill(os.getpid(), heard)

    thread = threading.Thread(target=script)
    thread.start()
    assert run.run() == ExitCode.OK
    thread.join()
    assert "was killed by SIGKILL" in caplog.text
    assert all(not s.running for s in run._services)


def test_services_stop_in_the_order_of_those_who_need_them(tmp_path: Path) -> None:
    """The gateway, the engine that its streams come from, the CPU lane of that engine."""
    marks = tmp_path / "marks"
    code = {
        name: f"""
import pathlib, signal, time
def end(*_):
    with open({str(marks)!r}, "a") as file:
        file.write("{name} ")
    exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(tmp_path / name)!r}).touch()
time.sleep(60)
"""
        for name in ("gpu_worker", "cpu_expert", "gateway")
    }
    run = supervisor(tmp_path, free_port(), **code)
    thread = stop_when(lambda: all((tmp_path / name).exists() for name in code))
    assert run.run() == ExitCode.OK
    thread.join()
    assert marks.read_text().split() == ["gateway", "gpu_worker", "cpu_expert"]


def stop_when(condition: Callable[[], bool]) -> threading.Thread:
    """Sends SIGTERM to this process once `condition` holds, or after the usual wait."""

    def script() -> None:
        wait_for(condition)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=script)
    thread.start()
    return thread


def test_loading_shows_its_steps_and_then_the_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each step that /health names is logged once, with the progress; then the mode with its reason."""
    port = free_port()
    layer = {"status": "loading", "progress": 0.25, "step": "experts of layer 3"}
    run = supervisor(tmp_path, port, gateway=gateway(port, {"status": "unreachable", "reason": "no socket"}, layer, layer, READY))
    caplog.set_level("INFO")
    thread = stop_when(lambda: "mode fast" in caplog.text)
    assert run.run() == ExitCode.OK
    thread.join()
    assert [m for m in caplog.messages if m.startswith("loading")] == ["loading: 25% experts of layer 3"]
    assert "mode fast: it fits" in caplog.messages


def test_a_checkpoint_that_the_gateway_cannot_use_stops_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What no waiting heals ends the start with the boot code and its reason, not with the boot timeout."""
    port = free_port()
    answer = {"status": "unreachable", "reason": "chat_template.jinja line 3: no end", "broken": True}
    run = supervisor(tmp_path, port, gpu_worker=SLEEP, gateway=gateway(port, answer))
    assert run.run() == ExitCode.BOOT
    assert "chat_template.jinja line 3: no end" in caplog.text


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """What already answers on our port is not taken for our gateway."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = supervisor(tmp_path, port, gpu_worker=f"open({str(tmp_path / 'started')!r}, 'w')")
        with pytest.raises(ConfigError, match=f"{port}: Address already in use"):
            run.run()
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "state" / "lock").exists()


def test_a_proxy_is_not_asked_for_our_own_health(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """http_proxy of the environment does not keep the supervisor from seeing that its gateway is ready."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = free_port()
    run = supervisor(tmp_path, port, gateway=gateway(port, READY))
    caplog.set_level("INFO")
    thread = stop_when(lambda: "loaded in" in caplog.text)
    assert run.run() == ExitCode.OK
    thread.join()
    assert "loaded in" in caplog.text


def test_a_closed_output_does_not_end_the_server(tmp_path: Path) -> None:
    """`glm53 serve | head -1`: printing into a pipe without reader is survived, and the exit code is the server's own."""
    port = free_port()
    program = (
        "import os, sys; from cli.serve import Supervisor; from cli.settings import ServeSettings; env = dict(os.environ);"
        "from services.common.logs import configure_logging; configure_logging('serve');"
        f"sys.exit(Supervisor(ServeSettings.load(env), env, {{'gateway': [sys.executable, '-c', {gateway(port, READY)!r}]}}).run())"
    )
    (tmp_path / "shm").mkdir()
    env = {**os.environ, "PORT": str(port), "GLM53_SHM_DIR": str(tmp_path / "shm"), "GLM53_STATE_DIR": str(tmp_path / "state")}
    reader, writer = os.pipe()
    os.close(reader)
    log = tmp_path / "log"
    with log.open("wb") as errors, subprocess.Popen([sys.executable, "-c", program], env=env, stdout=writer, stderr=errors) as server:
        os.close(writer)
        assert wait_for(lambda: "mode fast" in log.read_text()), log.read_text()
        # A server that died of the print that follows would be gone by then.
        assert not wait_for(lambda: server.poll() is not None, 1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == ExitCode.OK, log.read_text()
    assert "Traceback" not in log.read_text()


WORKER = """
import os, signal
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
signal.signal(signal.SIGTERM, lambda *a: os._exit(0))
server = grpc.server(futures.ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.{status})
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(os.environ["GLM53_WORKER_ADDRESS"])
server.start()
server.wait_for_termination()
"""

QUICK = {"GLM53_LIVENESS_PERIOD_S": "0.3", "GLM53_LIVENESS_CHECKS": "3"}


@pytest.mark.parametrize("wedged", ["gateway", "gpu_worker"])
def test_a_service_that_lives_but_does_not_answer_is_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture, wedged: str) -> None:
    """A gateway or worker that served and then left the questions unanswered is killed with a log line, and comes back."""
    port = free_port()
    programs = {"gpu_worker": WORKER.format(status="SERVING"), "gateway": gateway(port, READY)}
    run = supervisor(tmp_path, port, QUICK, **programs)
    caplog.set_level("INFO")
    services = {service.name: service for service in run._services}
    pids: list[int] = []

    def script() -> None:
        assert run._liveness is not None
        liveness = run._liveness
        if wait_for(lambda: wedged in liveness._served, 30):
            pids.append(liveness._served[wedged])
            os.kill(pids[0], signal.SIGSTOP)
            wait_for(lambda: services[wedged].restarts == 1 and liveness._served.get(wedged) not in (None, pids[0]), 30)
            pids.append(liveness._served[wedged])
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=script)
    thread.start()
    assert run.run() == ExitCode.OK
    thread.join()
    assert f"{wedged} left 3 questions in a row unanswered (one every 0.3 s): killing it" in caplog.text
    assert f"{wedged} was killed, since it did not answer" in caplog.text
    assert len(set(pids)) == 2
    assert all(service.restarts == (service.name == wedged) for service in run._services)


@pytest.mark.alone
def test_a_frozen_probe_is_replaced_and_a_frozen_worker_still_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP of the probe, then of the worker: the probe is killed with a log line, its successor finds the worker silent."""
    port = free_port()
    run = supervisor(tmp_path, port, QUICK, gpu_worker=WORKER.format(status="SERVING"), gateway=gateway(port, READY))
    caplog.set_level("INFO")
    services = {service.name: service for service in run._services}
    probes: list[int] = []

    def script() -> None:
        liveness = run._liveness
        assert liveness is not None
        if wait_for(lambda: len(liveness._served) == 2, 30):
            assert liveness._child is not None
            probes.append(liveness._child.pid)
            os.kill(probes[0], signal.SIGSTOP)
            worker = liveness._served["gpu_worker"]
            os.kill(worker, signal.SIGSTOP)
            wait_for(lambda: services["gpu_worker"].restarts == 1 and liveness._served["gpu_worker"] != worker, QUIET_S + 30)
            probes.append(liveness._child.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=script)
    thread.start()
    assert run.run() == ExitCode.OK
    thread.join()
    assert caplog.text.count("the liveness probe said nothing of") == 1
    assert "gpu_worker left 3 questions in a row unanswered (one every 0.3 s): killing it" in caplog.text
    assert len(set(probes)) == 2
    assert {service.name: service.restarts for service in run._services} == {"gpu_worker": 1, "gateway": 0}


def test_a_probe_that_is_silent_about_one_service_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """A thread of it may end or hang alone. One that speaks, or has only just been started, is left alone."""
    with contextlib.closing(
        Liveness({"gateway": "http://127.0.0.1:1", "gpu_worker": "http://127.0.0.1:1"}, 0.1, 3, os.environ)
    ) as liveness:
        liveness.wedged({})
        first = liveness._child
        assert first is not None
        assert wait_for(lambda: bool(liveness.wedged({}) or max(liveness._heard.values()) < time.monotonic()))
        assert not wait_for(lambda: bool(liveness.wedged({}) or first.poll() is not None), 0.5)
        lines = liveness._lines
        liveness._lines = lambda: [line for line in lines() if line.startswith("gateway")]  # type: ignore[method-assign]
        liveness._heard["gpu_worker"] -= QUIET_S
        assert wait_for(lambda: bool(liveness.wedged({}) or liveness._child is not first))
    assert f"the liveness probe said nothing of gpu_worker for {QUIET_S:g} s: killing it" in caplog.text


def told(*lines: str) -> tuple[Liveness, list[str]]:
    """A liveness count that hears these lines one by one."""
    heard = list(lines)
    liveness = Liveness({"gateway": "http://nowhere", "gpu_worker": "unix:/nowhere"}, 1.0, 3, {})
    liveness._lines = lambda: [heard.pop(0)] if heard else []  # type: ignore[method-assign]
    return liveness, heard


def test_only_what_has_served_can_be_wedged() -> None:
    """Silence while loading, after a restart, or with answers in between ends nobody; three silent questions after serving do, once."""
    silent = ["gateway silent"] * 3
    liveness, heard = told(*silent, "gateway alive", *silent, "gateway serving", *silent[:2], "gateway alive", *silent, *silent[:2])
    found = []
    while heard:
        found += [(len(heard), *one) for one in liveness.wedged({"gateway": 7, "gpu_worker": 8})]
    assert found == [(2, "gateway", 3)]
    liveness, heard = told("gateway serving", *silent)
    liveness.wedged({"gateway": 7})
    while heard:
        assert liveness.wedged({"gateway": 9}) == []  # another process of it, which has not served yet
    liveness, heard = told("gateway serving", *silent)
    while heard:
        assert liveness.wedged({}) == []  # it does not run: the restart is under way already


def test_a_probe_tells_serving_alive_and_silent(tmp_path: Path) -> None:
    """Real questions to real services: a gateway that answers, one that is not there, a worker that serves, one that only lives."""
    port = free_port()
    ready = tmp_path / "ready.sock"
    loading = tmp_path / "loading.sock"
    programs = {
        gateway(port, READY): {},
        WORKER.format(status="SERVING"): {"GLM53_WORKER_ADDRESS": f"unix:{ready}"},
        WORKER.format(status="NOT_SERVING"): {"GLM53_WORKER_ADDRESS": f"unix:{loading}"},
    }
    children = [subprocess.Popen(python(code), env={**os.environ, **env}) for code, env in programs.items()]
    targets = {
        "a": f"http://127.0.0.1:{port}/health/live",
        "b": f"http://127.0.0.1:{free_port()}/health/live",
        "c": f"unix:{ready}",
        "d": f"unix:{loading}",
    }
    command = [sys.executable, "-m", "cli.probe", "0.5", *(f"{name}={address}" for name, address in targets.items())]
    wanted = {"a": probe.SERVING, "b": probe.SILENT, "c": probe.SERVING, "d": probe.ALIVE}
    found: dict[str, str] = {}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            for line in asking.stdout:
                name, _, state = line.strip().partition(" ")
                found[name] = state
                if found == wanted:
                    break
            asking.kill()
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert found == wanted


def test_a_probe_that_never_spoke_has_longer_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine's probe is not killed for ever before its first word; once one has spoken it is as before."""
    monkeypatch.setattr("cli.liveness.RESTART_PROBE_AFTER_S", 0.0)
    target = {"gateway": "http://127.0.0.1:1"}
    with contextlib.closing(Liveness(target, 0.1, 3, os.environ)) as liveness:
        liveness._command = [sys.executable, "-c", "import time; time.sleep(60)"]
        for wait in (20.0, 40.0, 80.0):
            liveness._start()
            assert liveness._heard["gateway"] - time.monotonic() == pytest.approx(wait, abs=5.0)
        liveness._lines = lambda: ["gateway serving"]  # type: ignore[method-assign]
        liveness.wedged({"gateway": 1})
        liveness._start()
        assert liveness._heard["gateway"] - time.monotonic() == pytest.approx(20.0, abs=5.0)


def test_a_probe_that_does_not_end_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a disk, say, ends when that answers."""
    with contextlib.closing(Liveness({"gateway": "http://127.0.0.1:1"}, 0.1, 3, os.environ)) as liveness:
        liveness.wedged({})
        child = liveness._child
        assert child is not None

        def never(timeout: float) -> int:
            raise subprocess.TimeoutExpired("probe", timeout)

        monkeypatch.setattr(child, "wait", never)
        liveness.close()
        assert liveness._child is None
    monkeypatch.undo()
    child.wait(10)


def test_what_is_no_http_is_no_sign_of_life() -> None:
    """Another program on the gateway's port, say: the question ends, and the probe goes on asking."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"what do you want\r\n\r\n")

        talking = threading.Thread(target=talk)
        talking.start()
        assert probe.ask_gateway(f"http://127.0.0.1:{server.getsockname()[1]}/health/live", 5.0) == probe.SILENT
        talking.join(5)


@pytest.mark.e2e
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0])
def test_ctrl_c_right_after_the_start_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    """Ctrl-C at any moment of the first two seconds after Python itself is up: no traceback, no process and no segment left."""
    shm = tmp_path / "shm"
    shm.mkdir()
    env = {
        **os.environ,
        "GLM53_SHM_DIR": str(shm),
        "GLM53_STATE_DIR": str(tmp_path / "state"),
        "GLM53_WORKER_ADDRESS": "",
    }
    command = [sys.executable, "-m", "cli.start", "serve", "--port", str(free_port())]
    with (tmp_path / "log").open("w+b") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        assert wait_for(lambda: catches_sigint(server.pid), 20, 0.001)  # Python's own handler
        assert wait_for(lambda: not catches_sigint(server.pid), 20, 0.001)  # ours is none, until `serve` takes over
        time.sleep(after_s)
        children = pids_below(server.pid)
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert "KeyboardInterrupt" not in text
    assert code in (0, -signal.SIGINT), text
    assert list(shm.iterdir()) == []
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children)), text


def catches_sigint(pid: int) -> bool:
    """True when the process has a handler for Ctrl-C."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def pids_below(pid: int) -> list[int]:
    """The direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
