"""What is written in one turn of the loop, and when the kernel has it.

Both ends are on this machine: what was written has arrived when the write returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlparse

import pytest

from dsec_common.bus_transport import GatheringTransport

KIB = 1024


class Peer:
    """The other end; looks at what has arrived without letting the loop run."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def arrived(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self.connection.recv(1024 * KIB, socket.MSG_DONTWAIT)
        return b""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@contextlib.asynccontextmanager
async def connected(listener: socket.socket) -> AsyncIterator[tuple[GatheringTransport, Peer]]:
    transport = GatheringTransport()
    port = listener.getsockname()[1]
    await transport.connect(urlparse(f"nats://127.0.0.1:{port}"), 64 * KIB, 5)
    connection, _ = listener.accept()
    with connection:
        yield transport, Peer(connection)
        transport.close()
        with contextlib.suppress(OSError):
            await transport.wait_closed()  # type: ignore[no-untyped-call]


async def turn() -> None:
    """Let the loop's turn end, and what ends with it."""
    await asyncio.sleep(0)


async def test_the_first_of_a_turn_goes_at_once_and_the_others_when_it_ends(
    listener: socket.socket,
) -> None:
    async with connected(listener) as (transport, peer):
        transport.write(b"one ")
        transport.write(b"two ")
        transport.writelines([b"three ", b"four"])
        assert peer.arrived() == b"one "
        assert transport.waiting_bytes == len(b"two three four")
        await turn()
        assert peer.arrived() == b"two three four"
        assert transport.waiting_bytes == 0
        transport.write(b"five")
        assert peer.arrived() == b"five"


async def test_after_a_turn_with_much_to_send_the_next_sends_all_when_it_ends(
    listener: socket.socket,
) -> None:
    async with connected(listener) as (transport, peer):
        for _ in range(5):
            transport.write(b"x")
        await turn()
        assert peer.arrived() == b"xxxxx"
        transport.write(b"one ")
        transport.write(b"two")
        assert peer.arrived() == b""
        await turn()
        assert peer.arrived() == b"one two"
        transport.write(b"three")
        assert peer.arrived() == b"three", "that turn had little to send"


async def test_a_drain_waits_for_no_turn(listener: socket.socket) -> None:
    async with connected(listener) as (transport, peer):
        transport.write(b"one ")
        transport.write(b"two")
        await transport.drain()
        assert peer.arrived() == b"one two"


async def test_much_is_not_kept_back(listener: socket.socket) -> None:
    async with connected(listener) as (transport, peer):
        transport.write(b"one")
        transport.write(b"x" * 64 * KIB)
        assert peer.arrived() == b"one"
        transport.write(b"y")
        assert transport.waiting_bytes == 0
        assert peer.arrived().startswith(b"x")


async def test_what_was_written_goes_before_the_end(listener: socket.socket) -> None:
    async with connected(listener) as (transport, peer):
        transport.write(b"one ")
        transport.write(b"two")
        transport.close()
        assert peer.arrived() == b"one two"
        assert transport.waiting_bytes is None


async def test_what_a_lost_connection_has_not_taken_is_dropped(listener: socket.socket) -> None:
    async with connected(listener) as (transport, peer):
        transport.write(b"one")
        transport.write(b"two")
        assert transport._io_writer is not None
        transport._io_writer.transport.abort()
        await turn()
        assert peer.arrived() == b"one"
        assert transport.waiting_bytes is None


async def test_without_a_connection_nothing_can_be_written() -> None:
    assert GatheringTransport().waiting_bytes is None
