"""The way to one worker's streams: connections that are made when they are needed, and made again when they broke."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc import StatusCode

from services.gateway.http2 import Call, Connection
from services.gateway.http2_frames import rpc_error


class WorkerStreams:
    """Calls with a stream of answers.

    Args:
        address: host:port or unix:/path.
        timeout_s: how long connecting may take.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connections: list[Connection] = []
        self._closed = 0  # how often; what is being connected then is of no use any more
        self._connecting: asyncio.Task[Connection] | None = None

    @staticmethod
    def takes(address: str) -> bool:
        """True for addresses that need no resolver of gRPC's own."""
        if address.startswith("unix:"):
            return not address.startswith("unix://")
        host, _, port = address.rpartition(":")
        return bool(host) and port.isdecimal() and ("/" not in host) and (":" not in host or host.startswith("["))

    async def call(self, path: str, request: bytes, timeout_s: float, metadata: Sequence[tuple[str, str]] = ()) -> Call:
        """Begins a call.

        Raises:
            AioRpcError: UNAVAILABLE, the worker cannot be reached.
        """
        connection = self._ready()
        while connection is None:
            # One attempt for all who wait; it goes on when one of them leaves.
            made = await asyncio.shield(self._attempt())
            connection = made if made.has_room else self._ready()
        return connection.call(path, request, timeout_s, metadata)

    async def close(self) -> None:
        """Ends all connections and calls."""
        self._closed += 1
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _ready(self) -> Connection | None:
        return next((connection for connection in self._connections if connection.has_room), None)

    def _attempt(self) -> asyncio.Task[Connection]:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._attempted)
        return self._connecting

    def _attempted(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            # Perhaps nobody waits any more.
            task.exception()

    async def _connect(self) -> Connection:
        self._connections = [connection for connection in self._connections if not connection.closing]
        made, closed = None, self._closed
        try:
            async with asyncio.timeout(self._timeout_s):
                made = await self._opened()
                if await made.greeted() and closed == self._closed:
                    self._connections.append(made)
                    return made
            reason = "it closed the connection"
        except (OSError, TimeoutError) as error:
            reason = str(error) or "it took too long"
        finally:
            if made is not None and made not in self._connections:
                made.close()
        raise rpc_error(StatusCode.UNAVAILABLE, f"connecting to {self._address} failed: {reason}")

    async def _opened(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._address.startswith("unix:"):
            return (await loop.create_unix_connection(lambda: Connection("localhost"), self._address.removeprefix("unix:")))[1]
        host, _, port = self._address.rpartition(":")
        return (await loop.create_connection(lambda: Connection(self._address), host.strip("[]"), int(port)))[1]
