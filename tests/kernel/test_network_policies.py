"""What sandboxes reach under their policies: several hosts in namespaces, real packets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from dsec_common.wire.network import NetworkPhase
from kernel_world import World
from network_world import (
    ALLOWED,
    ALLOWED6,
    METADATA,
    NONE,
    OPEN,
    OTHER,
    OTHER6,
    TCP_PORT,
    UDP_PORT,
    NetworkWorld,
    allow,
    named,
    record_of,
    to,
)


@pytest.fixture
async def net(world: World) -> AsyncIterator[NetworkWorld]:
    made = await NetworkWorld.start(world)
    try:
        yield made
    finally:
        await made.close()


async def test_without_a_policy_there_is_no_network_and_no_device(net: NetworkWorld) -> None:
    await net.create("a")
    assert await net.tcp("a", ALLOWED) == "ENETUNREACH"
    assert await net.world.say("cat /proc/net/dev | grep -c :") == "1"


async def test_only_what_is_allowed_is_reached_by_tcp_udp_and_icmp(net: NetworkWorld) -> None:
    await net.create("a", allow(to(ALLOWED, str(TCP_PORT), "tcp"), to(ALLOWED6, str(UDP_PORT))))
    hosts = (ALLOWED, ALLOWED6, OTHER, OTHER6)
    assert await net.reachable("a", *hosts) == {f"tcp {ALLOWED}", f"udp {ALLOWED6}"}
    for host, port in ((ALLOWED, 443), (ALLOWED6, TCP_PORT), (OTHER, TCP_PORT), (OTHER6, TCP_PORT)):
        assert await net.tcp("a", host, port) == "ECONNREFUSED"
    assert net.hosts[OTHER].connections == 0


async def test_icmp_is_allowed_by_its_name(net: NetworkWorld) -> None:
    await net.create("a", allow(to("10.9.0.0/16", protocol="icmp")))
    assert await net.ping("a", OTHER) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_an_open_network_reaches_all_but_what_never_is(net: NetworkWorld) -> None:
    await net.create("a", OPEN)
    await net.create("b", OPEN)
    own = (await net.networks.info(net.records["b"])).addresses
    hosts = (ALLOWED, ALLOWED6, OTHER, OTHER6)
    assert len(await net.reachable("a", *hosts)) == 3 * len(hosts)
    never = [METADATA, "fd00:ec2::254", f"::ffff:{METADATA}", *own, "100.96.0.1", "fe80::1%eth0"]
    assert await net.reachable("a", *never) == set()
    assert net.hosts[METADATA].connections == 0
    assert net.hosts[METADATA].datagrams == []


async def test_what_never_is_reachable_cannot_be_allowed(net: NetworkWorld) -> None:
    everything = allow(to("0.0.0.0/0"), to("::/0"), to(METADATA), to("100.96.0.0/16"))
    await net.create("a", everything)
    await net.create("b", everything)
    neighbour = (await net.networks.info(net.records["b"])).addresses
    assert await net.tcp("a", OTHER) == "ok"
    assert await net.reachable("a", METADATA, "fd00:ec2::254", *neighbour) == set()
    assert net.hosts[METADATA].connections == 0
    assert net.hosts[METADATA].datagrams == []


async def test_denied_wins_over_allowed_and_over_open(net: NetworkWorld) -> None:
    await net.create("a", allow(to("10.9.0.0/16"), deny=[to(OTHER)]))
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_the_nodes_own_deny_wins_over_every_policy(world: World) -> None:
    from ipaddress import ip_network  # noqa: PLC0415

    net = await NetworkWorld.start(world, denied=(ip_network("10.9.2.0/24"),))
    try:
        await net.create("a", allow(to(OTHER), to(ALLOWED)))
        assert await net.tcp("a", ALLOWED) == "ok"
        assert await net.tcp("a", OTHER) == "ECONNREFUSED"
    finally:
        await net.close()


async def test_a_sandbox_cannot_pose_as_its_neighbour(net: NetworkWorld) -> None:
    await net.create("a", OPEN)
    await net.create("b", OPEN)
    other = (await net.networks.info(net.records["b"])).addresses[0]
    text = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    s.setsockopt(0, 15, 1)   # IP_FREEBIND
    s.bind(({other!r}, 0))
    s.sendto(b'posing', ({ALLOWED!r}, {UDP_PORT}))
    print('sent')
except OSError as error:
    print('refused', error.errno)
for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind, 255)
        print('raw')
    except OSError as error:
        print('refused', error.errno)
"""
    told = (await net.world.python(text)).split("\n")
    assert [line.split()[0] for line in told[1:]] == ["refused", "refused"]
    assert await net.udp("a", ALLOWED) == "ok"
    assert b"posing" not in net.hosts[ALLOWED].datagrams


