from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.network import network_policy, parse_rule
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import NEVER, RULE_SETS, compile_policy
from dsec_common.wire.base import JSON, MSGPACK, decode
from dsec_common.wire.network import (
    NetworkMode,
    NetworkPolicy,
    NetworkRule,
    SetNetwork,
    needs_outside,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.network.plan import SANDBOXES_MAX, AddressPlan, Numbers, Port, Rules
from dsec_sandboxd.network.upstreams import Upstream, upstreams_of_host


def _allow(*rules: NetworkRule, **sets: bool) -> NetworkPolicy:
    return NetworkPolicy(mode=NetworkMode.ALLOW, allow=rules, rule_sets=sets)


@pytest.mark.parametrize(
    "rule",
    [
        {"cidr": "10.0.0.0/33"},
        {"cidr": "example.org"},
        {"cidr": "10.0.0.1", "host": "example.org"},
        {"host": "exa mple.org"},
        {"host": "*"},
        {"host": "*.*.example.org"},
        {"host": "a..b"},
        {"host": "10.0.0.1"},
        {"host": "-x.example.org"},
        {"host": "x" * 64 + ".org"},
        {"host": ".".join(["a" * 60] * 5)},
        {"host": "a/b"},
        {"host": "a\n.org"},
        {"cidr": "10.0.0.1", "ports": "0"},
        {"cidr": "10.0.0.1", "ports": "65536"},
        {"cidr": "10.0.0.1", "ports": "9-8"},
        {"cidr": "10.0.0.1", "ports": "²"},
        {"cidr": "10.0.0.1", "ports": "80,"},
        {"cidr": "10.0.0.1", "ports": "-1"},
        {"cidr": "10.0.0.1", "ports": "1" * 5000},
        {"cidr": "10.0.0.1", "ports": ",".join(["80"] * 17)},
        {"cidr": "10.0.0.1", "protocol": "sctp"},
        {"cidr": "10.0.0.1", "protocol": "icmp", "ports": "8"},
    ],
)
def test_a_rule_that_cannot_be_meant_is_invalid_and_named(rule: dict[str, str]) -> None:
    with pytest.raises(DsecError) as caught:
        compile_policy(_allow(NetworkRule(**rule)))
    assert caught.value.code is ErrorCode.INVALID
    assert str(caught.value.details["field"]).startswith("network.")


def test_unknown_rule_sets_are_invalid_and_known_ones_are_named() -> None:
    with pytest.raises(DsecError, match=r"it knows .*pypi") as caught:
        compile_policy(_allow(nothing_like_it=True))
    assert caught.value.details["reason"] == "unknown_rule_set"
    with pytest.raises(DsecError):
        compile_policy(_allow(nothing_like_it=False))


@pytest.mark.parametrize("name", sorted(RULE_SETS))
def test_every_known_rule_set_compiles(name: str) -> None:
    compiled = compile_policy(_allow(**{name: True}))
    assert compiled.hosts
    assert not compiled.allow


def test_a_set_that_is_not_wanted_allows_nothing() -> None:
    assert compile_policy(_allow(pypi=False)).hosts == ()


def test_modes_that_allow_by_themselves_take_no_allowed_rules() -> None:
    for mode in (NetworkMode.OPEN, NetworkMode.NONE):
        with pytest.raises(DsecError):
            compile_policy(NetworkPolicy(mode=mode, allow=(NetworkRule(cidr="10.0.0.1"),)))
        with pytest.raises(DsecError):
            compile_policy(NetworkPolicy(mode=mode, rule_sets={"pypi": True}))


def test_names_below_a_name_do_not_include_it_nor_its_look_alikes() -> None:
    compiled = compile_policy(_allow(NetworkRule(host="*.Example.ORG.")))
    assert compiled.may_ask("a.example.org")
    assert compiled.may_ask("a.b.example.org")
    for name in ("example.org", "badexample.org", "a.example.org.evil", "", "."):
        assert not compiled.may_ask(name)


def test_a_denied_name_is_not_looked_up_where_only_names_lead_to_addresses() -> None:
    policy = NetworkPolicy(
        mode=NetworkMode.ALLOW,
        allow=(NetworkRule(host="*.example"),),
        deny=(NetworkRule(host="*.secret.example"),),
    )
    compiled = compile_policy(policy)
    assert compiled.may_ask("public.example")
    assert not compiled.may_ask("a.secret.example")


@pytest.mark.parametrize(
    ("mode", "allow"),
    [
        (NetworkMode.OPEN, ()),
        (NetworkMode.ALLOW, (NetworkRule(cidr="10.0.0.0/8"), NetworkRule(host="*.example"))),
        (NetworkMode.ALLOW, (NetworkRule(ports="443"),)),
    ],
)
def test_a_denied_name_that_its_address_would_lead_to_is_unsupported(
    mode: NetworkMode, allow: tuple[NetworkRule, ...]
) -> None:
    policy = NetworkPolicy(mode=mode, allow=allow, deny=(NetworkRule(host="*.secret.example"),))
    with pytest.raises(DsecError, match=r"\*\.secret\.example.*cidr") as caught:
        compile_policy(policy)
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, False),
        (NetworkPolicy(), False),
        (NetworkPolicy(mode=NetworkMode.OPEN), True),
        (_allow(), False),
        (_allow(pypi=True), True),
        (_allow(pypi=False), False),
        (_allow(NetworkRule(host="a.example")), True),
        (_allow(NetworkRule(ports="443")), True),
        (_allow(NetworkRule(cidr="10.0.0.0/8"), NetworkRule(cidr="fd00::/8")), False),
        (_allow(NetworkRule(cidr="192.168.1.1"), NetworkRule(cidr="8.8.8.8")), True),
        (_allow(NetworkRule(cidr="0.0.0.0/0")), True),
        (_allow(NetworkRule(cidr="::/0")), True),
        (_allow(NetworkRule(cidr="nonsense")), False),
    ],
)
def test_names_sets_of_rules_and_public_addresses_need_a_way_outside(
    policy: NetworkPolicy | None, *, expected: bool
) -> None:
    assert needs_outside(policy) is expected


