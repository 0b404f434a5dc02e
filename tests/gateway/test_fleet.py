"""One gateway in front of several workers, several gateways in front of one."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.errors import ConfigError, NotReady, QueueFull
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.fleet.members import Member, Members, addresses_of
from services.gateway.fleet.metrics import merged
from services.gateway.worker_client import GrpcWorkerClient
from tests.gateway.events import Streamed, stream
from tests.gateway.fake_worker import Fail, FakeWorker, Finish, Forever, Say, Script, Wait
from tests.gateway.stack import Stack, until
from tests.gateway.test_validation import check_error

READY = pb.InfoResponse(state=pb.SERVICE_STATE_READY, checkpoint_hash="a", model_name="m", max_streams=8)


def fixed(names: list[str]) -> Members:
    """Members that are ready and are never asked."""
    members = Members(names, lambda address: GrpcWorkerClient("127.0.0.1:1", 1.0))
    for member in members.all:
        member.info = READY
    return members


def prompts(number: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2000) for _ in range(rng.randrange(1, 200))] for _ in range(number)]


# ---- choosing ------------------------------------------------------------------------------------------------------------------


def test_the_same_beginning_goes_to_the_same_worker() -> None:
    """Prompts that share their first tokens meet, whatever follows; many prompts spread evenly."""
    members = fixed([f"10.0.0.{i}:1" for i in range(4)])
    for prompt in prompts(50):
        first = members.choose(prompt)
        assert members.choose(prompt) is first
        if len(prompt) >= 64:
            assert members.choose([*prompt[:64], 1, 2, 3]) is first
    count = collections.Counter(members.choose(prompt).address for prompt in prompts(4000))
    assert min(count.values()) > 800


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    """Consistent hashing: of the others' prompts none moves; when it is back, all are where they were."""
    members = fixed([f"10.0.0.{i}:1" for i in range(4)])
    before = {i: members.choose(prompt) for i, prompt in enumerate(prompts(500))}
    gone = members.all[2]
    gone.info = None
    for i, prompt in enumerate(prompts(500)):
        now = members.choose(prompt)
        assert now is not gone
        if before[i] is not gone:
            assert now is before[i]
    gone.info = READY
    assert {i: members.choose(prompt) for i, prompt in enumerate(prompts(500))} == before


def test_one_popular_beginning_does_not_overload_its_worker() -> None:
    """Beyond a quarter more than its share the least loaded worker is taken, however well the prompt would fit."""
    members = fixed([f"10.0.0.{i}:1" for i in range(4)])
    for _ in range(100):
        members.choose([1, 2, 3]).running += 1
    loads = sorted(member.running for member in members.all)
    assert loads[-1] <= 1.25 * 101 / 4 + 1
    assert loads[0] >= 20


def test_a_worker_with_another_checkpoint_gets_nothing() -> None:
    """Its tokens would mean something else."""
    members = fixed(["10.0.0.1:1", "10.0.0.2:1"])
    other = pb.InfoResponse()
    other.CopyFrom(READY)
    other.checkpoint_hash = "b"
    members.all[1].info = other
    assert {members.choose(prompt) for prompt in prompts(50)} == {members.all[0]}


def test_without_a_worker_the_reason_is_told() -> None:
    """NotReady with what the last one said."""
    members = fixed(["10.0.0.1:1"])
    members.all[0].lost(NotReady("connection refused"))
    with pytest.raises(NotReady, match="connection refused"):
        members.choose([1])


@pytest.mark.parametrize("setting", ["", "a", "a:", ":1", "a:0", "a:99999", "a:1,", "a:1,a:1", "unix:", "dns:///a:1,b:2", "dns:///a"])
def test_a_wrong_address_is_refused(setting: str) -> None:
    """Names the setting and the forms that there are."""
    with pytest.raises(ConfigError, match="GLM53_WORKER_ADDRESS"):
        addresses_of(setting)


def test_addresses_are_read() -> None:
    """One, several, a socket, a name."""
    assert addresses_of("127.0.0.1:30051") == ["127.0.0.1:30051"]
    assert addresses_of("a:1, unix:/run/w.sock,[::1]:3") == ["a:1", "unix:/run/w.sock", "[::1]:3"]
    assert addresses_of("dns:///workers:30051") == ["dns:///workers:30051"]


# ---- who is there --------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    """Three workers on this event loop."""
    made = [FakeWorker(instance_id=str(i)) for i in range(3)]
    for worker in made:
        await worker.start()
    yield made
    for worker in made:
        worker.frozen = False
        await worker.stop()