async def test_nothing_outside_opens_a_connection_into_a_sandbox(net: NetworkWorld) -> None:
    await net.create("a", OPEN)
    address = (await net.networks.info(net.records["a"])).addresses[0]
    listening = asyncio.create_task(
        net.world.run(
            "python3",
            "-c",
            "import socket; s=socket.create_server(('',7000)); s.settimeout(3); s.accept()",
        )
    )
    import socket  # noqa: PLC0415

    from dsec_sandboxd.network import namespaces  # noqa: PLC0415

    host = net.hosts[ALLOWED]
    outside = namespaces.make_in(host.namespace, socket.socket)
    outside.settimeout(1.0)
    with outside, pytest.raises(OSError):  # noqa: PT011  unreachable or silence
        await asyncio.to_thread(outside.connect, (address, 7000))
    result = await listening
    assert b"timed out" in result.stderr


async def test_a_new_policy_cuts_what_it_denies_in_mid_connection(net: NetworkWorld) -> None:
    record = await net.create("a", allow(to(ALLOWED), to(OTHER)))
    text = """
import os, socket, time
kept, cut = (socket.create_connection((host, 8080)) for host in os.environ['HOSTS'].split())
def echo(one):
    try:
        one.settimeout(5)
        one.sendall(b'x')
        return one.recv(1) == b'x'
    except OSError as error:
        return str(error.errno)
print(echo(kept), echo(cut), flush=True)
open('/tmp/ready', 'w').close()
while not os.path.exists('/tmp/go'):
    time.sleep(0.01)
print(echo(kept), echo(cut), flush=True)
"""
    hosts = {"HOSTS": f"{ALLOWED} {OTHER}"}
    running = asyncio.create_task(net.world.python(text, env=hosts))
    while (await net.world.shell("test -e /tmp/ready")).exit_code:
        await asyncio.sleep(0.01)
    await net.networks.set_policy(record, allow(to(ALLOWED)))
    await net.world.say("touch /tmp/go")
    assert (await running).split("\n") == ["True True", "True 104"]


async def test_a_policy_of_none_cuts_everything_and_names(net: NetworkWorld) -> None:
    net.names.names["a.example"] = [ALLOWED]
    record = await net.create("a", OPEN)
    assert await net.tcp("a", "a.example") == "ok"
    await net.networks.set_policy(record, NONE)
    assert await net.tcp("a", ALLOWED) == "ECONNREFUSED"
    assert (await net.tcp("a", "a.example")).startswith("gai")
    await net.networks.set_policy(record, OPEN)
    assert await net.tcp("a", "a.example") == "ok"


async def test_a_sandbox_without_a_network_may_get_one_later(net: NetworkWorld) -> None:
    record = await net.create("a")
    info = await net.networks.set_policy(record, allow(to(ALLOWED)))
    assert info.addresses
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_the_agent_phase_begins_once_and_for_good(net: NetworkWorld) -> None:
    record = await net.create("a", allow(to(ALLOWED)), setup_network=OPEN)
    assert await net.tcp("a", OTHER) == "ok"
    assert (await net.networks.info(record)).phase is NetworkPhase.SETUP
    for _ in range(2):
        info = await net.networks.enter_agent_phase(record)
        assert info.phase is NetworkPhase.AGENT
        assert await net.tcp("a", OTHER) == "ECONNREFUSED"
        assert await net.tcp("a", ALLOWED) == "ok"


async def test_a_setup_phase_may_lead_to_no_network_at_all(net: NetworkWorld) -> None:
    record = await net.create("a", None, setup_network=OPEN)
    assert await net.tcp("a", OTHER) == "ok"
    await net.networks.enter_agent_phase(record)
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_a_sandbox_that_is_put_back_stays_in_its_agent_phase(net: NetworkWorld) -> None:
    record = await net.create("a", allow(to(ALLOWED)), setup_network=OPEN)
    await net.networks.enter_agent_phase(record)
    net.networks.is_remaking = lambda local: local == "a"
    await net.networks.sandbox_ending("a")
    await net.world.kernel.destroy("a")
    await net.world.create("a")
    await net.networks.attach(record)
    net.networks.is_remaking = lambda _: False
    assert (await net.networks.info(record)).phase is NetworkPhase.AGENT
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_names_are_resolved_when_allowed_and_their_addresses_reachable(
    net: NetworkWorld,
) -> None:
    net.names.names = {
        "a.example": [ALLOWED, ALLOWED6],
        "deep.b.example": [OTHER],
        "b.example": [OTHER],
        "secret.example": [OTHER],
    }
    await net.create("a", allow(named("a.example", str(TCP_PORT), "tcp"), named("*.b.example")))
    assert await net.tcp("a", ALLOWED) == "ECONNREFUSED"  # nobody asked for its name yet
    assert await net.tcp("a", "a.example") == "ok"
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", "a.example", 443) == "ECONNREFUSED"
    assert await net.udp("a", "deep.b.example") == "ok"
    for name in ("b.example", "secret.example", "x.secret.example", "a.example.evil"):
        assert (await net.tcp("a", name)).startswith("gai")
    assert set(net.names.asked) == {"a.example", "deep.b.example"}
    assert any(told.get("name") == "secret.example" for _, told in net.denied)


