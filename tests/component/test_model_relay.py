"""From a harness's client over the node and Chronus to the trainer's engine and back."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from agent_world import sandbox_record
from dsec.model_relay import HttpEngine, ModelAnswer, ModelRelay, ModelRequest, Sampled
from dsec.rollouts import Rollout
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.model_calls import STAGE_CANCELLED, CallCancelled
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.records import SandboxRecord
from model_engine import END, ScriptedServer, prompt_ids, tokens_of
from model_world import HI, ModelWorld, chat, raw_call

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")


async def test_turns_become_one_sequence_of_the_engines_own_tokens(
    world: ModelWorld, server: ScriptedServer
) -> None:
    engine = HttpEngine(server.url, api_key="secret", model="policy", sampling={"temperature": 1.0})
    engine.model_version = "step-1"
    async with engine, world.relay(engine) as relay, world.client() as client:
        said = [*HI]
        assert await chat(client, said, temperature=0.0) == "first"
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


async def test_other_interfaces_reach_the_same_engine(
    world: ModelWorld, server: ScriptedServer
) -> None:
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


async def test_a_callback_of_the_training_loop_is_waited_for(world: ModelWorld) -> None:
    asked: asyncio.Queue[tuple[ModelRequest, asyncio.Future[Sampled]]] = asyncio.Queue()

    async def callback(request: ModelRequest) -> Sampled:
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        await asked.put((request, answer))
        return await answer

    async with world.relay(callback), world.client() as client:
        calling = asyncio.create_task(chat(client))
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


async def test_a_request_repeated_after_a_lost_connection_is_not_sampled_again(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        lost = asyncio.create_task(raw_call(world, read=False))
        await server.until_asked(1)
        await lost
        again = asyncio.create_task(raw_call(world, read=True))
        server.open.set()
        assert b"first" in await again
        assert len(server.asked) == 1
        # The harness has it now: the same request is a wish for another sample, unless its client
        # says that it is not.
        assert b"second" in await raw_call(world, read=True)
        assert b"second" in await raw_call(world, read=True, retry=1)
        assert len(server.asked) == 2
        assert len(relay.trace().sequences) == 2


async def test_the_same_request_twice_at_once_is_two_calls(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        one = asyncio.create_task(raw_call(world, read=True))
        await server.until_asked(1)
        other = asyncio.create_task(raw_call(world, read=True))
        await server.until_asked(2)
        server.open.set()
        assert b"first" in await one
        assert b"second" in await other
        assert len(relay.trace().sequences) == 2


async def test_an_idempotency_key_is_one_call_however_often_it_is_sent(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine), world.client() as client:
        key = {"idempotency-key": "k1"}
        assert await chat(client, extra_headers=key) == "first"
        assert await chat(client, extra_headers=key) == "first"
        assert await chat(client, extra_headers={"idempotency-key": "k2"}) == "second"


async def test_what_a_node_that_was_started_again_is_asked_again_is_answered_from_the_record(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        lost = asyncio.create_task(raw_call(world, read=True))
        await server.until_asked(1)
        await world.restart_node()
        assert await lost == b""
        again = asyncio.create_task(raw_call(world, read=True))
        server.open.set()
        assert b"first" in await again
        assert len(server.asked) == 1
        async with world.client() as client:
            assert await chat(client, [*HI, *HI]) == "second"


async def test_a_relay_that_is_started_again_answers_what_was_not_answered(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine):
            assert await chat(client) == "first"
            server.open.clear()
            calling = asyncio.create_task(chat(client, [*HI, *HI]))
            await server.until_asked(2)
        await server.until_abandoned(1)
        server.open.set()
        async with world.relay(engine) as relay:
            assert await calling == "third"  # begun anew: of "second" nobody was told
            calls = [turn.number for it in relay.trace().sequences for turn in it.turns]
            assert calls == [1, 2]
    assert len(server.asked) == 3


async def test_a_record_that_was_not_told_is_told_by_the_next_relay(
    world: ModelWorld, server: ScriptedServer
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
                calling = asyncio.create_task(chat(client))
                with pytest.raises(DsecError, match="killed here"):
                    await running
        assert Rollout.feedback is told
        async with world.relay(engine):
            assert await calling == "first"
    assert len(server.asked) == 1


async def test_a_call_that_is_given_up_ends_at_the_engine(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine) as relay:
        server.open.clear()
        await raw_call(world, read=False)
        await server.until_asked(1)
        await server.until_abandoned(1)
        server.open.set()
        assert b"second" in await raw_call(world, read=True)
        (sequence,) = relay.trace().sequences
        assert sequence.turns[0].end - sequence.turns[0].start == len("second") + 1


async def test_the_end_of_a_sandbox_ends_its_calls_at_the_engine(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        calling = asyncio.create_task(raw_call(world, read=True))
        await server.until_asked(1)
        await world.doors.sandbox_ending(sandbox_record().local)
        assert b"first" not in await calling
        await server.until_abandoned(1)
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", world.port)


async def test_calls_wait_while_the_trainer_is_busy_and_say_for_how_long(
    world: ModelWorld, server: ScriptedServer
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
    world: ModelWorld, server: ScriptedServer
) -> None:
    await world.restart_node(wait_max_s=0.5)
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        async with world.client(max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as stalled:
                await chat(client)
        assert stalled.value.status_code == 503
        assert stalled.value.response.headers["x-should-retry"] == "true"
        assert float(stalled.value.response.headers["x-dsec-stalled-s"]) == 0.5
        again = asyncio.create_task(raw_call(world, read=True, retry=1))
        server.open.set()
        assert b"first" in await again
    assert len(server.asked) == 1


class _Interrupted(ChronusGateway):
    """Finds the number of a call's second part taken by another report, once."""

    _is_over = False

    async def report(
        self, record: SandboxRecord, seq: int, stage: str, payload: bytes, deadline: float
    ) -> bool:
        if seq == 2 and not self._is_over:
            self._is_over = True
            other = msgspec.msgpack.encode(CallCancelled(seq=7))
            await super().report(record, seq, STAGE_CANCELLED, other, deadline)
        return await super().report(record, seq, stage, payload, deadline)


async def test_a_call_whose_parts_were_begun_again_is_one_call(
    world: ModelWorld, server: ScriptedServer
) -> None:
    await world.restart_node(kind=_Interrupted)
    large = [{"role": "user", "content": os.urandom(150_000).hex()}]
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine) as relay,
        world.client() as client,
    ):
        assert [await chat(client, large), await chat(client)] == ["first", "second"]
        assert len(server.asked) == 2
        assert len([turn for it in relay.trace().sequences for turn in it.turns]) == 2
    parts: list[int | None] = []
    while len(parts) < 5:  # as much of them comes at once as fits a message
        batch = await world.rollout.next(len(parts))
        parts += [it.payload.get("part") for it in batch.reports]
    assert parts == [0, None, 0, 1, 0]
    assert len([step for step in world.steps if step.action == "model_call"]) == 2
