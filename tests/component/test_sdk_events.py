"""The SDK's events over a real NATS: subscribed to while somebody listens, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from control_plane import until
from dsec.channel import Channel
from dsec.events import EventHub, EventStream
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import BusConfig
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.sandbox import EndCause, SandboxEnded

NODE = "node-1"
WAIT_S = 5.0


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as server:
        yield server


@pytest.fixture
async def hub(nats: NatsForTests) -> AsyncIterator[EventHub]:
    bus = await Bus.connect(
        BusConfig(servers=(nats.server.url,), credentials_path=str(nats.auth.project("default")))
    )
    events = EventHub(Channel(bus, "default"))
    yield events
    await events.aclose()
    await bus.drain()


async def tell(node: Bus, local: str) -> None:
    ended = SandboxEnded(sandbox_id=f"{NODE}.{local}", cause=EndCause.DELETED)
    await node.publish(subjects.sandbox_event("default", ScopedId(NODE, local), "ended"), ended)
    await node.flush()


async def test_events_are_sent_to_a_client_only_while_it_listens_and_anew_when_it_does_again(
    nats: NatsForTests, hub: EventHub
) -> None:
    async with nats.service("sandboxd", NODE) as node, asyncio.timeout(WAIT_S):
        for local in ("first", "second"):
            async with EventStream(hub) as events:
                await tell(node, local)
                heard = await anext(events)
                assert isinstance(heard, SandboxEnded)
                assert heard.sandbox_id == f"{NODE}.{local}"
            await until(lambda: not hub.subscribed)


async def test_one_listener_that_leaves_takes_nothing_from_another(
    nats: NatsForTests, hub: EventHub
) -> None:
    async with nats.service("sandboxd", NODE) as node, asyncio.timeout(WAIT_S):
        async with EventStream(hub) as stays:
            async with EventStream(hub) as leaves:
                await tell(node, "one")
                await anext(leaves)
            await tell(node, "two")
            heard = [await anext(stays), await anext(stays)]
            assert [event.sandbox_id for event in heard if isinstance(event, SandboxEnded)] == [
                f"{NODE}.one",
                f"{NODE}.two",
            ]
        await until(lambda: not hub.subscribed)


async def test_a_client_may_close_while_its_subscription_is_about_to_end(
    hub: EventHub,
) -> None:
    async with EventStream(hub):
        assert hub.subscribed
    await hub.aclose()
    await hub.aclose()
