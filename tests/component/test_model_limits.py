"""What a rollout's model calls may use, and what a sandbox may have of its node by them."""

from __future__ import annotations

import asyncio
import contextlib
import os

import openai
import pytest

from agent_world import sandbox_record
from dsec.model_relay import Budget, HttpEngine, ModelRelay
from dsec_common.errors import DsecError
from model_engine import ScriptedServer
from model_world import HI, ModelWorld, chat, raw_call

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")


@pytest.mark.parametrize("budget", [Budget(calls=1), Budget(tokens=3)], ids=["calls", "tokens"])
async def test_a_budget_is_enforced_and_told_as_a_quota(
    world: ModelWorld, server: ScriptedServer, budget: Budget
) -> None:
    async with (
        HttpEngine(server.url) as engine,
        world.relay(engine, budget=budget) as relay,
        world.client() as client,
    ):
        done = await client.chat.completions.create(model="m", messages=HI)
        assert done.choices[0].finish_reason == ("length" if budget.tokens else "stop")
        with pytest.raises(openai.RateLimitError) as refused:
            await chat(client, [*HI, *HI])
        assert refused.value.code == "insufficient_quota"
        assert len(server.asked) == 1
        (sequence,) = relay.trace().sequences
        assert not budget.tokens or sequence.sampled_tokens == budget.tokens


async def test_a_budget_of_time_counts_from_the_first_call_over_restarts(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine, budget=Budget(time_s=3600)):
            assert await chat(client) == "first"
        async with world.relay(engine, budget=Budget(time_s=1e-6)):
            with pytest.raises(openai.RateLimitError, match="used up its budget of 1e-06 s"):
                await chat(client, [*HI, *HI])
    assert len(server.asked) == 1


async def test_what_was_refused_stays_refused_for_a_relay_with_another_budget(
    world: ModelWorld, server: ScriptedServer
) -> None:
    async with HttpEngine(server.url) as engine, world.client() as client:
        async with world.relay(engine, budget=Budget(calls=1)):
            assert await chat(client) == "first"
            with pytest.raises(openai.RateLimitError):
                await chat(client, [*HI, *HI])
        async with world.relay(engine, budget=Budget(calls=2)) as relay:
            assert await chat(client, [*HI, *HI]) == "second"
            assert len(relay.trace().sequences) == 2
    assert len(server.asked) == 2


async def test_a_closed_rollout_takes_no_calls(world: ModelWorld, server: ScriptedServer) -> None:
    async with (
        HttpEngine(server.url) as engine,
        ModelRelay(world.rollout, engine, journal=world.journal) as relay,
    ):
        running = asyncio.create_task(relay.run())
        await world.rollout.close()
        await asyncio.wait_for(running, 20)
    async with world.client() as client:
        with pytest.raises(openai.PermissionDeniedError, match="rollout is over"):
            await chat(client)


async def test_a_rollout_has_one_relay_at_a_time(world: ModelWorld, server: ScriptedServer) -> None:
    async with HttpEngine(server.url) as engine, world.relay(engine):
        with pytest.raises(DsecError, match="another relay"):
            await ModelRelay(world.rollout, engine, journal=world.journal).__aenter__()


async def test_a_harness_that_hangs_on_costs_only_its_own_sandbox_connections(
    world: ModelWorld, server: ScriptedServer
) -> None:
    hanging = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(40)]
    async with HttpEngine(server.url) as engine, world.relay(engine):
        calling = asyncio.create_task(raw_call(world, read=True))
        await asyncio.sleep(0.1)
        assert world.doors.connections == 32
        for _, writer in hanging:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert b"first" in await calling


async def test_a_request_that_is_too_large_is_refused_unread(world: ModelWorld) -> None:
    async with world.client(max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await chat(client, [{"role": "user", "content": "x" * (9 << 20)}])
    assert refused.value.status_code == 413


async def test_a_harness_that_hangs_up_on_everything_holds_a_bounded_amount(
    world: ModelWorld, server: ScriptedServer
) -> None:
    door = world.doors._doors[sandbox_record().local]
    left = door._budget._left
    async with HttpEngine(server.url) as engine, world.relay(engine):
        server.open.clear()
        for number in range(50):
            await raw_call(world, read=False, text=f"call {number} " + "x" * 100_000)
        await server.until_asked(32)
        await server.until_abandoned(10)  # what was given up for later ones
        assert sum(map(len, door.session._calls.values())) <= 32
        await server.until_abandoned(len(server.asked))
        server.open.set()
        assert b"answer" in await raw_call(world, read=True, text="one that waits")
    assert not door.session._calls
    assert door._budget._left == left


async def test_calls_that_are_too_many_or_too_large_in_a_second_are_told_to_wait(
    world: ModelWorld, server: ScriptedServer
) -> None:
    rate = world.doors._doors[sandbox_record().local]._rate
    rate.change(1e-3, 200, asyncio.get_running_loop().time())
    async with HttpEngine(server.url) as engine, world.relay(engine):
        for number in range(2):
            filler = f"{number}" + "x" * (7 << 20)
            assert b" 400 " in await raw_call(world, read=True, junk=filler)
        told = await raw_call(world, read=True, text="and one more")
    assert b" 429 " in told
    assert b"calls a second" in told
    assert b"x-should-retry: true" in told.lower()
    assert b"retry-after:" in told.lower()
