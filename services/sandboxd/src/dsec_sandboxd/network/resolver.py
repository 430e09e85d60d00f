"""The node's resolver: answers a sandbox's queries for the names that its policy allows.

A query never leaves as it came: what is forwarded is a new one, with nothing of the sandbox's but
the name and the type, so a name that is not allowed carries nothing out. Of an answer only
addresses that the sandbox may ever reach are passed on, and only after the kernel knows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from dsec_common.network_policy import Address
from dsec_sandboxd.network.lookups import look_up
from dsec_sandboxd.network.plan import AddressPlan, Port
from dsec_sandboxd.network.router import ResolverSockets
from dsec_sandboxd.network.upstreams import Upstream

Learn = Callable[[Port, list[tuple[int, Address, float]]], Awaitable[bool]]
"""Allows addresses in the kernel; false when the policy is another one by now."""

ANSWER_TTL_MAX_S: Final = 3600
LEARNED_FOR_MIN_S: Final = 10
_LEARNED_AT_ONCE_MAX: Final = 64
_LOOKUPS_MAX: Final = 512
_LOOKUPS_OF_ONE_MAX: Final = 32
_CONNECTIONS_OF_ONE_MAX: Final = 4
_CONNECTION_IDLE_S: Final = 10.0
_UDP_BYTES_MIN: Final = 512
_UDP_BYTES_MAX: Final = 1232
_QUERY_BYTES_MAX: Final = 1024
_NAME: Final = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)*[a-z0-9_][a-z0-9_-]{0,62}")
_ADDRESSES: Final = frozenset({dns.rdatatype.A, dns.rdatatype.AAAA})
#: What is looked up. Anything else is answered with nothing: HTTPS records, say, carry addresses.
_FORWARDED: Final = _ADDRESSES | {
    dns.rdatatype.CNAME,
    dns.rdatatype.MX,
    dns.rdatatype.TXT,
    dns.rdatatype.SRV,
}


class Resolver:
    """Serves the sockets until closed.

    Args:
        plan: tells a sandbox by its source address, which the kernel has checked.
        ports: the sandboxes' places, by number.
        upstreams: asked in this order.
        is_never: whether no sandbox may reach an address.
        learn: allows addresses for a while.
        on_refused: is told of each name that a sandbox may not ask for.
    """

    def __init__(
        self,
        plan: AddressPlan,
        ports: dict[int, Port],
        upstreams: Sequence[Upstream],
        *,
        is_never: Callable[[Address], bool],
        learn: Learn,
        on_refused: Callable[[int, str], None],
    ) -> None:
        self._plan = plan
        self._ports = ports
        self._upstreams = upstreams
        self._is_never = is_never
        self._learn = learn
        self._on_refused = on_refused
        self._lookups: Counter[int] = Counter()
        self._connections: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: list[asyncio.DatagramTransport] = []
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, sockets: ResolverSockets) -> None:
        """Answer what comes in on ``sockets``, which are this object's from now on."""
        loop = asyncio.get_running_loop()
        for one in sockets.udp:
            transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=one)
            self._transports.append(transport)
        for one in sockets.tcp:
            self._servers.append(await asyncio.start_server(self._accept, sock=one))

    async def close(self) -> None:
        """Stop answering. Idempotent."""
        for transport in self._transports:
            transport.close()
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._transports.clear()
        self._servers.clear()

    # --- Ways in ------------------------------------------------------------------------------

    def datagram(
        self, transport: asyncio.DatagramTransport, data: bytes, source: tuple[Any, ...]
    ) -> None:
        """Take a query by UDP; beyond what is looked up at once it is dropped, as UDP may be."""
        number = self._number(source)
        busy = self._lookups.total() >= _LOOKUPS_MAX
        if number < 0 or busy or self._lookups[number] >= _LOOKUPS_OF_ONE_MAX:
            return
        self._lookups[number] += 1

        async def answer() -> None:
            try:
                reply = await self.answer(number, data, datagram=True)
                if reply is not None and not transport.is_closing():
                    transport.sendto(reply, source)
            finally:
                self._let_go(self._lookups, number)

        task = asyncio.create_task(answer(), name="resolve")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self._number(writer.get_extra_info("peername") or ("",))
        if number < 0 or self._connections[number] >= _CONNECTIONS_OF_ONE_MAX:
            writer.close()
            return
        self._connections[number] += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._talk(number, reader, writer), name="resolve by TCP")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take queries by TCP, one after the other."""
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                while True:
                    async with asyncio.timeout(_CONNECTION_IDLE_S):
                        size = int.from_bytes(await reader.readexactly(2), "big")
                        if not 0 < size <= _QUERY_BYTES_MAX:
                            return
                        query = await reader.readexactly(size)
                    reply = await self.answer(number, query, datagram=False)
                    if reply is None:
                        return
                    writer.write(len(reply).to_bytes(2, "big") + reply)
                    async with asyncio.timeout(_CONNECTION_IDLE_S):
                        await writer.drain()
        finally:
            self._let_go(self._connections, number)
            self._writers.discard(writer)
            writer.close()

    def _number(self, source: tuple[Any, ...]) -> int:
        try:
            number = self._plan.number_of(ipaddress.ip_address(source[0]))
        except ValueError:
            return -1
        return number if number in self._ports else -1

    @staticmethod
    def _let_go(counter: Counter[int], number: int) -> None:
        counter[number] -= 1
        if not counter[number]:
            del counter[number]

    # --- Answers ------------------------------------------------------------------------------

    async def answer(self, number: int, data: bytes, *, datagram: bool) -> bytes | None:
        """Return the reply to a sandbox's query, or None for what deserves none."""
        if len(data) > _QUERY_BYTES_MAX:
            return None
        try:
            query = dns.message.from_wire(data, question_only=True, ignore_trailing=True)
        except (dns.exception.DNSException, ValueError, IndexError, KeyError, TypeError):
            return None
        if query.flags & dns.flags.QR:
            return None
        reply = dns.message.make_response(query, recursion_available=True, our_payload=0)
        port = self._ports.get(number)
        if port is None:
            return None
        if query.opcode() != dns.opcode.QUERY or len(query.question) != 1:
            reply.set_rcode(dns.rcode.NOTIMP)
        else:
            await self._resolve(port, query.question[0], reply)
        size = max(_UDP_BYTES_MIN, min(query.payload or 0, _UDP_BYTES_MAX))
        return _wire(reply, size if datagram else 0xFFFF)

    async def _resolve(
        self, port: Port, question: dns.rrset.RRset, reply: dns.message.Message
    ) -> None:
        name = question.name.to_text(omit_final_dot=True).lower()
        fit = question.rdclass == dns.rdataclass.IN and _NAME.fullmatch(name) is not None
        if not fit or not port.policy.may_ask(name):
            # Not REFUSED: some libraries would ask again and again, and call it temporary.
            reply.set_rcode(dns.rcode.NXDOMAIN)
            self._on_refused(port.number, name[:253])
            return
        if question.rdtype not in _FORWARDED:
            return
        found = await self._look_up(name, question.rdtype)
        if found is None:
            reply.set_rcode(dns.rcode.SERVFAIL)
            return
        reply.set_rcode(
            found.rcode()
            if found.rcode() in {dns.rcode.NOERROR, dns.rcode.NXDOMAIN}
            else dns.rcode.SERVFAIL
        )
        addresses: dict[Address, float] = {}
        for rrset in found.answer:
            kept = self._kept(port, rrset, addresses)
            if kept is not None:
                reply.answer.append(kept)
        groups = port.policy.ports_at(name)
        learned = [
            (group, address, seconds) for address, seconds in addresses.items() for group in groups
        ]
        if learned and not await self._learn(port, learned):
            reply.answer.clear()
            reply.set_rcode(dns.rcode.SERVFAIL)

    def _kept(
        self, port: Port, rrset: dns.rrset.RRset, addresses: dict[Address, float]
    ) -> dns.rrset.RRset | None:
        """Return what of a set of records is passed on; its addresses are added."""
        if rrset.rdtype not in _FORWARDED or rrset.rdclass != dns.rdataclass.IN:
            return None
        kept = dns.rrset.RRset(rrset.name, rrset.rdclass, rrset.rdtype)
        kept.ttl = min(rrset.ttl, ANSWER_TTL_MAX_S)
        for record in rrset:
            if rrset.rdtype in _ADDRESSES:
                address = ipaddress.ip_address(record.address)
                full = len(addresses) >= _LEARNED_AT_ONCE_MAX
                if full or self._is_never(address) or port.policy.denies(address):
                    continue
                addresses[address] = max(kept.ttl, LEARNED_FOR_MIN_S)
            kept.add(record, kept.ttl)
        return kept if len(kept) else None

    async def _look_up(
        self, name: str, kind: dns.rdatatype.RdataType
    ) -> dns.message.Message | None:
        return await look_up(self._upstreams, name, kind)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every event loop's transport is one by inheritance.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        if self._transport is not None:
            self._resolver.datagram(self._transport, data, addr)


def _wire(reply: dns.message.Message, size: int) -> bytes | None:
    try:
        return reply.to_wire(max_size=size)
    except dns.exception.TooBig:
        reply.answer.clear()
        reply.flags |= dns.flags.TC
        return reply.to_wire(max_size=size)
    except (dns.exception.DNSException, ValueError):
        return None
