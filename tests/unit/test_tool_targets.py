"""Where tools that the node runs may go: by name, by address, and by no way round."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import Compiled, compile_policy
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_sandboxd.network.plan import AddressPlan
from dsec_sandboxd.tools.http import HttpArguments, check_request, shown
from dsec_sandboxd.tools.targets import addresses_of
from tool_names import Names

OPEN = compile_policy(NetworkPolicy(mode=NetworkMode.OPEN))


def allowing(*rules: NetworkRule, deny: tuple[NetworkRule, ...] = ()) -> Compiled:
    return compile_policy(NetworkPolicy(mode=NetworkMode.ALLOW, allow=rules, deny=deny))


async def code(way: Names, policy: Compiled, host: str, port: int = 80) -> str:
    """Return ``ok``, or the code of the refusal."""
    try:
        await addresses_of(way, policy, host, port)
    except DsecError as error:
        return error.code.value
    return "ok"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "0.0.0.0",  # noqa: S104  nothing binds it
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "::1",
        "::",
        "::127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "fe80::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "224.0.0.1",
        "255.255.255.255",
        "10.66.1.2",  # denied by the node's configuration
        str(AddressPlan().resolver[0]),
        str(AddressPlan().addresses(7)[0]),
        str(AddressPlan().addresses(7)[1]),
    ],
)
async def test_what_no_policy_opens_is_reached_neither_by_address_nor_by_name(host: str) -> None:
    way = Names({"innocent.example": [host]})
    everything = allowing(NetworkRule(cidr="0.0.0.0/0"), NetworkRule(cidr="::/0"))
    named = allowing(NetworkRule(host="innocent.example"))
    assert await code(way, OPEN, host) == "denied"
    assert await code(way, everything, host) == "denied"
    assert await code(way, OPEN, "innocent.example") == "denied"
    assert await code(way, named, "innocent.example") == "denied"


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "127.0.0.0x1",
        "fe80::1%eth0",
        "a b",
        "",
        ".",
        "a..b",
        "-a.example",
        "a" * 64 + ".example",
        "\u2460.example",
    ],
)
async def test_other_spellings_of_addresses_are_no_hosts(host: str) -> None:
    way = Names()
    assert await code(way, OPEN, host) == "invalid"
    assert way.asked == []


async def test_an_allow_list_leads_to_its_names_and_ports_and_asks_for_no_other_name() -> None:
    way = Names({"a.example": ["192.0.2.1"], "x.b.example": ["192.0.2.2", "127.0.0.1"]})
    policy = allowing(
        NetworkRule(host="a.example", ports="443"), NetworkRule(host="*.b.example", protocol="tcp")
    )
    assert await code(way, policy, "a.example", 443) == "ok"
    assert await code(way, policy, "A.Example.", 443) == "ok"
    assert await code(way, policy, "a.example", 80) == "denied"
    way.asked.clear()
    # The name that is refused would have carried the secret out.
    for other in ("b.example", "secret.evil.example", "a.example.evil.example", "xa.example"):
        assert await code(way, policy, other, 443) == "denied"
    assert way.asked == []
    # An address is not its name: it may belong to others, too.
    assert await code(way, policy, "192.0.2.1", 443) == "denied"
    found = await addresses_of(way, policy, "x.b.example", 1234)
    assert found == (ipaddress.ip_address("192.0.2.2"),)


async def test_what_is_denied_is_not_reached_whatever_allows_it() -> None:
    way = Names({"a.example": ["192.0.2.1", "192.0.2.9"]})
    policy = allowing(
        NetworkRule(host="a.example"),
        NetworkRule(cidr="192.0.2.0/24"),
        deny=(NetworkRule(cidr="192.0.2.1"), NetworkRule(cidr="192.0.2.0/24", ports="22")),
    )
    assert await addresses_of(way, policy, "a.example", 80) == (ipaddress.ip_address("192.0.2.9"),)
    assert await code(way, policy, "192.0.2.1") == "denied"
    assert await code(way, policy, "192.0.2.9", 22) == "denied"
    udp = allowing(NetworkRule(cidr="192.0.2.0/24", protocol="udp"))
    assert await code(way, udp, "192.0.2.9") == "denied"


async def test_no_policy_and_no_address_are_told_apart() -> None:
    assert await code(Names(), Compiled(), "a.example") == "denied"
    assert await code(Names(), OPEN, "a.example") == "unavailable"


@pytest.mark.parametrize(
    "request_",
    [
        {"url": "file:///etc/passwd"},
        {"url": "ftp://a.example/"},
        {"url": "unix:///run/docker.sock"},
        {"url": "http:///path"},
        {"url": "//a.example/"},
        {"url": "http://a.example:99999/"},
        {"url": "http://a.example:0/"},
        {"url": "http://[::1/"},
        {"url": ""},
        {"url": "http://a.example/", "method": "CONNECT"},
        {"url": "http://a.example/", "method": "TRACE"},
        {"url": "http://a.example/", "method": "GET / HTTP/1.1\r\nX: y"},
        {"url": "http://a.example/", "headers": {"Host": "metadata.internal"}},
        {"url": "http://a.example/", "headers": {"hOST": "metadata.internal"}},
        {"url": "http://a.example/", "headers": {"Transfer-Encoding": "chunked"}},
        {"url": "http://a.example/", "headers": {"Content-Length": "0"}},
        {"url": "http://a.example/", "headers": {"Connection": "upgrade"}},
        {"url": "http://a.example/", "headers": {"X": "y\r\nHost: z"}},
        {"url": "http://a.example/", "headers": {"X": "y\nHost: z"}},
        {"url": "http://a.example/", "headers": {"X: y\r\nHost": "z"}},
        {"url": "http://a.example/", "headers": {"X ": "z"}},
        {"url": "http://a.example/", "headers": {"": "z"}},
        {"url": "http://a.example/", "headers": {"X": "\u010d\u010a"}},
    ],
)
def test_what_is_no_single_request_for_its_own_host_is_invalid(request_: dict[str, Any]) -> None:
    with pytest.raises(DsecError) as caught:
        check_request(HttpArguments(**request_))
    assert caught.value.code is ErrorCode.INVALID


def test_a_request_as_it_should_be_is_fine() -> None:
    headers = {"Authorization": "Bearer k", "X-Tab": "a\tb"}
    check_request(HttpArguments(url="https://a.example:8443/x?y#z", method="PUT", headers=headers))


def test_what_is_shown_of_an_address_is_no_secret() -> None:
    assert shown("https://user:pass@a.example:8443/x?key=s#f") == "https://a.example:8443/x"
    assert "pass" not in shown("http://user:pass@[::1/?key=s")
