"""Calls of the trainer's model count as those of the contract's tool, at the node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import openai
import pytest

from agent_world import LOCAL, sandbox_record
from dsec.model_relay import HttpEngine
from dsec_common.clock import SystemClock
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.tools import NodeTools, Rate, ToolTerms
from dsec_sandboxd.state_database import StateDatabase
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.rates import CallRates
from model_engine import scripted_server
from model_world import HI, chat, model_world
from tool_names import Names

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering namespaces needs root")

TWICE = NodeTools(terms={"llm": ToolTerms(rate_limit=Rate(count=2, window_s=3600))})


async def test_a_harness_calls_its_model_no_more_often_than_its_contract_says(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        database = stack.enter_context(contextlib.closing(StateDatabase(tmp_path / "rates")))
        server = await stack.enter_async_context(scripted_server("first", "second", "third"))
        nats = await stack.enter_async_context(nats_for_tests())
        world = await stack.enter_async_context(model_world(nats, tmp_path))
        desk = ToolDesk(
            Names(),
            None,
            CallRates(database, SystemClock().monotonic),
            SystemClock(),
            network_of=lambda _record: None,
            log=lambda *_, **__: None,
        )
        await world.doors.sandbox_ending(LOCAL)
        world.doors.admit = desk.count_model_call
        record = msgspec.structs.replace(sandbox_record(), model_rollout_id=world.rollout.id)
        await world.doors.attach(msgspec.structs.replace(record, tools=TWICE))
        engine = await stack.enter_async_context(HttpEngine(server.url))
        await stack.enter_async_context(world.relay(engine))
        client = await stack.enter_async_context(world.client(max_retries=0))
        assert [await chat(client), await chat(client, [*HI, *HI])] == ["first", "second"]
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as refused:
                await chat(client, [*HI, *HI, *HI])
            assert refused.value.code == "rate_limited"
            assert int(float(refused.value.response.headers["retry-after"])) > 3000
        assert len(server.asked) == 2
        assert world.doors.budget.take(64 * 8 * 1024 * 1024)  # refused requests are let go of
