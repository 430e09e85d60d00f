"""The way outside: through the host's uplink, translated, and to nothing of the host itself."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.forwarding import put_back_unneeded
from dsec_common.network_policy import compile_policy
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_sandboxd.network import links, namespaces
from dsec_sandboxd.network.plan import AddressPlan, Port, Rules
from dsec_sandboxd.network.policy import unsupported
from dsec_sandboxd.network.router import Router
from dsec_sandboxd.network.uplink import Uplink
from network_world import in_thread, new_namespace

HOST, INTERNET = "192.0.2.1", "192.0.2.2"
OPEN = compile_policy(NetworkPolicy(mode=NetworkMode.OPEN))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


@dataclass
class Outside:
    """A host's namespace with an uplink, and somebody on the internet."""

    host: int
    internet: int
    thread: ThreadPoolExecutor
    directory: Path

    def router(self, node: str = "node") -> Router:
        plan = AddressPlan()
        return Router(self.directory / f"router-{node}", node, plan, Rules(plan))

    def opened(self, node: str = "node", thread: ThreadPoolExecutor | None = None) -> Router:
        """Return a router that leads outside."""
        router, submit = self.router(node), (thread or self.thread).submit
        submit(router.open, []).result()
        submit(router.connect_outside, "up0").result()
        return router


def _configure(namespace: int, index: int, address: str, *, forwards: bool) -> None:
    def work() -> None:
        namespaces.enter(namespace)
        with links.route_socket() as routes:
            routes.send(
                [
                    links.bring_up(index),
                    links.add_address(index, ipaddress.ip_address(address), 24),
                ],
                "an address",
            )
        if forwards:
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    in_thread(work)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    host, internet = new_namespace(), new_namespace()
    with namespaces.make_in(host, links.route_socket) as routes:
        routes.send([links.add_pair("up0", 7, "eth0", 7, internet)], "the uplink")
    _configure(host, 7, HOST, forwards=True)
    _configure(internet, 7, INTERNET, forwards=False)
    thread = ThreadPoolExecutor(1)
    thread.submit(namespaces.enter, host).result()
    try:
        yield Outside(host, internet, thread, tmp_path)
    finally:
        thread.shutdown()
        os.close(host)
        os.close(internet)


def _listen(namespace: int, address: str) -> socket.socket:
    one = namespaces.make_in(namespace, socket.socket)
    one.settimeout(3)
    one.bind((address, 80))
    one.listen()
    return one


def _connect(namespace: int, address: str) -> socket.socket:
    one = namespaces.make_in(namespace, socket.socket)
    one.settimeout(3)
    try:
        one.connect((address, 80))
    except OSError:
        one.close()
        raise
    return one


