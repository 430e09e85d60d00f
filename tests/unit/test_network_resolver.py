from __future__ import annotations

import random

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_common.network_policy import Address, compile_policy
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_sandboxd.network.plan import AddressPlan, Port, Rules
from dsec_sandboxd.network.resolver import Resolver


class Asked(Exception):  # noqa: N818  a signal of the test, not an error
    """A name left the node."""


class Silent(Resolver):
    """A resolver that would notice if anything were looked up."""

    async def _look_up(self, name: str, kind: dns.rdatatype.RdataType) -> dns.message.Message:
        raise Asked(name)


class Noting(Resolver):
    """A resolver that notes what it looks up, and finds nothing."""

    asked: tuple[str, ...] = ()

    async def _look_up(self, name: str, kind: dns.rdatatype.RdataType) -> None:
        self.asked += (name,)


class Answering(Resolver):
    """A resolver whose upstream says what it is given."""

    given: dns.message.Message

    async def _look_up(self, name: str, kind: dns.rdatatype.RdataType) -> dns.message.Message:
        return self.given


def _resolver(kind: type[Resolver], policy: NetworkPolicy) -> tuple[Resolver, list[Address]]:
    learned: list[Address] = []

    async def learn(port: Port, found: list[tuple[int, Address, float]]) -> bool:
        learned.extend(address for _, address, _ in found)
        return True

    rules = Rules(AddressPlan())
    ports = {0: Port(0, 1, compile_policy(policy))}
    made = kind(
        AddressPlan(),
        ports,
        (),
        is_never=rules.is_never,
        learn=learn,
        on_refused=lambda *_: None,
    )
    return made, learned


ONE = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(host="a.example"),))


async def _ask(resolver: Resolver, query: dns.message.Message) -> dns.message.Message:
    reply = await resolver.answer(0, query.to_wire(), datagram=True)
    assert reply is not None
    return dns.message.from_wire(reply)


@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "MX", "NS", "ANY", "NULL", "CNAME", "PTR"])
async def test_a_name_that_is_not_allowed_never_leaves_the_node(kind: str) -> None:
    resolver, _ = _resolver(Silent, ONE)
    for name in ("secret.data.evil.example", "b.a.example", "a.example.evil", "xa.example", "."):
        reply = await _ask(resolver, dns.message.make_query(name, kind))
        assert reply.rcode() == dns.rcode.NXDOMAIN


async def test_an_allowed_name_is_asked_whatever_its_case() -> None:
    resolver, _ = _resolver(Silent, ONE)
    for name in ("a.example", "A.ExAmPlE"):
        with pytest.raises(Asked, match=r"^a\.example$"):
            await _ask(resolver, dns.message.make_query(name, "A"))


async def test_records_that_carry_addresses_in_other_ways_are_not_asked_for() -> None:
    resolver, _ = _resolver(Silent, ONE)
    for kind in ("HTTPS", "SVCB", "ANY", "NS", "SOA"):
        reply = await _ask(resolver, dns.message.make_query("a.example", kind))
        assert reply.rcode() == dns.rcode.NOERROR
        assert reply.answer == []


async def test_only_reachable_addresses_are_passed_on_and_learned() -> None:
    resolver, learned = _resolver(Answering, ONE)
    assert isinstance(resolver, Answering)
    resolver.given = dns.message.from_text(
        "id 1\nopcode QUERY\nrcode NOERROR\nflags QR\n;QUESTION\na.example. IN A\n;ANSWER\n"
        "a.example. 999999 IN CNAME b.example.\n"
        "b.example. 60 IN A 10.1.2.3\nb.example. 60 IN A 127.0.0.1\n"
        "b.example. 60 IN A 169.254.169.254\n"
        "b.example. 60 IN AAAA ::ffff:127.0.0.1\n"
        ";AUTHORITY\nexample. 60 IN NS ns.example.\n;ADDITIONAL\nns.example. 60 IN A 10.9.9.9\n"
    )
    reply = await _ask(resolver, dns.message.make_query("a.example", "A"))
    assert [str(address) for address in learned] == ["10.1.2.3"]
    assert "127.0.0.1" not in reply.to_text()
    assert "169.254" not in reply.to_text()
    assert reply.authority == reply.additional == []
    assert reply.answer[0].ttl == 3600


async def test_a_large_answer_is_cut_for_udp_and_says_so() -> None:
    resolver, _ = _resolver(Answering, NetworkPolicy(mode=NetworkMode.OPEN))
    assert isinstance(resolver, Answering)
    lines = "\n".join(f"a.example. 60 IN TXT {'x' * 200}{n}" for n in range(20))
    resolver.given = dns.message.from_text(
        "id 1\nopcode QUERY\nrcode NOERROR\nflags QR\n;QUESTION\na.example. IN TXT\n"
        f";ANSWER\n{lines}\n"
    )
    query = dns.message.make_query("a.example", "TXT")
    reply = await resolver.answer(0, query.to_wire(), datagram=True)
    assert reply is not None
    assert len(reply) <= 512
    assert dns.message.from_wire(reply).flags & dns.flags.TC
    whole = await resolver.answer(0, query.to_wire(), datagram=False)
    assert whole is not None
    assert len(dns.message.from_wire(whole).answer[0]) == 20


async def test_other_operations_answers_and_several_questions_are_refused() -> None:
    resolver, _ = _resolver(Silent, ONE)
    query = dns.message.make_query("a.example", "A")
    query.set_opcode(dns.opcode.NOTIFY)
    assert (await _ask(resolver, query)).rcode() == dns.rcode.NOTIMP
    answer = dns.message.make_query("a.example", "A")
    answer.flags |= dns.flags.QR
    assert await resolver.answer(0, answer.to_wire(), datagram=True) is None
    assert await resolver.answer(1, answer.to_wire(), datagram=True) is None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=1500), seed=st.integers(0, 1 << 32))
async def test_hostile_queries_are_answered_or_dropped_and_nothing_is_asked(
    data: bytes, seed: int
) -> None:
    resolver, _ = _resolver(Noting, ONE)
    assert isinstance(resolver, Noting)
    await resolver.answer(0, data, datagram=True)
    # A real query, with a few bytes changed: deeper into the parser than noise gets.
    chance = random.Random(seed)  # noqa: S311  no secret
    query = bytearray(dns.message.make_query("b.example", "A", use_edns=True).to_wire())
    for _ in range(chance.randrange(1, 6)):
        query[chance.randrange(2, len(query))] = chance.randrange(256)
    await resolver.answer(0, bytes(query), datagram=False)
    assert set(resolver.asked) <= {"a.example"}
