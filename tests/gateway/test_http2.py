"""The gateway's own reader of gRPC streams: against gRPC's server, against a peer that uses all of HTTP/2, and against noise."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import hpack
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http2 import Call, Connection
from services.gateway.worker_streams import WorkerStreams

PATH = "/test.Service/Stream"
Behaviour = Callable[[bytes, Any], AsyncIterator[bytes]]


@contextlib.asynccontextmanager
async def served(behaviour: Behaviour, address: str = "127.0.0.1:0", **options: int) -> AsyncIterator[tuple[Any, WorkerStreams]]:
    """A server of gRPC's own, and our way to it."""
    size = ("grpc.max_receive_message_length", 256 * 1024 * 1024)
    server = grpc.aio.server(options=(size, *((f"grpc.{name}", value) for name, value in options.items())))
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(behaviour)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port(address)
    await server.start()
    streams = WorkerStreams(address if address.startswith("unix:") else f"127.0.0.1:{port}", 5)
    try:
        yield server, streams
    finally:
        await streams.close()
        await server.stop(None)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


async def all_of(call: Call) -> list[bytes]:
    found = []
    while (message := await call.read()) is not None:
        found.append(message)
    return found


async def failure_of(call: Call) -> AioRpcError:
    with pytest.raises(AioRpcError) as caught:
        await all_of(call)
    return caught.value


