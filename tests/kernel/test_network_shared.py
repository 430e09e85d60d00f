"""What all sandboxes with a network share: one that takes all it can leaves the others theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_sandboxd.network import namespaces
from dsec_sandboxd.network.plan import connections_per_s
from dsec_sandboxd.network.tracking import TIME_WAIT_S
from kernel_world import World
from network_world import (
    ALLOWED,
    ALLOWED6,
    OPEN,
    OTHER,
    TCP_PORT,
    UDP_PORT,
    NetworkWorld,
    in_thread,
)

CONNECTIONS_MAX = 64
# For two seconds begin as many connections as possible: end them at once, or hold them.
FLOWS = """
import socket, sys, time
kind, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
end, made, refused, kept = time.monotonic() + 2, 0, 0, []
while time.monotonic() < end:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == 'udp' else socket.SOCK_STREAM)
    one.settimeout(0.5)
    try:
        one.connect((host, port))
        one.send(b'x')
        made += 1
        if kind == 'open': kept.append(one)
        else: one.close()
    except OSError: refused += 1; one.close()
print(made, refused)
"""


@pytest.fixture
async def net(world: World) -> AsyncIterator[NetworkWorld]:
    made = await NetworkWorld.start(world, connections_max=CONNECTIONS_MAX)
    try:
        yield made
    finally:
        await made.close()


def connections_tracked(net: NetworkWorld) -> int:
    """Return how many connections the router's namespace remembers."""

    def read() -> int:
        kept = os.open(net.directory / "router", os.O_RDONLY)
        try:
            namespaces.enter(kept)
        finally:
            os.close(kept)
        return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())

    return in_thread(read)


@pytest.mark.parametrize("kind", ["short", "open", "udp"])
async def test_what_one_sandbox_has_of_the_table_of_connections_is_bounded(
    net: NetworkWorld, kind: str
) -> None:
    await net.create("a", OPEN)
    await net.create("b", OPEN)
    port = UDP_PORT if kind == "udp" else TCP_PORT
    result = await net.world.run("python3", "-c", FLOWS, kind, ALLOWED, str(port), timeout_s=20)
    assert result.exit_code == 0, result
    each_s = connections_per_s(CONNECTIONS_MAX)
    assert 0 < connections_tracked(net) <= 2 * CONNECTIONS_MAX + each_s * TIME_WAIT_S
    for host in (ALLOWED, OTHER):
        assert await net.tcp("b", host) == "ok"
        assert await net.udp("b", host) == "ok"
    if kind != "udp":  # without a connection, nobody inside is told
        made, refused = map(int, result.stdout.split())
        assert made <= CONNECTIONS_MAX + each_s * (result.duration_s + 1)
        assert refused > CONNECTIONS_MAX


async def test_a_sandboxs_connections_are_forgotten_with_it(net: NetworkWorld) -> None:
    await net.create("a", OPEN)
    await net.create("b", OPEN)
    assert await net.tcp("b", ALLOWED6) == "ok"
    others = connections_tracked(net)
    for host in (ALLOWED, ALLOWED6):
        assert await net.tcp("a", host) == "ok"
        assert await net.udp("a", host) == "ok"
    assert connections_tracked(net) == others + 4
    await net.destroy("a")
    assert connections_tracked(net) == others


async def test_datagrams_that_nobody_answers_are_one_connection_however_many(
    net: NetworkWorld,
) -> None:
    await net.create("a", OPEN)
    silent = namespaces.make_in(
        net.hosts[ALLOWED].namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    )
    with silent:
        silent.setblocking(False)
        silent.bind((ALLOWED, 9999))
        await net.world.python(
            "import socket\n"
            "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"for _ in range({3 * CONNECTIONS_MAX}): one.sendto(b'x', ('{ALLOWED}', 9999))"
        )
        for _ in range(3 * CONNECTIONS_MAX):
            assert silent.recv(1) == b"x"
    assert connections_tracked(net) == 1
