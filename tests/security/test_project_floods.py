"""A project that floods a node hears that it is too much; its neighbour hears nothing of it.

``evil`` has a raw client and sends whatever the server takes; ``default`` works on beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dsec_common import accounts, subjects
from dsec_common.bus import Bus, Request
from dsec_common.bus_intake import PROJECT_BYTES_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message, encode

SANDBOX = ScopedId("node-1", "a")
CONCURRENCY, PENDING = 64, 1024


class Asked(Message, frozen=True, kw_only=True):
    data: bytes = b""


@dataclass
class Floods:
    """A node whose handlers are held up by ``evil`` until it is let go, and who asks them."""

    running: NatsForTests
    node: Bus
    neighbour: Bus
    evil: Client
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    codes: Counter[str] = field(default_factory=Counter)
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def work(self, request: Request[Asked]) -> Asked:
        if request.project == "evil":
            await self.gate.wait()
        return Asked()

    async def hear(self, message: Msg) -> None:
        async with self.heard:
            self.codes[(message.headers or {}).get("Nats-Service-Error-Code", "answered")] += 1
            self.heard.notify_all()

    async def flood(self, verb: str, count: int, body: bytes) -> None:
        """Send requests; nobody waits for an answer before the next."""
        inbox = self.evil.new_inbox()
        await self.evil.subscribe(inbox, cb=self.hear)
        for _ in range(count):
            await self.evil.publish(subjects.sandbox("evil", SANDBOX, verb), body, reply=inbox)
        await self.evil.flush(30)

    async def until_heard(self, count: int) -> None:
        """Return when so many answers have come."""
        async with asyncio.timeout(30), self.heard:
            await self.heard.wait_for(lambda: self.codes.total() >= count)

    async def neighbour_is_served(self) -> None:
        """Assert that more requests than fit into a handler's reserve are answered."""
        asked = subjects.sandbox("default", SANDBOX, "exec")
        for _ in range(3):
            await asyncio.gather(
                *(self.neighbour.request(asked, Asked(), Asked) for _ in range(2 * CONCURRENCY))
            )


@pytest.fixture
async def floods() -> AsyncIterator[Floods]:
    async with (
        nats_for_tests(projects=("evil",)) as running,
        running.service("sandboxd", "node-1") as node,
        running.project("default") as neighbour,
    ):
        evil = Client()
        credentials = str(running.auth.project("evil"))
        await evil.connect(
            running.server.url, user_credentials=credentials, pending_size=PROJECT_BYTES_MAX
        )
        floods = Floods(running, node, neighbour, evil)
        try:
            for verb in ("exec", "write_file"):
                await node.serve(
                    subjects.any_project_sandbox("node-1", verb),
                    Asked,
                    floods.work,
                    concurrency=CONCURRENCY if verb == "exec" else 4096,
                    max_pending=PENDING,
                )
            await node.flush()
            yield floods
        finally:
            floods.gate.set()
            await evil.close()
            await asyncio.sleep(0)


async def test_a_flood_of_requests_is_exhausted_for_who_sends_it_and_nobody_else(
    floods: Floods,
) -> None:
    most = CONCURRENCY + PENDING
    await floods.flood("exec", 3 * most, encode(Asked()))
    await floods.until_heard(2 * most)
    await floods.neighbour_is_served()
    assert set(floods.codes) == {"429"}
    floods.gate.set()
    await floods.until_heard(3 * most)
    assert floods.codes["answered"] == most - most // 8
    await floods.neighbour_is_served()


async def _send(url: str, credentials: str, subject: str, requests: int) -> Counter[str]:
    """Send requests of 1 MB on a connection of its own; return what is answered at once."""
    answers: Counter[str] = Counter()

    async def hear(message: Msg) -> None:
        answers[(message.headers or {}).get("Status", "answered")] += 1

    client = Client()
    await client.connect(url, user_credentials=credentials)
    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=hear)
    for _ in range(requests):
        await client.publish(subject, bytes(1_000_000), reply=inbox)
        await client.flush(60)
    await client.close()
    return answers


async def test_a_flood_from_eight_connections_ends_nobodys_connection(floods: Floods) -> None:
    server = floods.running.server
    subject = subjects.sandbox("evil", SANDBOX, "write_file")
    credentials = str(floods.running.auth.project("evil"))

    async def flood() -> Counter[str]:
        sent = (_send(server.url, credentials, subject, 50) for _ in range(8))
        return sum(await asyncio.gather(*sent), Counter())

    # The node reads nothing meanwhile: its loop is this one, which waits for the thread.
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asyncio.run, flood()).result()
    await floods.node.flush(60)  # it has read what was on its way
    await floods.neighbour_is_served()
    assert answers["503"] > 100  # no responders
    assert "Slow Consumer" not in server.log_path.read_text()


async def test_a_project_has_so_many_connections_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "PROJECT_CONNECTIONS_MAX", 3)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(nats_for_tests(projects=("evil",)))
        for _ in range(3):
            await stack.enter_async_context(running.project("evil"))
        config = msgspec.structs.replace(running.project_config("evil"), connect_timeout_s=0.5)
        with pytest.raises(DsecError) as caught:
            await Bus.connect(config)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert "maximum account active connections exceeded" in caught.value.message
        await stack.enter_async_context(running.project("default"))


async def test_a_flood_of_huge_requests_holds_a_bounded_part_of_the_memory(floods: Floods) -> None:
    body = encode(Asked(data=bytes(1_000_000)))
    fit = PROJECT_BYTES_MAX // len(body)
    for _ in range(fit // 10):
        await floods.flood("write_file", 10, body)
        await floods.node.flush()
    await floods.flood("write_file", fit % 10 + 20, body)
    await floods.until_heard(20)
    await floods.neighbour_is_served()
    assert floods.codes == {"429": 20}
    floods.gate.set()
    await floods.until_heard(fit + 20)
    assert floods.codes["answered"] == fit