def test_international_names_are_compared_as_they_are_asked() -> None:
    assert compile_policy(_allow(NetworkRule(host="bücher.example"))).may_ask(
        "xn--bcher-kva.example"
    )


def test_ipv4_written_within_ipv6_is_ipv4() -> None:
    compiled = compile_policy(_allow(NetworkRule(cidr="::ffff:10.1.2.3")))
    assert compiled.allow[0].network == ipaddress.ip_network("10.1.2.3/32")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "169.254.169.254", "100.100.100.200", "224.0.0.1"),  # noqa: S104
        *("255.255.255.255", "::1", "::", "::ffff:127.0.0.1", "::127.0.0.1", "fe80::1"),
        *("fd00:ec2::254", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1", "100.96.0.1"),
        *("100.96.16.5", "fd64:7365:6300::1000", "168.63.129.16"),
    ],
)
def test_no_policy_makes_these_reachable(address: str) -> None:
    assert Rules(AddressPlan()).is_never(ipaddress.ip_address(address))


def test_ordinary_addresses_are_not_among_the_never_reachable() -> None:
    rules = Rules(AddressPlan())
    for text in ("1.1.1.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "2606:4700::1111", "fd12::1"):
        assert not rules.is_never(ipaddress.ip_address(text))
    assert len(NEVER) > 10


@given(st.integers(min_value=0, max_value=SANDBOXES_MAX - 1))
def test_an_address_tells_whose_it_is(number: int) -> None:
    plan = AddressPlan()
    for address in plan.addresses(number):
        assert plan.number_of(address) == number
        assert address not in plan.resolver


def test_numbers_rest_before_they_are_used_again() -> None:
    numbers = Numbers()
    first = numbers.take()
    numbers.give_back(first)
    assert [numbers.take() for _ in range(SANDBOXES_MAX)][-1] == first
    with pytest.raises(DsecError) as caught:
        numbers.take()
    assert caught.value.code is ErrorCode.EXHAUSTED


def test_the_rules_of_a_policy_are_bounded() -> None:
    policy = _allow(*[NetworkRule(cidr="10.0.0.1", ports="1,2,3,4,5,6,7,8")] * 256)
    with pytest.raises(DsecError):
        compile_policy(policy)
    few = compile_policy(_allow(*[NetworkRule(cidr=f"10.0.0.{n}") for n in range(200)]))
    assert len(Rules(AddressPlan()).attach(Port(1, 1, few))) < 300


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("10.0.0.0/8", NetworkRule(cidr="10.0.0.0/8")),
        ("10.0.0.0/8:443/tcp", NetworkRule(cidr="10.0.0.0/8", ports="443", protocol="tcp")),
        ("10.0.0.1:80,443", NetworkRule(cidr="10.0.0.1", ports="80,443")),
        ("example.org", NetworkRule(host="example.org")),
        ("*.example.org:8000-8100", NetworkRule(host="*.example.org", ports="8000-8100")),
        ("fd00::1", NetworkRule(cidr="fd00::1")),
        ("fd00::/8/udp", NetworkRule(cidr="fd00::/8", protocol="udp")),
        ("[fd00::1]:53/udp", NetworkRule(cidr="fd00::1", ports="53", protocol="udp")),
        ("[fd00::]/64:53", NetworkRule(cidr="fd00::/64", ports="53")),
        ("*:53/udp", NetworkRule(ports="53", protocol="udp")),
    ],
)
def test_a_rule_may_be_written_as_text(text: str, rule: NetworkRule) -> None:
    assert parse_rule(text) == rule