async def seen(condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("how", ["dies", "freezes", "drains"])
async def test_a_dead_worker_leaves_the_rotation_within_two_seconds(workers: list[FakeWorker], how: str) -> None:
    """Whether it is gone, answers nothing or says that it drains; once it is back, it gets requests again."""
    members = Members([worker.address for worker in workers], lambda address: GrpcWorkerClient(address, 5.0))
    await members.start()
    assert len(members.ready) == 3
    victim = workers[1]
    if how == "dies":
        await victim.stop()
    elif how == "freezes":
        victim.frozen = True
    else:
        victim.state = pb.SERVICE_STATE_DRAINING
    assert await seen(lambda: len(members.ready) == 2) < 2
    if how == "dies":
        await victim.start()
    victim.frozen, victim.state = False, pb.SERVICE_STATE_READY
    await seen(lambda: len(members.ready) == 3)
    await members.close()


async def test_addresses_behind_a_name_come_and_go(workers: list[FakeWorker]) -> None:
    """A new address gets requests, one that is gone gets none and ends what it runs; a resolver that fails changes nothing."""
    answers: list[list[str]] = [[workers[0].address, workers[1].address]]

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("workers.example", 30051)
        if not answers[-1]:
            raise OSError("no such name")
        return answers[-1]

    members = Members(["dns:///workers.example:30051"], lambda address: GrpcWorkerClient(address, 5.0), resolve)
    await members.start()
    assert {member.address for member in members.ready} == {workers[0].address, workers[1].address}
    kept = next(member for member in members.all if member.address == workers[0].address)
    kept.running += 1
    answers.append([workers[1].address, workers[2].address])
    await seen(lambda: {member.address for member in members.ready} == {workers[1].address, workers[2].address})
    assert kept in members.all
    kept.running -= 1
    await seen(lambda: kept not in members.all)
    answers.append([])
    await asyncio.sleep(1.2)
    assert len(members.ready) == 2
    await members.close()


async def test_the_systems_resolver_finds_localhost(workers: list[FakeWorker]) -> None:
    """Without a resolver of the test's own."""
    port = workers[0].address.rpartition(":")[2]
    members = Members([f"dns:///localhost:{port}"], lambda address: GrpcWorkerClient(address, 5.0))
    await members.start()
    assert workers[0].address in {member.address for member in members.ready}
    await members.close()


# ---- through the gateway -------------------------------------------------------------------------------------------------------


class Fleet:
    """A gateway with two workers."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        starter = Stack(start_worker=True)
        self.starter = starter
        self.workers = [starter.worker, FakeWorker(instance_id="two")]
        starter.run(self.workers[1].start())
        self.stack = Stack(start_worker=False, worker_address=",".join(worker.address for worker in self.workers))
        until(lambda: len(self.members.ready) == 2, "both are there")
        self.say(Say("</think>Hello"), Finish())

    @property
    def members(self) -> Members:
        return self.stack.services.client._client.members  # type: ignore[no-any-return]

    def member(self, worker: FakeWorker) -> Member:
        return next(member for member in self.members.all if member.address == worker.address)

    def say(self, *steps: Any) -> None:
        for worker in self.workers:
            worker.script = Script(steps)

    def ask(self, text: str = "x", **fields: Any) -> httpx.Response:
        return self.stack.post(messages=[{"role": "user", "content": text}], **fields)

    def prompt_for(self, worker: FakeWorker) -> str:
        """A text that prefers a worker."""
        for i in range(200):
            before = len(worker.requests)
            self.ask(f"text {i}")
            if len(worker.requests) > before:
                return f"text {i}"
        raise AssertionError("no prompt goes there")

    def close(self) -> None:
        self.stack.close()
        self.starter.run(self.workers[1].stop())
        self.starter.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def test_both_workers_serve_and_a_conversation_stays(fleet: Fleet) -> None:
    """Different texts reach both; the same text reaches one."""
    for i in range(30):
        assert fleet.ask(f"{i} is a number").status_code == 200
    assert all(len(worker.requests) > 3 for worker in fleet.workers)
    before = [len(worker.requests) for worker in fleet.workers]
    for _ in range(10):
        fleet.ask("always the same")
    assert sorted(len(worker.requests) - n for worker, n in zip(fleet.workers, before, strict=True)) == [0, 10]


def test_a_worker_that_dies_in_mid_load_loses_only_what_it_had_begun(fleet: Fleet) -> None:
    """Whole answers come from the other worker, without a gap; streams that it had begun end with an error and [DONE]; then none goes
    there."""
    fleet.say(Say("</think>a"), Wait(0.1), Say(" b"), Finish())
    victim = fleet.workers[1]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(fleet.ask, f"text {i}", stream=True) for i in range(60)]
        until(lambda: victim.live and len(victim.requests) > 3, "it has work")
        fleet.starter.run(victim.stop())
        answers = [Streamed.of(future.result().content) if future.result().status_code == 200 else None for future in waiting]
    assert None not in answers
    broken = [answer for answer in answers if answer is not None and answer.error is not None]
    assert len(broken) <= 8
    assert all(answer is not None and answer.done for answer in answers)
    assert all(answer.text("content") == "a b" for answer in answers if answer is not None and answer.error is None)
    until(lambda: len(fleet.members.ready) == 1, "it is out", 2)
    assert all(fleet.ask(f"after {i}").status_code == 200 for i in range(10))
    assert [member.running for member in fleet.members.all] == [0, 0]


def test_a_full_worker_sends_its_requests_to_the_other(fleet: Fleet) -> None:
    """Before anything was sent; only when both are full the client hears it, with the shorter wait."""
    first, second = fleet.workers
    text = fleet.prompt_for(first)
    first.script = Script((Fail(QueueFull("full", retry_after_s=9.0)),), admit=False)
    before = len(second.requests)
    assert fleet.ask(text).status_code == 200
    assert len(second.requests) == before + 1
    second.script = Script((Fail(QueueFull("full", retry_after_s=4.0)),), admit=False)
    refused = fleet.ask(text)
    check_error(refused, None, 503)
    assert refused.headers["retry-after"] == "4"


def test_a_generation_that_has_begun_is_never_begun_again(fleet: Fleet) -> None:
    """Its tokens may have been sent: the client hears of the failure."""
    first, second = fleet.workers
    text = fleet.prompt_for(first)
    first.script = Script((Say("</think>a"), Fail(NotReady("gone"))))
    before = len(second.requests)
    check_error(fleet.ask(text), None, 503)
    assert len(second.requests) == before


def test_cancelling_finds_the_worker_that_runs_the_job(fleet: Fleet) -> None:
    """Also for a job of another gateway in front of the same workers."""
    fleet.say(Say("</think>a"), Forever())
    client = fleet.stack.services.client
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(fleet.ask, text) for text in ("one text", "another text")]
        until(lambda: sum(len(worker.live) for worker in fleet.workers) == 2, "both run")
        jobs = [job for worker in fleet.workers for job in worker.live]
        fleet.stack.services.client._client._jobs.pop(jobs[0])
        assert [fleet.stack.run(client.cancel(job)) for job in jobs] == [True, True]
        assert not fleet.stack.run(client.cancel("nothing"))
        assert [answer.result(10).status_code for answer in answers] == [499, 499]


def test_stats_and_metrics_show_every_worker(fleet: Fleet) -> None:
    """One document with the workers beside each other; each metric family once, labelled."""
    document = fleet.stack.http.get("/stats").json()
    assert set(document["workers"]) == {worker.address for worker in fleet.workers}
    families = [f for f in text_string_to_metric_families(fleet.stack.http.get("/metrics").text) if f.name == "glm53_slots"]
    assert len(families) == 1
    assert {sample.labels["worker"] for sample in families[0].samples} == {worker.address for worker in fleet.workers}


def test_vllms_engine_label_counts_the_workers() -> None:
    """Dashboards that sum over `engine` see each worker once; one worker's text is left alone."""
    text = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 2\n'
    both = merged({"a:1": text, "b:1": text}).decode()
    assert 'engine="0"' in both
    assert 'engine="1"' in both
    assert both.count("# TYPE") == 1
    assert merged({"a:1": text}) == text


def test_two_gateways_in_front_of_one_worker_share_its_queue(stack: Stack) -> None:
    """Both serve; the worker sees the requests of both under different ids, and their keys."""
    second = Stack(start_worker=False, worker_address=stack.worker.address, worker_metrics=False)
    try:
        # Scraped once, or dashboards count twice.
        assert "glm53_slots" in stack.http.get("/metrics").text
        assert "glm53_slots" not in second.http.get("/metrics").text
        stack.worker.script = Script((Say("</think>Hello"), Finish()))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: (stack, second)[i % 2].post(), range(40)))
        assert [answer.status_code for answer in answers] == [200] * 40
        ids = [request.request_id for request in stack.worker.requests]
        assert len(set(ids)) == 40
        assert len({json.dumps(answer.json()["choices"]) for answer in answers}) == 1
        assert stream(second).text("content") == "Hello"
    finally:
        second.close()