async def test_an_address_of_a_name_is_forgotten_with_its_time(
    net: NetworkWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_sandboxd.network.resolver.LEARNED_FOR_MIN_S", 1)
    net.names.names["a.example"] = [ALLOWED]
    net.names.ttl = 1
    await net.create("a", allow(named("a.example")))
    assert await net.tcp("a", "a.example") == "ok"
    deadline = time.monotonic() + 20
    while await net.tcp("a", ALLOWED) == "ok":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert await net.tcp("a", "a.example") == "ok"


async def test_names_lead_neither_to_the_node_nor_to_what_is_denied(net: NetworkWorld) -> None:
    own = await net.create("b", OPEN)
    neighbour = (await net.networks.info(own)).addresses[0]
    hostile = ["127.0.0.1", METADATA, neighbour, "::1", f"::ffff:{METADATA}", OTHER]
    net.names.names["rebind.example"] = [*hostile, ALLOWED]
    net.names.names["only.example"] = ["127.0.0.1", METADATA]
    policy = allow(named("*.example"), deny=[to(OTHER)])
    await net.create("a", policy)
    answer = {"kind": "name", "host": "rebind.example", "port": 0}
    assert await net.try_all("a", [answer]) == [ALLOWED]
    assert (await net.tcp("a", "only.example")).startswith("gai")
    for host in hostile:
        assert await net.tcp("a", host) != "ok"
    assert net.hosts[METADATA].connections == 0


async def test_what_is_refused_is_told_by_samples_and_counted(net: NetworkWorld) -> None:
    record = await net.create("a", allow(to(ALLOWED)))
    attempts = [{"kind": "tcp", "host": OTHER, "port": port} for port in range(1000, 1100)]
    assert set(await net.try_all("a", attempts)) == {"ECONNREFUSED"}
    deadline = time.monotonic() + 20
    while not net.denied:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    local, told = net.denied[0]
    assert (local, told["address"], told["protocol"]) == ("a", OTHER, "tcp")
    assert 1000 <= int(told["port"]) < 1100
    assert len(net.denied) <= 20
    assert (await net.networks.info(record)).denied_packets >= 100


async def test_fifty_sandboxes_have_fifty_policies(net: NetworkWorld) -> None:
    names = [f"s{number}" for number in range(50)]
    for number, local in enumerate(names):
        await net.create(local, allow(to(ALLOWED if number % 2 else OTHER, str(TCP_PORT))))
    for number, local in enumerate(names):
        attempts = [{"kind": "tcp", "host": host, "port": TCP_PORT} for host in (ALLOWED, OTHER)]
        expected = ["ok", "ECONNREFUSED"] if number % 2 else ["ECONNREFUSED", "ok"]
        assert await net.try_all(local, attempts) == expected


async def test_a_used_namespace_is_never_handed_on(net: NetworkWorld) -> None:
    for number in range(3):
        await net.create("a", allow(to(ALLOWED)))
        assert await net.tcp("a", ALLOWED) == "ok"
        await net.destroy("a")
        await net.create("b")
        assert await net.world.say("cat /proc/net/dev | grep -c :", local="b") == "1", number
        await net.destroy("b")


async def test_a_later_daemon_takes_the_rules_over_and_they_hold_meanwhile(
    net: NetworkWorld,
) -> None:
    record = await net.create("a", allow(to(ALLOWED)))
    kept = net.networks
    await kept.close()  # leaves the router to its sandboxes
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"
    later = type(kept)(
        "test-node", net.world.kernel, net.directory, kept._settings, kept._on_denied
    )
    net.networks = later
    await later.sandbox_adopted(record)
    await later.recovered()
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"
    await later.set_policy(record, allow(to(OTHER)))
    assert await net.tcp("a", ALLOWED) == "ECONNREFUSED"
    assert await net.tcp("a", OTHER) == "ok"


async def test_what_a_dead_daemon_left_goes_when_nothing_of_it_lives(net: NetworkWorld) -> None:
    await net.create("a", OPEN)
    kept = net.networks
    await kept.close()
    await net.world.kernel.destroy("a")
    net.records.clear()
    assert (net.directory / "router").exists()
    later = type(kept)(
        "test-node", net.world.kernel, net.directory, kept._settings, kept._on_denied
    )
    net.networks = later
    await later.recovered()
    assert not (net.directory / "router").exists()
    assert list((net.directory / "sandboxes").iterdir()) == []


async def test_a_record_without_its_remembered_policy_is_not_taken_over(net: NetworkWorld) -> None:
    from dsec_common.errors import DsecError  # noqa: PLC0415

    with pytest.raises(DsecError, match="policy was lost"):
        await net.networks.sandbox_adopted(record_of("x", OPEN))


@pytest.mark.alone
async def test_a_network_costs_little_of_a_creation(
    net: NetworkWorld, record_property: Callable[[str, object], None]
) -> None:
    policy = allow(to("10.9.0.0/16", "80,443", "tcp"), named("*.example"), pypi=True)
    taken: list[float] = []
    for number in range(40):
        local = f"t{number}"
        await net.world.create(local)
        started = time.perf_counter()
        await net.networks.attach(record_of(local, policy))
        taken.append(time.perf_counter() - started)
        net.records[local] = record_of(local, policy)
    taken.sort()
    record_property("attach_p50_ms", taken[20] * 1e3)
    assert taken[20] < 0.05