def test_a_policy_may_be_written_in_short() -> None:
    assert network_policy(None) is None
    assert network_policy("open") == NetworkPolicy(mode=NetworkMode.OPEN)
    policy = network_policy({"pypi": True, "allow": ["10.0.0.1"], "deny": [{"host": "x.org"}]})
    assert policy == NetworkPolicy(
        mode=NetworkMode.ALLOW,
        allow=(NetworkRule(cidr="10.0.0.1"),),
        deny=(NetworkRule(host="x.org"),),
        rule_sets={"pypi": True},
    )


def test_a_policy_that_only_denies_leaves_all_else_open() -> None:
    deny = (NetworkRule(cidr="10.0.0.0/8"),)
    assert network_policy({"deny": ["10.0.0.0/8"]}) == NetworkPolicy(
        mode=NetworkMode.OPEN, deny=deny
    )
    others: tuple[dict[str, Any], ...] = (
        {"allow": []},
        {"mode": "allow"},
        {"pypi": False},
        {"rule_sets": {}},
    )
    for other in others:
        policy = network_policy({"deny": ["10.0.0.0/8"], **other})
        assert policy is not None
        assert (policy.mode, policy.deny) == (NetworkMode.ALLOW, deny)
    assert network_policy({"deny": []}) == NetworkPolicy(mode=NetworkMode.ALLOW)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("closed", "none, allow, open"),
        ("pypi", r"\{'pypi': True\}"),
        (True, "'open'"),
        (["pypi"], r"\{'pypi': True"),
        (7, "'none'"),
        ({"pypi": 1}, "True or False"),
        ({1: True}, "True or False"),
        ({"rule_sets": ["pypi"]}, "mapping"),
        ({"rule_sets": {"pypi": "yes"}}, "True or False"),
        ({"allow": "10.0.0.1"}, "list of rules"),
        ({"allow": [{"cidr": 1}]}, "cidr"),
        ({"allow": [10]}, "10 is no rule"),
        ({"allow": ["https://pypi.org/simple"]}, "'pypi.org:443/tcp'"),
        ({"allow": ["http://x.example:8080/a"]}, "'x.example:8080'"),
        ({"mode": ["open"]}, "mode"),
    ],
)
def test_what_is_no_policy_is_invalid_and_told_how_to_be_one(wrong: Any, says: str) -> None:
    with pytest.raises(DsecError, match=says) as caught:
        network_policy(wrong)
    assert caught.value.code is ErrorCode.INVALID


def test_upstreams_are_read_from_settings_and_from_the_host() -> None:
    assert Upstream.parse("10.0.0.1") == Upstream("10.0.0.1", 53)
    assert Upstream.parse("10.0.0.1:5353") == Upstream("10.0.0.1", 5353)
    assert Upstream.parse("[fd00::1]:5353") == Upstream("fd00::1", 5353)
    assert Upstream.parse("fd00::1") == Upstream("fd00::1", 53)
    for wrong in ("", "x", "10.0.0.1:0", "10.0.0.1:x", "[fd00::1]:99999"):
        with pytest.raises(ValueError):  # noqa: PT011  int's and ours
            Upstream.parse(wrong)
    text = "# x\nnameserver 10.0.0.1\nsearch a\nnameserver fe80::1%eth0\nnameserver nonsense\n"
    assert upstreams_of_host(text) == (Upstream("10.0.0.1"), Upstream("fe80::1"))


@pytest.mark.parametrize(
    "settings",
    [
        {"network_deny": ("10.0.0.0/99",)},
        {"network_resolvers": ("example.org",)},
        {"network_connections_max": 0},
        {"network_rule_sets": {"mine": (NetworkRule(cidr="x"),)}},
    ],
)
def test_wrong_network_settings_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SandboxdConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        {"mode": "allow", "allow": [{"cdir": "10.0.0.0/8"}]},
        {"mode": "allow", "allow": [{"host": "a.example", "port": 443}]},
        {"mode": "open", "denied": [{"cidr": "10.0.0.0/8"}]},
    ],
)
def test_a_field_that_nobody_knows_opens_nothing(policy: dict[str, Any]) -> None:
    for body, content_type in (
        (msgspec.json.encode({"policy": policy}), JSON),
        (msgspec.msgpack.encode({"policy": policy}), MSGPACK),
    ):
        with pytest.raises(DsecError, match="unknown field") as caught:
            decode(body, SetNetwork, content_type)
        assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError, match=r"denied|unknown field"):
        network_policy(policy)
