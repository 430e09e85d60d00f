"""From a harness's client over the node and Chronus to the trainer's engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from agent_world import NODE, sandbox_record
from chronus_parties import chronus_service
from dsec.channel import Channel
from dsec.model_relay import Budget, HttpEngine, ModelRelay, ModelRequest, Sampled
from dsec.model_relay.calls import ModelAnswer
from dsec.rollouts import Rollout, Rollouts
from dsec_common.behavior import BehaviorLog
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.model_doors import ModelDoors
from dsec_sandboxd.step_log import StepLog
from model_engine import END, ScriptedServer, prompt_ids, scripted_server, tokens_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")

HI: Any = [{"role": "user", "content": "hi"}]


def _own_namespace(local: str) -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Steps:
    """Takes what the node logs."""

    def __init__(self, taken: list[BehaviorLog]) -> None:
        self._taken = taken

    def append(self, record: BehaviorLog) -> None:
        self._taken.append(record)


class World:
    """One sandbox's endpoint, its rollout, and a way to train it."""

    def __init__(self, node_bus: Bus, rollout: Rollout, directory: Path) -> None:
        self.rollout = rollout
        self.journal = directory / "calls.jsonl"
        self.port = _free_port()
        self._bus = node_bus
        self.steps: list[BehaviorLog] = []
        self.doors = self._new_doors()

    def _new_doors(self, wait_max_s: float = 60.0) -> ModelDoors:
        gateway = ChronusGateway(self._bus, StepLog(NODE, Steps(self.steps)), NODE, SystemClock())
        return ModelDoors(
            _own_namespace, gateway, port=self.port, wait_max_s=wait_max_s, grace_s=0.3
        )

    async def open(self) -> None:
        record = msgspec.structs.replace(sandbox_record(), model_rollout_id=self.rollout.id)
        await self.doors.attach(record)

    async def restart_node(self, wait_max_s: float = 60.0) -> None:
        """Do what a new daemon does: nothing is known but the record."""
        await self.doors.aclose()
        self.doors = self._new_doors(wait_max_s)
        await self.open()

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options
        )

    @contextlib.asynccontextmanager
    async def relay(self, engine: Any, **options: Any) -> AsyncIterator[ModelRelay]:
        """Have a relay at work; its failure fails the test."""
        async with ModelRelay(self.rollout, engine, journal=self.journal, **options) as relay:
            running = asyncio.create_task(relay.run())
            try:
                yield relay
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


@pytest.fixture
async def world(nats: NatsForTests, tmp_path: Path) -> AsyncIterator[World]:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        world = World(node_bus, rollout, tmp_path)
        await world.open()
        try:
            yield world
        finally:
            await world.doors.aclose()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server("first", "second", "third") as running:
        yield running


async def _chat(client: openai.AsyncOpenAI, messages: Any = HI, **options: Any) -> str:
    done = await client.chat.completions.create(model="m", messages=messages, **options)
    return str(done.choices[0].message.content)


async def test_turns_become_one_sequence_of_the_engines_own_tokens(
    world: World, server: ScriptedServer
) -> None:
    engine = HttpEngine(server.url, api_key="secret", model="policy", sampling={"temperature": 1.0})
    engine.model_version = "step-1"
    async with engine, world.relay(engine) as relay, world.client() as client:
        said = [*HI]
        assert await _chat(client, said, temperature=0.0) == "first"
        said += [{"role": "assistant", "content": "first"}, {"role": "user", "content": "more"}]
        engine.model_version = "step-2"
        stream = await client.chat.completions.create(model="m", messages=said, stream=True)
        told = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(told) == "second"
        (sequence,) = relay.trace().rewarded(1.0).sequences
    first, second = sequence.turns
    assert sequence.token_ids[: first.start] == tuple(prompt_ids(HI))
    assert sequence.token_ids[first.start : first.end] == (*tokens_of("first"), END)
    assert sequence.token_ids[second.start :] == (*tokens_of("second"), END)
    assert [turn.model_version for turn in sequence.turns] == ["step-1", "step-2"]
    for mask, token, logprob in zip(
        sequence.loss_mask, sequence.token_ids, sequence.logprobs, strict=True
    ):
        assert logprob == (-token / 1000 if mask else 0.0)
    assert sequence.sampled_tokens == len("first") + len("second") + 2
    assert [body["model"] for body in server.asked] == ["policy"] * 2
    assert [body["temperature"] for body in server.asked] == [1.0] * 2
    assert set(server.authorizations) == {"Bearer secret"}
    assert [(step.action, step.status) for step in world.steps] == [("model_call", "200")] * 2
    assert [(step.tokens_in, step.tokens_out) for step in world.steps] == [
        (first.start, first.end - first.start),
        (second.start, second.end - second.start),
    ]


