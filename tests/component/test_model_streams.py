"""Answers reach their harness while they are sampled, and the trace holds what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import anthropic
import httpx
import msgspec
import pytest

from agent_world import sandbox_record
from dsec.channel import Channel
from dsec.model_relay import (
    Budget,
    HttpEngine,
    ModelAnswer,
    ModelBegun,
    ModelDelta,
    ModelRelay,
    ModelRequest,
    Sampled,
)
from dsec.model_relay.calls import Tell
from dsec.rollouts import Rollouts
from dsec_common.errors import DsecError
from dsec_common.testing.nats import NatsForTests
from dsec_sandboxd.model_session import PendingCall
from model_engine import END, ScriptedServer, prompt_ids, tokens_of
from model_world import HI, ModelWorld, raw_call

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.hold_tokens()
    return server


class _Harness:
    """Asks for a stream with bytes of its own, and reads as much of it as it is told to."""

    def __init__(self, world: ModelWorld, *, path: str = "chat/completions", **asked: Any) -> None:
        body = {"model": "m", "messages": HI, "stream": True, **asked}
        self._client = httpx.AsyncClient(timeout=20)
        url = f"http://127.0.0.1:{world.port}/v1/{path}"
        self.request = self._client.build_request("POST", url, json=body)
        self._chunks: AsyncIterator[bytes] | None = None
        self.told = b""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def read_until(self, text: str) -> None:
        """Read until a text was told."""
        if self._chunks is None:
            response = await self._client.send(self.request, stream=True)
            assert response.headers["content-type"] == "text/event-stream"
            self._chunks = response.aiter_raw()
        while text not in self.text:
            self.told += await anext(self._chunks)

    async def read_all(self) -> None:
        """Read until the stream ends."""
        assert self._chunks is not None
        async for chunk in self._chunks:
            self.told += chunk

    @property
    def text(self) -> str:
        """What was said so far, of whichever interface."""
        said = []
        for line in self.told.split(b"\n"):
            with contextlib.suppress(msgspec.DecodeError, IndexError, KeyError, TypeError):
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                if "choices" in event:
                    said.append(event["choices"][0]["delta"].get("content", ""))
                elif event["type"] == "response.output_text.delta":
                    said.append(event["delta"])
                elif event["type"] == "content_block_delta":
                    said.append(event["delta"]["text"])
        return "".join(said)


def _calls(world: ModelWorld) -> list[PendingCall]:
    session = world.doors._doors[sandbox_record().local].session
    return [call for calls in session._calls.values() for call in calls]


def _pending_bytes(world: ModelWorld) -> int:
    return sum(len(call.stream._pending) for call in _calls(world) if call.stream)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {}),
        ("responses", {"messages": None, "input": "hi"}),
        ("messages", {"max_tokens": 9}),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_what_is_sampled_is_told_before_the_answer_is_whole(
    world: ModelWorld, server: ScriptedServer, path: str, asked: dict[str, Any]
) -> None:
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine) as relay,
        _Harness(world, path=path, **asked) as harness,
    ):
        server.let_through(2)
        await harness.read_until("fi")
        assert harness.text == "fi"
        assert not relay.trace().sequences
        server.let_through(1)
        await harness.read_until("fir")
        server.let_through(3)
        await harness.read_all()
        assert harness.text == "first"
        (sequence,) = relay.trace().sequences
        (turn,) = sequence.turns
    assert sequence.token_ids[: turn.start] == tuple(prompt_ids(HI))
    assert sequence.token_ids[turn.start :] == (*tokens_of("first"), END)
    assert sequence.logprobs[turn.start :] == tuple(-it / 1000 for it in (*b"first", END))
    assert world.steps[0].tokens_out == len("first") + 1


async def test_clients_of_all_interfaces_read_streams_that_come_bit_by_bit(
    world: ModelWorld, server: ScriptedServer
) -> None:
    server.let_through(1000)
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine),
        world.client() as client,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{world.port}", api_key="none"
        ) as other,
    ):
        async with client.chat.completions.stream(
            model="m", messages=HI, logprobs=True, stream_options={"include_usage": True}
        ) as events:
            done = await events.get_final_completion()
        assert done.choices[0].message.content == "first"
        assert done.usage
        assert done.usage.completion_tokens == len("first") + 1
        async with client.responses.stream(model="m", input="hi") as events_of_response:
            assert (await events_of_response.get_final_response()).output_text == "second"
        async with other.messages.stream(model="m", max_tokens=9, messages=HI) as told:
            message = await told.get_final_message()
        assert message.content[0].to_dict()["text"] == "third"
        assert message.usage.input_tokens == len(prompt_ids(HI))


async def test_what_was_streamed_is_what_is_recorded_and_told_again(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine),
        _Harness(world) as harness,
    ):
        for count in range(1, len("first") + 1):
            server.let_through(1)
            await harness.read_until("first"[:count])
        server.let_through(1)
        await harness.read_all()
        again = httpx.AsyncClient(timeout=20)
        async with again:
            request = harness.request
            answer = await again.post(
                request.url,
                content=request.content,
                headers={"x-stainless-retry-count": "1"},
            )
    assert answer.content == harness.told
    assert harness.told.count(b"data: ") == len("first") + 3
    assert len(server.asked) == 1


async def test_a_harness_that_hangs_up_in_the_middle_ends_the_sampling(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        async with _Harness(world) as harness:
            server.let_through(2)
            await harness.read_until("fi")
        await server.until_asked(1)
        server.let_through(1)
        await server.until_abandoned(1)
        server.let_through(100)
        assert b"second" in await raw_call(world, read=True)
        (sequence,) = relay.trace().sequences
        assert sequence.sampled_tokens == len("second") + 1


async def test_a_harness_that_calls_again_in_the_middle_is_told_the_same_sample_from_its_beginning(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        async with _Harness(world) as lost:
            server.let_through(2)
            await lost.read_until("fi")
        async with asyncio.timeout(20):
            while any(call.waiting for call in _calls(world)):
                await asyncio.sleep(0.01)
        async with _Harness(world) as harness:
            server.let_through(1)
            await harness.read_until("fir")
            assert harness.text == "fir"
            server.let_through(3)
            await harness.read_all()
            assert harness.text == "first"
        assert len(relay.trace().sequences) == 1
    assert len(server.asked) == 1


async def test_two_samples_never_come_together_in_one_response(
    world: ModelWorld, server: ScriptedServer
) -> None:
    """The engine fails in the middle: its harness sees that, and is told the next sample whole."""
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        async with _Harness(world) as harness:
            server.let_through(2)
            await harness.read_until("fi")
            server.breaks = True
            server.let_through(1)
            await server.until_asked(2)
            server.breaks = False
            server.let_through(3)
            with pytest.raises(httpx.RemoteProtocolError):
                await harness.read_all()
            assert harness.text == "fi"
        async with _Harness(world) as again:
            server.let_through(100)
            await again.read_until("second")
            await again.read_all()
        (sequence,) = relay.trace().sequences
        assert sequence.sampled_tokens == len("second") + 1
    assert len(server.asked) == 2


async def test_a_relay_that_is_started_again_breaks_off_what_its_predecessor_began(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, _Harness(world) as harness:
        async with world.relay(engine):
            server.let_through(2)
            await harness.read_until("fi")
        async with world.relay(engine) as relay:
            server.let_through(100)
            with pytest.raises(httpx.RemoteProtocolError):
                await harness.read_all()
            assert harness.text == "fi"
            async with _Harness(world) as again:
                await again.read_until("second")
                await again.read_all()
            (sequence,) = relay.trace().sequences
            assert sequence.sampled_tokens == len("second") + 1


async def test_a_stream_goes_on_for_who_calls_again_after_the_daemon_was_started_again(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        async with _Harness(world) as lost:
            server.let_through(2)
            await lost.read_until("fi")
            await world.restart_node()
            with pytest.raises(httpx.RemoteProtocolError):
                await lost.read_all()
        async with _Harness(world) as harness:
            await harness.read_until("fi")
            server.let_through(4)
            await harness.read_all()
            assert harness.text == "first"
        assert len(relay.trace().sequences) == 1
    assert len(server.asked) == 1


async def test_a_budget_cuts_a_stream_as_it_cuts_any_answer(
    world: ModelWorld, server: ScriptedServer
) -> None:
    server.let_through(100)
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine, budget=Budget(tokens=3)),
        _Harness(world) as harness,
    ):
        await harness.read_until("fir")
        await harness.read_all()
        assert b'"finish_reason":"length"' in harness.told
        assert harness.text == "fir"


class _ByHand:
    """An engine of a training loop that tells what a test wants told."""

    def __init__(self, told: Callable[[Tell], None], content: str) -> None:
        self._told = told
        self._content = content

    async def __call__(self, request: ModelRequest) -> Sampled:
        answer = ModelAnswer(id="1", created=1, content=self._content)
        return Sampled(answer=answer, prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,))

    async def stream(self, request: ModelRequest, tell: Tell) -> Sampled:
        self._told(tell)
        return await self(request)


async def test_an_engine_of_ones_own_may_stream_or_not(world: ModelWorld) -> None:
    def told(tell: Tell) -> None:
        tell(ModelBegun(id="1", created=1))
        tell(ModelDelta(content="by "))
        tell(ModelDelta(content="hand"))

    async with world.relay(_ByHand(told, "by hand")), _Harness(world) as harness:
        await harness.read_until("by hand")
        await harness.read_all()
    async with (
        world.relay(_ByHand(told, "at once").__call__),
        _Harness(world, temperature=0.5) as harness,
    ):
        await harness.read_until("at once")


async def test_an_engine_that_tells_another_answer_than_it_returns_ends_the_relay(
    world: ModelWorld,
) -> None:
    def told(tell: Tell) -> None:
        tell(ModelBegun(id="1", created=1))
        tell(ModelDelta(content="one"))

    async with ModelRelay(world.rollout, _ByHand(told, "another"), journal=world.journal) as relay:
        running = asyncio.create_task(relay.run())
        async with _Harness(world) as harness:
            calling = asyncio.create_task(harness.read_until("never"))
            with pytest.raises(DsecError, match="told another answer than it returned"):
                await running
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        assert not relay.trace().sequences


async def test_a_piece_reaches_only_a_call_that_waits_in_its_own_project(
    world: ModelWorld, server: ScriptedServer, nats: NatsForTests
) -> None:
    async def piece(rollout: Any, seq: int, offset: int = 0) -> int:
        sent = rollout.stream_feedback(seq, "s", b"forged", offset=offset, headers={})
        return int(await sent)

    with pytest.raises(DsecError, match="nobody waits"):
        await piece(world.rollout, 1)
    async with HttpEngine(server.url) as engine, world.relay(engine), _Harness(world) as harness:
        server.let_through(2)
        await harness.read_until("fi")
        async with nats.project("other") as other_bus:
            foreign = Rollouts(Channel(other_bus, "other")).get(world.rollout.id)
            with pytest.raises(DsecError, match="no rollout"):
                await piece(foreign, 1)
        # The trainer's own, but not the sample that is being told: the harness calls again.
        assert await piece(world.rollout, 1) == 0
        with pytest.raises(httpx.RemoteProtocolError):
            await harness.read_all()
        assert b"forged" not in harness.told
        server.let_through(100)
        async with _Harness(world) as again:
            await again.read_until("first")
            await again.read_all()
        with pytest.raises(DsecError, match="nobody waits"):
            await piece(world.rollout, 1)


async def test_a_harness_that_does_not_read_has_the_rest_kept_by_the_trainer(
    world: ModelWorld,
) -> None:
    text = "x" * (16 << 20)

    def told(tell: Tell) -> None:
        tell(ModelBegun(id="1", created=1))
        for at in range(0, len(text), 4096):
            tell(ModelDelta(content=text[at : at + 4096]))

    whole = asyncio.Event()

    class Engine(_ByHand):
        async def stream(self, request: ModelRequest, tell: Tell) -> Sampled:
            self._told(tell)
            await whole.wait()
            return await self(request)

    async with world.relay(Engine(told, text)):
        body = msgspec.json.encode({"model": "m", "messages": HI, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(20):
            while _pending_bytes(world) <= 32 * 1024:
                await asyncio.sleep(0.01)
        assert _pending_bytes(world) <= 64 * 1024
        whole.set()
        received = b""
        async with asyncio.timeout(20):
            while b"[DONE]" not in received[-100:]:
                received += await reader.read(1 << 20)
        writer.close()
        await writer.wait_closed()
    assert received.count(b"x") >= len(text)