async def sizes(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Messages of the sizes that are asked for."""
    del context
    for (size,) in struct.iter_unpack(">I", request):
        yield bytes([size % 251]) * size


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_messages_of_every_size_arrive_in_order(tmp_path: Path, unix: bool) -> None:
    """Empty ones, those that fill a frame or a window exactly or by one more, and one of megabytes."""
    wanted = [0, 1, 4, 5, 16_378, 16_379, 16_380, 65_529, 65_530, 65_531, 65_536, 3_000_000, 0, 7]

    async def work() -> None:
        async with served(sizes, f"unix:{tmp_path}/s" if unix else "127.0.0.1:0") as (_, streams):
            call = await streams.call(PATH, struct.pack(f">{len(wanted)}I", *wanted), 20)
            assert [(len(message), message[:1]) for message in await all_of(call)] == [
                (size, bytes([size % 251]) if size else b"") for size in wanted
            ]

    run(work)


@pytest.mark.parametrize("size", [0, 1, 16_379, 65_530, 65_531, 5_000_000])
def test_requests_of_every_size_arrive(size: int) -> None:
    """Also those that wait for the peer's windows."""

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        yield b"%d %d" % (len(request), sum(request[:1000]))

    async def work() -> None:
        async with served(count) as (_, streams):
            calls = [await streams.call(PATH, b"\x01" * size, 20) for _ in range(3)]
            assert [await all_of(call) for call in calls] == [[b"%d %d" % (size, min(size, 1000))]] * 3

    run(work)


def test_many_calls_share_a_connection_and_keep_apart() -> None:
    """A hundred at once; where the peer allows few on a connection, there are several connections."""

    async def echo(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        for _ in range(20):
            yield request
            await asyncio.sleep(0)

    async def work(connections: int, **options: int) -> None:
        async with served(echo, **options) as (_, streams):
            # The peer's settings come with its first answer.
            await all_of(await streams.call(PATH, b"x", 20))
            calls = [await streams.call(PATH, b"%d" % index, 20) for index in range(100)]
            found = await asyncio.gather(*map(all_of, calls))
            assert found == [[b"%d" % index] * 20 for index in range(100)]
            assert len(streams._connections) == connections

    run(lambda: work(1))
    run(lambda: work(10, max_concurrent_streams=10))


def test_an_error_comes_with_its_words_and_metadata() -> None:
    """After what was sent before it; bytes in metadata stay bytes."""

    async def fails(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await context.abort(
            StatusCode.OUT_OF_RANGE, "zu groß: 100 % {x}", trailing_metadata=(("an-error-bin", b"\x00\xff" * 300), ("a", "b"))
        )

    async def work() -> None:
        async with served(fails) as (_, streams):
            call = await streams.call(PATH, b"x", 20)
            assert await call.read() == b"x"
            error = await failure_of(call)
            assert (error.code(), error.details()) == (StatusCode.OUT_OF_RANGE, "zu groß: 100 % {x}")
            metadata = error.trailing_metadata()
            assert (metadata["an-error-bin"], metadata["a"]) == (b"\x00\xff" * 300, "b")
            assert (await failure_of(await streams.call("/test.Service/Other", b"", 20))).code() is StatusCode.UNIMPLEMENTED

    run(work)


def test_metadata_and_the_deadline_reach_the_server() -> None:
    """And the deadline holds here as well, for a server that does not look at it."""
    seen: list[Any] = []

    async def waits(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append((dict(context.invocation_metadata()), context.time_remaining()))
        yield request
        await asyncio.sleep(60)

    async def work() -> None:
        async with served(waits) as (_, streams):
            call = await streams.call(PATH, b"x", 0.5, (("traceparent", "00-" + "a" * 200),))
            assert (await failure_of(call)).code() is StatusCode.DEADLINE_EXCEEDED
            metadata, left_s = seen[0]
            assert metadata["traceparent"] == "00-" + "a" * 200
            assert 0 < left_s <= 0.5

    run(work)


def test_a_cancelled_call_ends_at_the_server() -> None:
    """Whether its reader waits or not; other calls go on."""
    running: set[bytes] = set()

    async def forever(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        running.add(request)
        try:
            while True:
                yield request
                await asyncio.sleep(0.01)
        finally:
            running.discard(request)

    async def work() -> None:
        async with served(forever) as (_, streams):
            first, second = [await streams.call(PATH, name, 20) for name in (b"1", b"2")]
            assert await first.read() == b"1"
            assert await second.read() == b"2"
            first.cancel()
            first.cancel()
            while running != {b"2"}:
                await asyncio.sleep(0.01)
            assert await second.read() == b"2"

    run(work)


def test_a_reader_that_stops_stops_the_server() -> None:
    """What waits for one reader is bounded, and does not keep another one waiting."""
    sent = 0

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal sent
        del context
        while True:
            sent += request == b"slow"
            yield b"x" * 1000

    async def work() -> None:
        async with served(flood) as (_, streams):
            slow, quick = [await streams.call(PATH, name, 20) for name in (b"slow", b"quick")]
            await slow.read()
            for _ in range(2000):
                await quick.read()
            before = sent
            for _ in range(2000):
                await quick.read()
            # gRPC's own buffers at the server hold some more.
            assert sent == before < 1000
            assert sum(map(len, slow._messages)) < 80_000

    run(work)


def test_a_server_that_goes_away_ends_calls_and_is_found_again() -> None:
    """UNAVAILABLE or a bare CANCELLED for what ran; the next call makes a new connection, or says that there is nobody."""

    async def forever(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        yield request
        await asyncio.sleep(60)

    async def work() -> None:
        async with served(forever) as (server, streams):
            call = await streams.call(PATH, b"x", 20)
            assert await call.read() == b"x"
            await server.stop(None)
            assert (await failure_of(call)).code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
            with pytest.raises(AioRpcError) as caught:
                await streams.call(PATH, b"x", 20)
            assert caught.value.code() is StatusCode.UNAVAILABLE
            port = int(streams._address.rpartition(":")[2])
            async with served(sizes, f"127.0.0.1:{port}"):
                assert await all_of(await streams.call(PATH, struct.pack(">I", 3), 20)) == [b"\x03" * 3]

    run(work)


@pytest.mark.parametrize("said", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "a closed door", "another protocol"])
def test_who_does_not_speak_http2_is_not_reached(said: bytes | None) -> None:
    """UNAVAILABLE for all who wait, after one wait for all of them; one who leaves earlier changes nothing for the others."""
    connected = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        if said is None:
            await reader.read()
        else:
            writer.write(said)
        writer.close()

    async def work() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            streams = WorkerStreams(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 0.5)
            calls = [asyncio.create_task(streams.call(PATH, b"x", 20)) for _ in range(20)]
            await asyncio.sleep(0)
            calls.pop(0).cancel()
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [error.code() if isinstance(error, AioRpcError) else error for error in found] == [StatusCode.UNAVAILABLE] * 19
            assert connected == 1
            await streams.close()

    run(work)


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("127.0.0.1:5", True),
        ("worker.example:30051", True),
        ("[::1]:5", True),
        ("unix:/tmp/x", True),
        ("unix:///tmp/x", False),
        ("dns:///x:5", False),
        ("ipv4:1.2.3.4:5", False),
        ("::1:5", False),
        ("host", False),
    ],
)
def test_addresses_that_grpc_must_resolve_are_left_to_it(address: str, taken: bool) -> None:
    """Names of its own schemes."""
    assert WorkerStreams.takes(address) is taken


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def peer(messages: list[bytes], padding: int | None, error: bool) -> bytes:
    """What another implementation sends for one call: other settings, Huffman's code, tables, padding."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "a")], end_stream=True)
    server.receive_data(client.data_to_send())
    server.ping(b"12345678")
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc"), ("x-custom", "ä" * 5)])
    for data in messages:
        server.send_data(1, message(data), pad_length=padding)
    server.send_headers(1, [("grpc-status", "5" if error else "0"), ("grpc-message", "a%20b"), ("x-custom", "ä" * 5)], end_stream=True)
    return bytes(server.data_to_send())


@given(
    st.lists(st.binary(max_size=300), max_size=6),
    st.sampled_from([None, 0, 200]),
    st.booleans(),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_any_cut_of_the_bytes_gives_the_same_messages(messages: list[bytes], padding: int | None, error: bool, cuts: list[int]) -> None:
    """Frames, headers and messages may be cut anywhere, with everything that HTTP/2 allows around them."""

    async def work() -> None:
        connection, transport = Connection("a"), FakeTransport()
        connection.connection_made(transport)
        call = connection.call(PATH, b"x", 20)
        data, at, index = peer(messages, padding, error), 0, 0
        while at < len(data):
            size = cuts[index % len(cuts)]
            connection.data_received(data[at : at + size])
            at, index = at + size, index + 1
        found = []
        while call._messages:
            found.append(await call.read())
        assert found == messages
        if error:
            failure = await failure_of(call)
            assert (failure.code(), failure.details()) == (StatusCode.NOT_FOUND, "a b")
        else:
            assert await call.read() is None
        assert b"12345678" in transport.written

    run(work)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


OK = hpack.Encoder().encode([(":status", "200")])
TRAILERS = hpack.Encoder().encode([("grpc-status", "0")])
FAULTS: dict[str, tuple[bytes, StatusCode]] = {
    "a frame that is too long": (b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", StatusCode.INTERNAL),
    "headers that are none": (frame(1, 4, 1, b"\xff\xff\xff\xff\xff\xff"), StatusCode.INTERNAL),
    "headers that do not go on": (frame(1, 0, 1, OK) + frame(0, 0, 1, message(b"x")), StatusCode.INTERNAL),
    "headers that never began": (frame(9, 4, 1, OK), StatusCode.INTERNAL),
    "headers without end": (frame(1, 0, 1, OK) + frame(9, 0, 1, b"x" * 16_000) * 20, StatusCode.INTERNAL),
    "a push": (frame(5, 4, 1, b"\x00\x00\x00\x02" + OK), StatusCode.INTERNAL),
    "more padding than there is": (frame(0, 8, 1, b"\x09abc"), StatusCode.INTERNAL),
    "a padded frame of nothing": (frame(0, 8, 1, b""), StatusCode.INTERNAL),
    "a compressed message": (frame(0, 0, 1, b"\x01\x00\x00\x00\x01x"), StatusCode.INTERNAL),
    "a message of gigabytes": (frame(0, 0, 1, b"\x00\xff\xff\xff\xff"), StatusCode.INTERNAL),
    "a message of gigabytes that begins in a frame before": (
        frame(0, 0, 1, b"\x00\xff") + frame(0, 0, 1, b"\xff\xff\xff"),
        StatusCode.INTERNAL,
    ),
    "an end inside a message": (
        frame(1, 4, 1, OK) + frame(0, 0, 1, b"\x00\x00\x00\x00\x05ab") + frame(1, 5, 1, TRAILERS),
        StatusCode.INTERNAL,
    ),
    "an end without a status": (frame(1, 4, 1, OK) + frame(0, 1, 1, b""), StatusCode.INTERNAL),
    "a settings frame that is cut": (frame(4, 0, 0, b"\x00\x01"), StatusCode.INTERNAL),
    "HTTP 503 from a proxy": (frame(1, 5, 1, hpack.Encoder().encode([(":status", "503")])), StatusCode.UNAVAILABLE),
    "HTTP 404 from a proxy": (frame(1, 5, 1, hpack.Encoder().encode([(":status", "404")])), StatusCode.UNIMPLEMENTED),
    "a reset": (frame(3, 0, 1, b"\x00\x00\x00\x08"), StatusCode.CANCELLED),
    "a refusal": (frame(3, 0, 1, b"\x00\x00\x00\x07"), StatusCode.UNAVAILABLE),
    "a farewell before our call": (frame(7, 0, 0, b"\x00\x00\x00\x00\x00\x00\x00\x00"), StatusCode.UNAVAILABLE),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", StatusCode.INTERNAL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_peer_ends_the_call(name: str) -> None:
    """With an error that says so, never with silence or a wrong message."""
    sent, code = FAULTS[name]

    async def work() -> None:
        connection = Connection("a")
        connection.connection_made(FakeTransport())
        call = connection.call(PATH, b"x", 20)
        connection.data_received(sent)
        assert call.over
        assert (await failure_of(call)).code() is code

    run(work)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60), st.builds(frame, st.integers(0, 10), st.integers(0, 255), st.integers(0, 3), st.binary(max_size=40))
        )
    )
)
def test_noise_never_raises(parts: list[bytes]) -> None:
    """Whatever a peer sends, the protocol takes it, and a lost connection ends what is left."""

    async def work() -> None:
        connection = Connection("a")
        connection.connection_made(FakeTransport())
        calls = [connection.call(PATH, b"x" * 100, 20) for _ in range(2)]
        for part in parts:
            connection.data_received(part)
        connection.connection_lost(None)
        assert all(call.over for call in calls)
        assert not connection.has_room

    run(work)
