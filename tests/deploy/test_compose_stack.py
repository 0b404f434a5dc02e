"""The compose stack, really run: healthy, reachable, hardened; each container killed in turn; nothing left at the end.

The tests run in the order in which they stand and share one stack, as a deployment's days do.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.deploy import images
from tests.deploy.engine import LAB, until
from tests.deploy.stack import PROJECT, RECOVER_S, SERVICES, Stack, get

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# A request is over within this time, whatever is killed: it ends well or with an error, it never hangs.
OVER_S = 45.0


def ask(stack: Stack) -> str:
    """One greedy answer through the published port."""
    with stack.client() as client:
        answer = client.chat.completions.create(model="glm-5.3-tiny", messages=QUESTION, temperature=0, max_tokens=64)
    return str(answer.choices[0].message.content)


def ask_streaming(stack: Stack) -> str:
    """The same, streamed."""
    with (
        stack.client() as client,
        client.chat.completions.create(model="glm-5.3-tiny", messages=QUESTION, temperature=0, max_tokens=64, stream=True) as stream,
    ):
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def stats(stack: Stack) -> dict[str, Any]:
    """The engine's counters, through the gateway."""
    return dict(json.loads(get(f"{stack.api}/stats")[1]))


class Traffic:
    """Clients that ask and ask again while something breaks; remembers every answer, every error, and the slowest of all."""

    def __init__(self, stack: Stack, clients: int = 2) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.answers: list[str] = []
        self.errors: list[str] = []
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._run, args=(index % 2 == 0,), daemon=True) for index in range(clients)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.answers) >= len(self._threads), "clients get answers", OVER_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(OVER_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def _run(self, streamed: bool) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.answers.append((ask_streaming if streamed else ask)(self._stack))
            except openai.APIError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


@pytest.fixture(scope="module")
def answer(running: Stack) -> str:
    """What the undisturbed stack says."""
    text = ask(running)
    assert "Paris" in text
    return text


def test_every_service_is_healthy(running: Stack) -> None:
    """`up --wait` returned, and the engine says healthy of each."""
    assert {name: running.health(name) for name in SERVICES} == dict.fromkeys(SERVICES, "healthy")


def test_the_doctor_finds_nothing_in_running_containers(running: Stack) -> None:
    """Each service reaches what it needs, Redis above all, which nobody misses; and its own ports and records are no fault."""
    for name, service in (("gateway", "gateway"), ("gpu-worker-cpu", "gpu-worker"), ("cpu-expert", "cpu-expert")):
        found = json.loads(running.compose("exec", "-T", name, "python", "-m", "cli.doctor", "--for", service, "--json"))
        assert [finding for finding in found if finding["level"] != "ok"] == [], name
    # One late answer of Redis is told until the next one: what stays is a Redis that is not reached.
    until(lambda: "degraded" not in json.loads(get(f"{running.api}/health")[1]), "Redis is reached", 30)


def test_an_openai_client_is_served_through_the_published_port(running: Stack, answer: str) -> None:
    """Streaming and not, the same answer; the expert records are shared with cpu_expert, which has computed some."""
    assert ask_streaming(running) == answer
    assert stats(running)["cpu_tier"]["picks"] > 0


def test_containers_got_what_the_file_asks_for(running: Stack) -> None:
    """Read-only, unprivileged, without capabilities, memory without swap, on the CPUs given, on one tmpfs."""
    for name in SERVICES:
        found = running.engine.inspect(running.container(name))
        host: dict[str, Any] = found["HostConfig"]
        assert host["ReadonlyRootfs"], name
        assert host["Memory"] == host["MemorySwap"] > 0, name
        assert not found.get("EffectiveCaps"), name
    status = running.compose("exec", "-T", "gpu-worker-cpu", "python", "-c", "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] == "10001"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"].strip() == "1"
    expert = running.compose("exec", "-T", "cpu-expert", "python", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    assert expert.strip() == f"[{running.env['EXPERT_CPUS']}]"
    listings = [
        running.compose("exec", "-T", name, "python", "-c", "import os; print(sorted(os.listdir('/dev/shm')), os.stat('/dev/shm').st_dev)")
        for name in ("gpu-worker-cpu", "cpu-expert")
    ]
    assert listings[0] == listings[1]
    assert "glm53-default-arena" in listings[0]


def test_nothing_listens_beyond_this_machine(running: Stack) -> None:
    """The published ports answer on 127.0.0.1 and nowhere else; the worker's are not published."""
    for name in SERVICES:
        ports = running.engine.inspect(running.container(name))["NetworkSettings"]["Ports"] or {}
        addresses = {binding["HostIp"] for bindings in ports.values() for binding in bindings or []}
        assert addresses <= {"127.0.0.1"}, name


def test_prometheus_scrapes_every_target(running: Stack, answer: str) -> None:
    """All targets are up, and the tokens that were just sampled are counted."""
    assert answer
    until(lambda: set(running.targets().values()) == {"up"}, f"all targets are up: {running.targets()}", 60)
    assert {"gateway", "gpu-worker", "cpu-expert", "prometheus"} <= set(running.targets())
    until(lambda: running.value("glm53_decode_tokens_total") > 0, "tokens are counted", 30)
    until(lambda: running.value("glm53_cpu_expert_picks_total") > 0, "picks of cpu_expert are counted", 30)


def test_cpu_expert_may_die_under_load(running: Stack, answer: str) -> None:
    """No request fails and no token changes; the container is restarted and its lane comes back."""
    restarts = running.restarts("cpu-expert")
    with Traffic(running) as traffic:
        running.crash("cpu-expert")
        running.wait_recovered("cpu-expert", restarts)
        until(lambda: stats(running)["cpu_tier"]["state"] == "UP", "the CPU lane is back", 60)
    assert traffic.errors == []
    assert set(traffic.answers) == {answer}
    assert traffic.slowest_s < OVER_S


def test_the_arena_outlives_the_worker(running: Stack, answer: str) -> None:
    """The worker dies under load: open requests end with an error, none hangs; the next worker re-attaches the records."""
    restarts = running.restarts("gpu-worker-cpu")
    before = running.logs("gpu-worker-cpu").count("re-attached")
    with Traffic(running) as traffic:
        running.crash("gpu-worker-cpu")
        running.wait_recovered("gpu-worker-cpu", restarts)
        count = len(traffic.answers)
        until(lambda: len(traffic.answers) > count + 1, "clients are served again", 60)
    assert traffic.errors, "requests that were open when the worker died must have been told"
    assert set(traffic.answers) <= {answer}
    assert traffic.slowest_s < OVER_S
    assert running.logs("gpu-worker-cpu").count("re-attached") > before


def test_a_worker_that_comes_back_elsewhere_is_found_at_once(running: Stack) -> None:
    """A container that was stopped and started has another address: the gateway asks for it again, and waits for no old answer's age."""

    def address() -> str:
        networks = running.engine.inspect(running.container("gpu-worker-cpu"))["NetworkSettings"]["Networks"]
        return next(str(network["IPAddress"]) for network in networks.values())

    before = address()
    running.compose("stop", "gpu-worker-cpu")
    running.compose("start", "gpu-worker-cpu")
    until(lambda: running.health("gpu-worker-cpu") == "healthy", "the worker is healthy again", RECOVER_S, 0.3)
    began = time.monotonic()
    until(running.ready, "the gateway is ready", RECOVER_S, 0.1)
    assert time.monotonic() - began < 8
    assert address() != before, "podman gave it the same address: this shows nothing"


def test_the_gateway_may_die(running: Stack, answer: str) -> None:
    """Its connections break; it is restarted and serves; the worker has no stream left over."""
    restarts = running.restarts("gateway")
    with Traffic(running) as traffic:
        running.crash("gateway")
        running.wait_recovered("gateway", restarts)
    assert traffic.errors
    assert set(traffic.answers) <= {answer}
    assert ask(running) == answer
    until(lambda: stats(running)["engine"]["running_requests"] == 0, "the worker has let go of every stream", 15)


def test_redis_may_die(running: Stack, answer: str) -> None:
    """Nobody notices: limits are counted locally until it is back."""
    restarts = running.restarts("redis")
    with Traffic(running) as traffic:
        running.crash("redis")
        running.wait_recovered("redis", restarts)
    assert traffic.errors == []
    assert set(traffic.answers) == {answer}


def test_prometheus_may_die(running: Stack, answer: str) -> None:
    """It keeps what it has scraped and scrapes on."""
    assert ask(running) == answer
    restarts = running.restarts("prometheus")
    running.crash("prometheus")
    running.wait_recovered("prometheus", restarts)
    until(lambda: set(running.targets().values()) == {"up"}, "all targets are up again", 60)


def test_stopping_the_gateway_lets_running_streams_end(running: Stack, answer: str) -> None:
    """The drain of docs/operations.md: a stream that is open when the gateway is told to stop gets its whole answer."""
    assert answer
    with (
        running.client() as client,
        client.chat.completions.create(
            model="glm-5.3-tiny", messages=QUESTION, temperature=0, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        ) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        chunks = iter(stream)
        next(chunks)
        stopped = pool.submit(running.compose, "stop", "gateway")
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        stopped.result()
    assert reasons == ["length"]
    assert running.engine.inspect(running.container("gateway"))["State"]["ExitCode"] == 0
    running.compose("start", "gateway")
    until(running.ready, "the gateway is ready again", RECOVER_S, 0.3)


def test_another_size_of_shared_memory_is_one_setting(running: Stack, answer: str) -> None:
    """SHM_SIZE and `up --wait`: both containers have the new size, and the stack serves."""
    running.env |= {"SHM_SIZE": "192m", "SHM_PAGES": str((192 << 20) // os.sysconf("SC_PAGE_SIZE"))}
    running.up()
    for name in ("gpu-worker-cpu", "cpu-expert"):
        code = "import os; found = os.statvfs('/dev/shm'); print(found.f_blocks * found.f_frsize >> 20)"
        assert running.compose("exec", "-T", name, "python", "-c", code).strip() == "192", name
    running.engine.podman("volume", "rm", f"{PROJECT}-shm-128m")
    assert ask(running) == answer


def test_an_upgrade_is_one_setting_and_one_command(running: Stack, built: dict[str, str], answer: str) -> None:
    """IMAGE_TAG and `up --wait` replace what has a new image; the stack serves as before."""
    for target in images.TARGETS:
        running.engine.podman("tag", built[target], built[target].replace(f":{images.TAG}", ":next"))
    before = {name: running.container(name) for name in SERVICES}
    running.env["IMAGE_TAG"] = "next"
    running.up()
    replaced = {name for name in SERVICES if running.container(name) != before[name]}
    # podman names images in another way than Compose expects, which therefore makes the others anew too.
    assert replaced >= {"gateway", "gpu-worker-cpu", "cpu-expert"}
    tags = [
        running.engine.inspect(running.container(name))["ImageName"].rpartition(":")[2] for name in sorted(replaced & set(images.TARGETS))
    ]
    assert tags == ["next"] * 3
    until(running.ready, "the gateway is ready again", RECOVER_S, 0.3)
    assert ask(running) == answer


def test_memory_stays_within_its_limits(running: Stack) -> None:
    """After all that, no container was killed for its memory."""
    for name in SERVICES:
        assert not running.engine.inspect(running.container(name))["State"]["OOMKilled"], name


def test_down_leaves_nothing(running: Stack) -> None:
    """No container, network, volume or mount is left; stopping drains, so every service ends with code 0."""
    running.compose("stop", timeout_s=120)
    codes = {name: running.engine.inspect(running.container(name))["State"]["ExitCode"] for name in SERVICES}
    assert codes == dict.fromkeys(SERVICES, 0)
    running.down()
    assert running.engine.podman("ps", "--all", "--quiet") == ""
    assert running.engine.podman("volume", "ls", "--quiet") == ""
    assert PROJECT not in running.engine.podman("network", "ls", "--format", "{{.Name}}")
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    assert not [mount for mount in mounts if mount.startswith(str(LAB / "storage" / "volumes"))]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("glm53-default")]