async def test_other_interfaces_reach_the_same_engine(world: World, server: ScriptedServer) -> None:
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine) as relay,
        world.client() as client,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{world.port}", api_key="none"
        ) as other,
    ):
        assert (await client.responses.create(model="m", input="hi")).output_text == "first"
        message = await other.messages.create(model="m", max_tokens=99, messages=HI)
        assert message.content[0].to_dict()["text"] == "second"
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert len(relay.trace().sequences) == 2
        with pytest.raises(anthropic.BadRequestError, match="top_p"):
            await other.messages.create(
                model="m", max_tokens=9, messages=HI, extra_body={"top_p": "much"}
            )
        with pytest.raises(openai.NotFoundError, match="there is no POST"):
            await client.embeddings.create(model="m", input="x")


async def test_a_callback_of_the_training_loop_is_waited_for(world: World) -> None:
    asked: asyncio.Queue[tuple[ModelRequest, asyncio.Future[Sampled]]] = asyncio.Queue()

    async def callback(request: ModelRequest) -> Sampled:
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        await asked.put((request, answer))
        return await answer

    async with world.relay(callback), world.client() as client:
        calling = asyncio.create_task(_chat(client))
        request, answer = await asyncio.wait_for(asked.get(), 20)
        assert request.messages == ({"role": "user", "content": "hi"},)
        assert not calling.done()
        answer.set_result(
            Sampled(
                answer=ModelAnswer(id="x", created=1, content="by hand"),
                prompt_ids=(1,),
                completion_ids=(2,),
                logprobs=(-0.5,),
            )
        )
        assert await calling == "by hand"


async def _raw_call(
    world: World, *, read: bool, retry: int = 0, text: str = "hi", **more: str
) -> bytes:
    """Call with bytes of our own; hang up at once, or read the answer."""
    messages = [{"role": "user", "content": text}]
    body = msgspec.json.encode({"model": "m", "messages": messages, **more})
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"x-stainless-retry-count: {retry}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    told = await reader.read() if read else b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return told


