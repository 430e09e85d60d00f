"""Requests that share one sample: what happens to one of them is not what happens to the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from agent_world import sandbox_record
from dsec.model_relay import (
    ModelAnswer,
    ModelBegun,
    ModelDelta,
    ModelRelay,
    ModelRequest,
    Sampled,
)
from dsec.model_relay.calls import Tell
from dsec.model_relay.journal import Recorded
from dsec_common.errors import unavailable
from dsec_common.testing.clock import FakeClock
from model_world import ModelWorld

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")


class _Client:
    """Sends one request, the same as all others, and reads the answer when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def calling(
        cls, world: ModelWorld, *, retry: int = 0, text: str = "hi"
    ) -> AsyncIterator[_Client]:
        messages = [{"role": "user", "content": text}]
        body = msgspec.json.encode({"model": "m", "messages": messages, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"x-stainless-retry-count: {retry}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def read(self) -> bytes:
        """Return all that comes until the connection ends."""
        async with asyncio.timeout(20):
            return await self._reader.read()


class _Engine:
    """Tells ``telling`` and returns it, each time when it is let on."""

    def __init__(self) -> None:
        self.telling = "first"
        self.asked = 0
        self.on = asyncio.Event()
        self.fails = False
        self.given_up = asyncio.Event()

    async def __call__(self, request: ModelRequest) -> Sampled:
        raise AssertionError

    async def stream(self, request: ModelRequest, tell: Tell) -> Sampled:
        self.asked += 1
        text = self.telling
        tell(ModelBegun(id="1", created=1))
        tell(ModelDelta(content=text))
        try:
            await self.on.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        if self.fails:
            raise unavailable("the engine is away")
        answer = ModelAnswer(id="1", created=1, content=text)
        return Sampled(answer=answer, prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,))


@contextlib.asynccontextmanager
async def _relay(world: ModelWorld, engine: Any, **options: Any) -> AsyncIterator[ModelRelay]:
    """Have a relay at work that ends by itself when its rollout is closed."""
    async with ModelRelay(world.rollout, engine, journal=world.journal, **options) as relay:
        running = asyncio.create_task(relay.run())
        try:
            yield relay
            await world.rollout.close()
            async with asyncio.timeout(20):
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _until_reported(relay: ModelRelay, count: int) -> None:
    async with asyncio.timeout(20):
        while len(relay._by_report) < count:
            await asyncio.sleep(0.01)


async def _until_let_go(world: ModelWorld, count: int) -> None:
    """Return when the node has so many calls under way, and no more."""
    session = world.doors._doors[sandbox_record().local].session
    async with asyncio.timeout(20):
        while sum(map(len, session._calls.values())) > count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("gone", [0, 1], ids=["the first", "the second"])
async def test_who_hangs_up_takes_no_sample_from_who_waits_for_the_same(
    world: ModelWorld, gone: int
) -> None:
    engine = _Engine()
    async with _relay(world, engine) as relay, contextlib.AsyncExitStack() as stack:
        hanging_up = contextlib.AsyncExitStack()
        stacks = [stack, stack]
        stacks[gone] = hanging_up
        clients = []
        for number in range(2):
            calling = _Client.calling(world, retry=number)
            clients.append(await stacks[number].enter_async_context(calling))
            await _until_reported(relay, number + 1)
        await hanging_up.aclose()
        await _until_let_go(world, 1)
        # What the node had to say of it was said before this.
        await stack.enter_async_context(_Client.calling(world, text="another"))
        await _until_reported(relay, 3)
        engine.on.set()
        assert b"[DONE]" in await clients[1 - gone].read()
    assert engine.asked == 2


async def test_a_sample_that_all_have_hung_up_on_is_ended(world: ModelWorld) -> None:
    engine = _Engine()
    async with _relay(world, engine) as relay:
        async with _Client.calling(world):
            await _until_reported(relay, 1)
            async with _Client.calling(world, retry=1):
                await _until_reported(relay, 2)
            await _until_let_go(world, 1)
        async with asyncio.timeout(20):
            await engine.given_up.wait()


async def test_a_repetition_between_two_attempts_is_told_the_second_alone(
    world: ModelWorld,
) -> None:
    engine, clock = _Engine(), FakeClock()
    engine.fails = True
    async with _relay(world, engine, clock=clock) as relay, _Client.calling(world):
        engine.on.set()
        async with asyncio.timeout(20):
            while not clock.sleeping:
                await asyncio.sleep(0.01)
        engine.fails, engine.telling = False, "second"
        async with _Client.calling(world, retry=1) as again:
            await _until_reported(relay, 2)
            await clock.advance(10.0)
            told = await again.read()
    assert b"first" not in told
    assert b"second" in told
    assert b"[DONE]" in told


async def test_a_repetition_while_an_answer_is_recorded_does_not_keep_the_relay(
    world: ModelWorld,
) -> None:
    engine = _Engine()
    async with _relay(world, engine) as relay, _Client.calling(world) as first:
        recording, go_on = asyncio.Event(), asyncio.Event()
        record = relay._journal.record

        async def slow_disk(recorded: Recorded) -> None:
            recording.set()
            await go_on.wait()
            await record(recorded)

        relay._journal.record = slow_disk  # type: ignore[method-assign]
        engine.on.set()
        async with asyncio.timeout(20):
            await recording.wait()
        async with _Client.calling(world, retry=1) as again:
            await _until_reported(relay, 2)
            await world.rollout.inspect()
            go_on.set()
            for client in (first, again):
                assert b"[DONE]" in await client.read()