def _datagrams(namespace: int, address: str) -> socket.socket:
    one = namespaces.make_in(namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    one.bind((address, 80))
    return one


def _host_devices(outside: Outside) -> set[str]:
    with namespaces.make_in(outside.host, links.route_socket) as routes:
        return set(links.link_names(routes))


def _close(router: Router, thread: ThreadPoolExecutor) -> None:
    thread.submit(lambda: router.close(keep=False)).result()


def _host_ends(outside: Outside) -> set[str]:
    """Return the IPv4 addresses that nodes have given the host."""
    with namespaces.make_in(outside.host, links.route_socket) as routes:
        found = links.host_addresses(routes)
    return {str(one) for one in found if one in AddressPlan().ipv4}


def _host_forwards(outside: Outside, device: str = "up0") -> bool:
    def read() -> str:
        namespaces.enter(outside.host)
        return Path("/proc/sys/net/ipv4/conf", device, "forwarding").read_text().strip()

    return in_thread(read) == "1"


def _have_the_host_forward(outside: Outside, text: str) -> None:
    def write() -> None:
        namespaces.enter(outside.host)
        Path("/proc/sys/net/ipv4/ip_forward").write_text(text)

    in_thread(write)


def test_a_sandbox_reaches_the_internet_by_the_uplink_and_nothing_of_the_host(
    outside: Outside,
) -> None:
    router, submit = outside.opened(), outside.thread.submit
    sandbox = new_namespace()
    port = Port(0, 1, OPEN)
    try:
        submit(router.set_node_addresses, {ipaddress.ip_address(HOST)}).result()
        submit(router.prepare, port).result()
        submit(router.connect, port, sandbox).result()
        with _listen(outside.internet, INTERNET) as server, _connect(sandbox, INTERNET) as one:
            accepted, seen = server.accept()
            with accepted:
                assert seen[0] == HOST  # translated: no route back to a sandbox is needed
                one.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
        for address in (HOST, *_host_ends(outside)):
            with _listen(outside.host, address), pytest.raises(OSError):  # noqa: PT011  any refusal
                _connect(sandbox, address)
    finally:
        submit(router.detach, port).result()
        submit(lambda: router.close(keep=False)).result()
        os.close(sandbox)
    assert _host_devices(outside) == {"lo", "up0"}


def test_what_the_node_asks_for_itself_reaches_the_internet_and_nothing_of_the_host(
    outside: Outside,
) -> None:
    router = outside.opened()
    # As for tools that it runs: the kernel's wall, without the checks before it.
    namespace = os.open(outside.directory / "router-node", os.O_RDONLY)
    try:
        with _listen(outside.internet, INTERNET) as server, _connect(namespace, INTERNET) as one:
            accepted, seen = server.accept()
            with accepted:
                assert seen[0] == HOST
                accepted.sendall(b"hello")
                assert one.recv(5) == b"hello"
        with _listen(outside.host, HOST), pytest.raises(OSError):  # noqa: PT011  any refusal
            _connect(namespace, HOST)
        # Answers alone come in: nobody begins to speak to the router.
        (host_end,) = _host_ends(outside)
        end = str(ipaddress.ip_address(host_end) - 1)
        with _listen(namespace, end), pytest.raises(OSError):  # noqa: PT011  any refusal
            _connect(outside.host, end)
    finally:
        os.close(namespace)
        _close(router, outside.thread)


def test_an_address_that_the_node_has_not_heard_of_yet_is_out_of_reach_too(
    outside: Outside,
) -> None:
    router, submit = outside.opened(), outside.thread.submit
    sandbox = new_namespace()
    try:
        submit(router.prepare, Port(0, 1, OPEN)).result()
        submit(router.connect, Port(0, 1, OPEN), sandbox).result()
        with _listen(outside.host, HOST), pytest.raises(OSError):  # noqa: PT011  any refusal
            _connect(sandbox, HOST)
    finally:
        submit(lambda: router.close(keep=False)).result()
        os.close(sandbox)


def test_the_nodes_own_addresses_are_followed_as_they_change(outside: Outside) -> None:
    router, submit = outside.opened(), outside.thread.submit
    sandbox = new_namespace()
    try:
        submit(router.prepare, Port(0, 1, OPEN)).result()
        submit(router.connect, Port(0, 1, OPEN), sandbox).result()
        with _listen(outside.internet, INTERNET):
            _connect(sandbox, INTERNET).close()
            for mine in ({HOST, INTERNET, "fd00::1"}, {INTERNET}):
                submit(router.set_node_addresses, set(map(ipaddress.ip_address, mine))).result()
                with pytest.raises(ConnectionRefusedError):
                    _connect(sandbox, INTERNET)
            submit(router.set_node_addresses, {ipaddress.ip_address(HOST)}).result()
            _connect(sandbox, INTERNET).close()
    finally:
        submit(lambda: router.close(keep=False)).result()
        os.close(sandbox)


def test_what_a_dead_daemon_left_on_the_host_is_replaced_by_name(outside: Outside) -> None:
    first, submit = outside.opened(), outside.thread.submit
    submit(lambda: first.close(keep=True)).result()
    left = _host_devices(outside)
    assert len(left) == 3
    second = outside.opened()
    assert _host_devices(outside) == left
    submit(lambda: second.close(keep=False)).result()
    assert _host_devices(outside) == {"lo", "up0"}
    assert not (outside.directory / "router-node").exists()


def test_a_daemon_without_an_uplink_cuts_what_an_earlier_one_led_outside(outside: Outside) -> None:
    first, submit = outside.opened(), outside.thread.submit
    submit(lambda: first.close(keep=True)).result()
    second = outside.router()
    submit(second.open, []).result()
    submit(second.connect_outside, "").result()
    assert _host_devices(outside) == {"lo", "up0"}
    submit(lambda: second.close(keep=False)).result()


def test_several_nodes_of_one_host_lead_outside_side_by_side(outside: Outside) -> None:
    with ExitStack() as stack:
        sandboxes = []
        for number in range(3):
            thread = stack.enter_context(ThreadPoolExecutor(1))
            thread.submit(namespaces.enter, outside.host).result()
            router = outside.opened(f"node-{number}", thread)
            stack.callback(_close, router, thread)
            sandbox = new_namespace()
            stack.callback(os.close, sandbox)
            thread.submit(router.prepare, Port(0, 1, OPEN)).result()
            thread.submit(router.connect, Port(0, 1, OPEN), sandbox).result()
            sandboxes.append(sandbox)
        assert len(_host_ends(outside)) == 3
        with _listen(outside.internet, INTERNET) as server:
            for sandbox in sandboxes:
                with _connect(sandbox, INTERNET) as one, server.accept()[0] as accepted:
                    one.sendall(b"hello")
                    assert accepted.recv(5) == b"hello"
    assert _host_devices(outside) == {"lo", "up0"}


def test_nodes_whose_addresses_would_be_the_same_take_others(outside: Outside) -> None:
    first = outside.opened("node")
    taken = _host_ends(outside)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(namespaces.enter, outside.host).result()
        second = outside.router("other")
        second_digest = first._outside._first_pair  # type: ignore[union-attr]
        thread.submit(second.open, []).result()
        assert second._outside is not None
        second._outside._first_pair = second_digest
        thread.submit(second.connect_outside, "up0").result()
        assert len(_host_ends(outside) - taken) == 1
        thread.submit(lambda: second.close(keep=False)).result()
    outside.thread.submit(lambda: first.close(keep=False)).result()


def test_a_host_that_does_not_forward_does_so_while_a_node_needs_it(outside: Outside) -> None:
    _have_the_host_forward(outside, "0")
    first, submit = outside.opened("one"), outside.thread.submit
    with ThreadPoolExecutor(1) as thread:
        thread.submit(namespaces.enter, outside.host).result()
        second = outside.opened("two", thread)
        assert _host_forwards(outside)
        assert not _host_forwards(outside, "all")
        submit(lambda: first.close(keep=False)).result()
        assert _host_forwards(outside)  # the other one needs it still
        sandbox = new_namespace()
        thread.submit(second.prepare, Port(0, 1, OPEN)).result()
        thread.submit(second.connect, Port(0, 1, OPEN), sandbox).result()
        with _listen(outside.internet, INTERNET), _connect(sandbox, INTERNET):
            pass
        thread.submit(lambda: second.close(keep=False)).result()
        os.close(sandbox)
    assert not _host_forwards(outside)


def test_a_host_that_forwards_by_itself_goes_on_with_it(outside: Outside) -> None:
    router = outside.opened()
    outside.thread.submit(lambda: router.close(keep=False)).result()
    assert _host_forwards(outside)


def test_a_host_that_began_to_forward_meanwhile_goes_on_with_it(outside: Outside) -> None:
    _have_the_host_forward(outside, "0")
    router = outside.opened()
    _have_the_host_forward(outside, "1")
    outside.thread.submit(lambda: router.close(keep=False)).result()
    assert _host_forwards(outside)


def test_what_a_killed_daemon_switched_on_is_put_back(outside: Outside) -> None:
    _have_the_host_forward(outside, "0")
    router, submit = outside.opened(), outside.thread.submit
    submit(lambda: router.close(keep=True)).result()
    assert _host_forwards(outside)
    assert submit(put_back_unneeded).result() == ["up0"]
    assert not _host_forwards(outside)
    assert submit(put_back_unneeded).result() == []
    last = outside.router()
    submit(last.open, []).result()
    submit(lambda: last.close(keep=False)).result()


def test_forwarding_for_a_node_leads_nobody_else_through_the_host(outside: Outside) -> None:
    _have_the_host_forward(outside, "0")
    inner, target = new_namespace(), "198.51.100.2"
    with namespaces.make_in(outside.host, links.route_socket) as routes:
        routes.send([links.add_pair("in0", 8, "eth0", 7, inner)], "an inner network")
    _configure(outside.host, 8, "198.51.100.1", forwards=False)
    _configure(inner, 7, target, forwards=False)
    for namespace, network in ((inner, "192.0.2.0/24"), (outside.internet, "198.51.100.0/24")):
        gateway = ipaddress.ip_address("198.51.100.1" if namespace == inner else HOST)
        with namespaces.make_in(namespace, links.route_socket) as routes:
            routes.send([links.add_route(7, ipaddress.ip_network(network), gateway)], "a route")
    router = outside.opened()
    try:
        with _datagrams(inner, target) as receiver, _datagrams(outside.internet, INTERNET) as one:
            assert _host_forwards(outside)
            one.sendto(b"hello", (target, 80))
            receiver.settimeout(0.3)
            with pytest.raises(TimeoutError):
                receiver.recv(5)
            outside.thread.submit(lambda: router.close(keep=False)).result()
            _have_the_host_forward(outside, "1")
            one.sendto(b"there", (target, 80))  # the way itself is right
            receiver.settimeout(5)
            assert receiver.recv(5) == b"there"
    finally:
        outside.thread.submit(lambda: router.close(keep=False)).result()
        os.close(inner)


def test_an_uplink_that_is_not_there_is_unsupported_and_leaves_nothing(outside: Outside) -> None:
    router, submit = outside.router(), outside.thread.submit
    submit(router.open, []).result()
    with pytest.raises(DsecError, match="nowhere0") as caught:
        submit(router.connect_outside, "nowhere0").result()
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert _host_devices(outside) == {"lo", "up0"}
    submit(lambda: router.close(keep=False)).result()
    assert not (outside.directory / "router-node").exists()


def test_a_node_knows_what_its_host_lacks_for_a_way_outside(outside: Outside) -> None:
    def lacking(wanted: str) -> str:
        return outside.thread.submit(Uplink(wanted).lacking).result()

    assert "network_uplink is not set" in lacking("")
    assert "no default route" in lacking("auto")
    assert "nowhere0" in lacking("nowhere0")
    assert lacking("up0") == lacking("manual") == ""
    with namespaces.make_in(outside.host, links.route_socket) as routes:
        gateway = ipaddress.ip_address(INTERNET)
        routes.send([links.add_route(7, links.everything(gateway), gateway)], "a default route")
    assert lacking("auto") == ""
    assert outside.thread.submit(Uplink("auto").device).result() == "up0"


async def test_a_way_outside_that_could_not_be_made_is_told_until_it_can() -> None:
    uplink = Uplink("lo")
    refusals = [unsupported("no room"), None]

    async def connect(_device: str) -> None:
        if (refusal := refusals.pop(0)) is not None:
            raise refusal

    await uplink.lead(connect)
    assert (uplink.leads, uplink.missing()) == (False, "no room")
    assert uplink.lacking() == ""  # worth another attempt
    await uplink.lead(connect)
    assert (uplink.leads, uplink.missing()) == (True, "")