async def test_a_request_repeated_after_a_lost_connection_is_not_sampled_again(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        lost = asyncio.create_task(_raw_call(world, read=False))
        await server.until_asked(1)
        await lost
        again = asyncio.create_task(_raw_call(world, read=True))
        server.open.set()
        assert b"first" in await again
        assert len(server.asked) == 1
        # The harness has it now: the same request is a wish for another sample, unless its client
        # says that it is not.
        assert b"second" in await _raw_call(world, read=True)
        assert b"second" in await _raw_call(world, read=True, retry=1)
        assert len(server.asked) == 2
        assert len(relay.trace().sequences) == 2


async def test_the_same_request_twice_at_once_is_two_calls(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        one = asyncio.create_task(_raw_call(world, read=True))
        await server.until_asked(1)
        other = asyncio.create_task(_raw_call(world, read=True))
        await server.until_asked(2)
        server.open.set()
        assert b"first" in await one
        assert b"second" in await other
        assert len(relay.trace().sequences) == 2


async def test_an_idempotency_key_is_one_call_however_often_it_is_sent(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine), world.client() as client:
        key = {"idempotency-key": "k1"}
        assert await _chat(client, extra_headers=key) == "first"
        assert await _chat(client, extra_headers=key) == "first"
        assert await _chat(client, extra_headers={"idempotency-key": "k2"}) == "second"


async def test_what_a_node_that_was_started_again_is_asked_again_is_answered_from_the_record(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        lost = asyncio.create_task(_raw_call(world, read=True))
        await server.until_asked(1)
        await world.restart_node()
        assert await lost == b""
        again = asyncio.create_task(_raw_call(world, read=True))
        server.open.set()
        assert b"first" in await again
        assert len(server.asked) == 1
        async with world.client() as client:
            assert await _chat(client, [*HI, *HI]) == "second"


async def test_a_relay_that_is_started_again_answers_what_was_not_answered(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine):
            assert await _chat(client) == "first"
            server.open.clear()
            calling = asyncio.create_task(_chat(client, [*HI, *HI]))
            await server.until_asked(2)
        await server.until_abandoned(1)
        server.open.set()
        async with world.relay(engine) as relay:
            assert await calling == "third"  # begun anew: of "second" nobody was told
            calls = [turn.number for it in relay.trace().sequences for turn in it.turns]
            assert calls == [1, 2]
    assert len(server.asked) == 3


async def test_a_record_that_was_not_told_is_told_by_the_next_relay(
    world: World, server: ScriptedServer
) -> None:
    """The relay died between its record and the answer: the sample counts, once."""
    async with HttpEngine(server.url) as engine, world.client() as client:
        told = Rollout.feedback

        async def dies(self: Rollout, *arguments: Any, **options: Any) -> bool:
            raise DsecError(ErrorCode.INTERNAL, "killed here")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Rollout, "feedback", dies)
            async with ModelRelay(world.rollout, engine, journal=world.journal) as relay:
                running = asyncio.create_task(relay.run())
                calling = asyncio.create_task(_chat(client))
                with pytest.raises(DsecError, match="killed here"):
                    await running
        assert Rollout.feedback is told
        async with world.relay(engine):
            assert await calling == "first"
    assert len(server.asked) == 1


async def test_a_call_that_is_given_up_ends_at_the_engine(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        await _raw_call(world, read=False)
        await server.until_asked(1)
        await server.until_abandoned(1)
        server.open.set()
        assert b"second" in await _raw_call(world, read=True)
        (sequence,) = relay.trace().sequences
        assert sequence.turns[0].end - sequence.turns[0].start == len("second") + 1


async def test_the_end_of_a_sandbox_ends_its_calls_at_the_engine(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        calling = asyncio.create_task(_raw_call(world, read=True))
        await server.until_asked(1)
        await world.doors.sandbox_ending(sandbox_record().local)
        assert b"first" not in await calling
        await server.until_abandoned(1)
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", world.port)


async def test_calls_wait_while_the_trainer_is_busy_and_say_for_how_long(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        relay.pause()
        server.away = True
        async with world.client() as client:

            async def call() -> Any:
                return await client.chat.completions.with_raw_response.create(
                    model="m", messages=HI
                )

            calling = asyncio.create_task(call())
            await asyncio.sleep(0.2)
            relay.resume()
            await asyncio.sleep(0.2)
            assert not calling.done()
            server.away = False
            answer = await calling
            assert float(answer.headers["x-dsec-stalled-s"]) > 0
            at_once = await client.chat.completions.with_raw_response.create(
                model="m", messages=[*HI, *HI]
            )
            assert "x-dsec-stalled-s" not in at_once.headers


async def test_a_wait_is_bounded_and_a_client_that_calls_again_finds_its_call(
    world: World, server: ScriptedServer
) -> None:
    await world.restart_node(wait_max_s=0.5)
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        async with world.client(max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as stalled:
                await _chat(client)
        assert stalled.value.status_code == 503
        assert stalled.value.response.headers["x-should-retry"] == "true"
        assert float(stalled.value.response.headers["x-dsec-stalled-s"]) == 0.5
        again = asyncio.create_task(_raw_call(world, read=True, retry=1))
        server.open.set()
        assert b"first" in await again
    assert len(server.asked) == 1


@pytest.mark.parametrize("budget", [Budget(calls=1), Budget(tokens=3)], ids=["calls", "tokens"])
async def test_a_budget_is_enforced_and_told_as_a_quota(
    world: World, server: ScriptedServer, budget: Budget
) -> None:
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine, budget=budget) as relay,
        world.client() as client,
    ):
        done = await client.chat.completions.create(model="m", messages=HI)
        assert done.choices[0].finish_reason == ("length" if budget.tokens else "stop")
        with pytest.raises(openai.RateLimitError) as refused:
            await _chat(client, [*HI, *HI])
        assert refused.value.code == "insufficient_quota"
        assert len(server.asked) == 1
        (sequence,) = relay.trace().sequences
        assert not budget.tokens or sequence.sampled_tokens == budget.tokens


async def test_a_budget_of_time_counts_from_the_first_call_over_restarts(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine, budget=Budget(time_s=3600)):
            assert await _chat(client) == "first"
        async with world.relay(engine, budget=Budget(time_s=1e-6)):
            with pytest.raises(openai.RateLimitError, match="used up its budget of 1e-06 s"):
                await _chat(client, [*HI, *HI])
    assert len(server.asked) == 1


async def test_what_was_refused_stays_refused_for_a_relay_with_another_budget(
    world: World, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine, budget=Budget(calls=1)):
            assert await _chat(client) == "first"
            with pytest.raises(openai.RateLimitError):
                await _chat(client, [*HI, *HI])
        async with world.relay(engine, budget=Budget(calls=2)) as relay:
            assert await _chat(client, [*HI, *HI]) == "second"
            assert len(relay.trace().sequences) == 2
    assert len(server.asked) == 2


async def test_a_closed_rollout_takes_no_calls(world: World, server: ScriptedServer) -> None:
    async with (
        HttpEngine(server.url) as engine,
        ModelRelay(world.rollout, engine, journal=world.journal) as relay,
    ):
        running = asyncio.create_task(relay.run())
        await world.rollout.close()
        await asyncio.wait_for(running, 20)
    async with world.client() as client:
        with pytest.raises(openai.PermissionDeniedError, match="rollout is over"):
            await _chat(client)


async def test_a_rollout_has_one_relay_at_a_time(world: World, server: ScriptedServer) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        with pytest.raises(DsecError, match="another relay"):
            await ModelRelay(world.rollout, engine, journal=world.journal).__aenter__()


async def test_a_harness_that_hangs_on_costs_only_its_own_sandbox_connections(
    world: World, server: ScriptedServer
) -> None:
    hanging = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(40)]
    async with HttpEngine(server.url) as engine, world.relay(engine):
        calling = asyncio.create_task(_raw_call(world, read=True))
        await asyncio.sleep(0.1)
        assert world.doors.connections == 32
        for _, writer in hanging:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert b"first" in await calling


async def test_a_request_that_is_too_large_is_refused_unread(world: World) -> None:
    async with world.client(max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await _chat(client, [{"role": "user", "content": "x" * (9 << 20)}])
    assert refused.value.status_code == 413


async def test_a_harness_that_hangs_up_on_everything_holds_a_bounded_amount(
    world: World, server: ScriptedServer
) -> None:
    door = world.doors._doors[sandbox_record().local]
    left = door._budget._left
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        for number in range(50):
            await _raw_call(world, read=False, text=f"call {number} " + "x" * 100_000)
        await server.until_asked(32)
        await server.until_abandoned(10)  # what was given up for later ones
        assert sum(map(len, door.session._calls.values())) <= 32
        await server.until_abandoned(len(server.asked))
        server.open.set()
        assert b"answer" in await _raw_call(world, read=True, text="one that waits")
    assert not door.session._calls
    assert door._budget._left == left


async def test_calls_that_are_too_many_or_too_large_in_a_second_are_told_to_wait(
    world: World, server: ScriptedServer
) -> None:
    rate = world.doors._doors[sandbox_record().local]._rate
    rate.change(1e-3, 200, asyncio.get_running_loop().time())
    async with HttpEngine(server.url) as engine, world.relay(engine):
        for number in range(2):
            filler = f"{number}" + "x" * (7 << 20)
            assert b" 400 " in await _raw_call(world, read=True, junk=filler)
        told = await _raw_call(world, read=True, text="and one more")
    assert b" 429 " in told
    assert b"calls a second" in told
    assert b"x-should-retry: true" in told.lower()
    assert b"retry-after:" in told.lower()
