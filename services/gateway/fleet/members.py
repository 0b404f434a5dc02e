"""The workers behind one gateway: who they are, who is alive, and who gets the next request."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.common.errors import ConfigError, Glm53Error, NotReady
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.worker_client import WorkerClient

log = logging.getLogger(__name__)

# Asked so often and answered within so long: a dead or frozen worker is out of the rotation within two seconds.
_ASK_INTERVAL_S = 0.5
_ANSWER_S = 1.0
_RESOLVE_INTERVAL_S = 1.0
_RESOLVE_S = 5.0
# Tokens of a prompt that decide which worker most likely has its beginning in memory.
_PREFIX_TOKENS = 64
# A worker takes a request for its prefix's sake only up to so much more than its fair share.
_SLACK = 1.25
DNS = "dns:///"

Resolver = Callable[[str, int], Awaitable[list[str]]]


@dataclass(eq=False)
class Member:
    """One worker.

    Attributes:
        address: host:port or unix:/path.
        client: the way to it.
        info: its last answer, None while it does not answer.
        running: requests that this gateway has there.
        leaving: no longer among the addresses; ends what it runs.
    """

    address: str
    client: WorkerClient
    info: pb.InfoResponse | None = None
    running: int = 0
    leaving: bool = False
    problem: Glm53Error = field(default_factory=lambda: NotReady("the worker has not answered yet"))

    @property
    def is_ready(self) -> bool:
        """True when it takes requests."""
        return self.info is not None and self.info.state == pb.SERVICE_STATE_READY and not self.leaving

    def lost(self, error: Glm53Error) -> None:
        """It did not answer, or broke off: out of the rotation until it answers again."""
        if self.info is not None:
            log.warning("the worker at %s is out: %s", self.address, error.message)
        self.info, self.problem = None, error


class Members:
    """Keeps the list of workers and their health current.

    Args:
        addresses: of the workers; one ``dns:///name:port`` stands for all addresses of that name.
        connect: makes the client of an address.
        resolve: looks a name up; a list of host:port.
    """

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], WorkerClient], resolve: Resolver | None = None) -> None:
        self._connect = connect
        self._resolve = resolve or _resolve
        self._name = addresses[0].removeprefix(DNS) if addresses[0].startswith(DNS) else None
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._started = False
        self._odd: set[str] = set()
        self.all: list[Member] = []
        if self._name is None:
            self._set(addresses)

    @property
    def ready(self) -> list[Member]:
        """Those that take requests and serve the same checkpoint as the first of them."""
        ready = [member for member in self.all if member.is_ready]
        if not ready:
            return []
        served = ready[0].info
        assert served is not None
        same = [member for member in ready if member.info is not None and member.info.checkpoint_hash == served.checkpoint_hash]
        odd = {member.address for member in ready if member not in same}
        if odd - self._odd:
            log.error("these workers serve another checkpoint than %s and get no requests: %s", ready[0].address, ", ".join(sorted(odd)))
        self._odd = odd
        return same

    def choose(self, prompt: Iterable[int], without: Sequence[Member] = ()) -> Member:
        """The worker for a prompt: the one that its beginning is hashed to, unless that has more than its share; then the least loaded.

        Raises:
            NotReady: none is left.
        """
        ready = [member for member in self.ready if member not in without]
        if not ready:
            problem = next((member.problem for member in self.all if member.info is None), None)
            raise NotReady("no worker takes requests" + (f": {problem.message}" if problem else ""), retry_after_s=2.0)
        if len(ready) == 1:
            return ready[0]
        bound = math.ceil(_SLACK * (sum(member.running for member in ready) + 1) / len(ready))
        prefix = _prefix_bytes(prompt)
        preferred = max(ready, key=lambda member: _rank(prefix, member.address))
        if preferred.running < bound:
            return preferred
        return min(ready, key=lambda member: (member.running, -_rank(prefix, member.address)))

    async def start(self) -> None:
        """Asks every worker once, at most as long as one may take to answer, and goes on asking in the background."""
        if self._started:
            return
        self._started = True
        if self._name is not None:
            await self._look_up()
            self._resolving = asyncio.create_task(self._resolve_for_ever())
        for member in self.all:
            self._watch(member)
        await asyncio.gather(*(self.ask(member) for member in self.all))

    async def ask(self, member: Member) -> None:
        """One question about a worker's state."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                info = await member.client.info()
        except TimeoutError:
            member.lost(NotReady(f"the worker at {member.address} did not answer within {_ANSWER_S:g} s", retry_after_s=2.0))
        except Glm53Error as error:
            member.lost(error)
        else:
            if member.info is None:
                log.info("the worker at %s answers", member.address)
            member.info = info

    async def close(self) -> None:
        """Stops asking and lets every connection go."""
        tasks = [*self._tasks.values(), *([self._resolving] if self._resolving else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for member in self.all:
            await member.client.close()

    def _set(self, addresses: Iterable[str]) -> None:
        wanted = dict.fromkeys(addresses)
        for member in self.all:
            if member.address not in wanted and not member.leaving:
                log.info("the worker at %s has left", member.address)
            member.leaving = member.address not in wanted
        known = {member.address for member in self.all}
        for address in wanted:
            if address not in known:
                member = Member(address, self._connect(address))
                self.all.append(member)
                if self._started:
                    self._watch(member)

    def _watch(self, member: Member) -> None:
        self._tasks[member] = asyncio.create_task(self._ask_for_ever(member))

    async def _ask_for_ever(self, member: Member) -> None:
        while not (member.leaving and member.running == 0):
            try:
                await self.ask(member)
            except Exception:
                log.exception("the worker at %s could not be asked", member.address)
            await asyncio.sleep(_ASK_INTERVAL_S)
        self.all.remove(member)
        del self._tasks[member]
        await member.client.close()

    async def _resolve_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_INTERVAL_S)
            await self._look_up()

    async def _look_up(self) -> None:
        assert self._name is not None
        host, _, port = self._name.rpartition(":")
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await self._resolve(host, int(port))
        except (OSError, TimeoutError) as error:
            # A resolver that fails says nothing about the workers: those that answer stay.
            log.warning("%s could not be looked up: %s", host, type(error).__name__)
            return
        self._set(sorted(found))


def addresses_of(setting: str) -> list[str]:
    """The addresses in GLM53_WORKER_ADDRESS.

    Raises:
        ConfigError: an address is empty, there twice, or no address.
    """
    found = [address.strip() for address in setting.split(",")]
    for address in found:
        name = address.removeprefix(DNS)
        host, _, port = name.rpartition(":")
        good = len(address) > len("unix:") if address.startswith("unix:") else bool(host) and port.isdigit() and 0 < int(port) < 65_536
        if not good:
            raise ConfigError(
                f"GLM53_WORKER_ADDRESS: {address!r} is no address; use host:port, unix:/path, a comma list of them, or dns:///name:port",
                param="GLM53_WORKER_ADDRESS",
            )
    if len(set(found)) != len(found):
        raise ConfigError("GLM53_WORKER_ADDRESS names an address twice", param="GLM53_WORKER_ADDRESS")
    if len(found) > 1 and any(address.startswith(DNS) for address in found):
        raise ConfigError("GLM53_WORKER_ADDRESS: dns:/// stands alone, not in a list", param="GLM53_WORKER_ADDRESS")
    return found


def _prefix_bytes(prompt: Iterable[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in itertools.islice(prompt, _PREFIX_TOKENS))


def _rank(prefix: bytes, address: str) -> int:
    """Rendezvous hashing: a worker that comes or goes moves only its own share of the prefixes."""
    return int.from_bytes(hashlib.blake2b(prefix, digest_size=8, key=address.encode()[-64:]).digest(), "little")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}" for family, _, _, _, address in found]
