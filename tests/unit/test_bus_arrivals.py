"""Arriving bytes are taken apart at once, in order, and never twice or by two at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any
from urllib.parse import urlparse

import pytest

from dsec_common.bus_arrivals import Parse
from dsec_common.bus_transport import GatheringTransport

READ_BYTES = 4096


class Parser:
    """Notes what it is given; waits in the midst of what says so."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.may_go_on = asyncio.Event()
        self.at_work = 0
        self.came = asyncio.Event()

    async def parse(self, data: bytes) -> None:
        assert self.at_work == 0, "two take bytes apart at a time"
        if b"broken" in data:
            raise ValueError("broken")
        self.at_work += 1
        self.came.set()
        if b"wait" in data:
            await self.may_go_on.wait()
        self.at_work -= 1
        if data:
            self.taken.append(data)


@contextlib.asynccontextmanager
async def connected(
    parse: Parse | None = None,
) -> AsyncIterator[tuple[GatheringTransport, Parser, socket.socket]]:
    parser = Parser()
    transport = GatheringTransport(parse or parser.parse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        await transport.connect(urlparse(f"nats://127.0.0.1:{port}"), 64 * 1024, 5)
        connection, _ = listening.accept()
        with connection:
            yield transport, parser, connection
            transport.close()
            with contextlib.suppress(OSError):
                await transport.wait_closed()  # type: ignore[no-untyped-call]


async def kept(transport: GatheringTransport) -> None:
    """Return when bytes wait to be read."""
    reader: Any = transport._io_reader
    async with asyncio.timeout(5):
        while not reader._buffer:
            await asyncio.sleep(0)


def reading(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


async def test_what_arrives_while_someone_reads_is_taken_apart_without_waking_who_reads() -> None:
    async with connected() as (transport, parser, peer):
        waits = reading(transport.read(READ_BYTES))
        for number in range(20):
            await asyncio.sleep(0)
            parser.came.clear()
            peer.send(b"%d" % number)
            async with asyncio.timeout(5):
                await parser.came.wait()
            assert not waits.done()
        assert parser.taken == [b"%d" % number for number in range(20)]
        waits.cancel()
        await asyncio.wait({waits})


async def test_bytes_that_come_while_work_waits_are_kept_until_it_is_done() -> None:
    async with connected() as (transport, parser, peer):
        first = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        peer.send(b"wait")
        async with asyncio.timeout(5):
            await parser.came.wait()
        peer.send(b"later")
        await kept(transport)
        assert parser.taken == []
        assert not first.done()
        parser.may_go_on.set()
        assert await first == b""
        assert parser.taken == [b"wait"]
        assert await asyncio.wait_for(transport.read(READ_BYTES), 5) == b"later"


async def test_what_goes_wrong_is_told_to_who_reads() -> None:
    async with connected() as (transport, _parser, peer):
        waits = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        peer.send(b"broken")
        with pytest.raises(ValueError, match="broken"):
            await asyncio.wait_for(waits, 5)


async def test_what_goes_wrong_after_a_wait_is_told_too() -> None:
    async def parse(_data: bytes) -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    async with connected(parse) as (transport, _parser, peer):
        waits = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        peer.send(b"x")
        with pytest.raises(ValueError, match="late"):
            await asyncio.wait_for(waits, 5)


async def test_who_reads_hears_of_the_end() -> None:
    async with connected() as (transport, _parser, peer):
        waits = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        peer.shutdown(socket.SHUT_WR)
        assert await asyncio.wait_for(waits, 5) == b""
        assert transport.at_eof()  # type: ignore[no-untyped-call]


async def test_what_comes_while_nobody_reads_is_kept_for_the_next_who_does() -> None:
    async with connected() as (transport, parser, peer):
        waits = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait({waits})
        peer.send(b"kept")
        await kept(transport)
        assert parser.taken == []
        assert await asyncio.wait_for(transport.read(READ_BYTES), 5) == b"kept"


async def test_a_wait_that_is_cancelled_cancels_the_work_that_it_waits_for() -> None:
    async with connected() as (transport, parser, peer):
        waits = reading(transport.read(READ_BYTES))
        await asyncio.sleep(0)
        peer.send(b"wait")
        async with asyncio.timeout(5):
            await parser.came.wait()
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait({waits})
        assert waits.cancelled()
        parser.may_go_on.set()
        await asyncio.sleep(0)
        assert parser.taken == []
