"""What is told of a sandbox elsewhere: events, the behaviour log, traces, rollouts."""

from __future__ import annotations

import asyncio
import json

import aiokafka
import pytest

from dsec import BehaviorLog, DsecError, ErrorCode, agent_channel
from dsec_common.topics import behavior_logs
from dsec_common.wire.rollout import RolloutState
from dsec_common.wire.sandbox import SandboxEnded, SandboxRunning
from stack import Stack

WAIT_S = 30.0

AGENT = """
import json
from agent_channel import AgentChannel
with AgentChannel() as channel:
    for number in range(1, 4):
        print(json.dumps(channel.step("try", {"n": number})))
"""


async def test_events_tell_of_a_sandboxs_life(stack: Stack, base: str) -> None:
    async with stack.client() as client, client.events() as events, asyncio.timeout(WAIT_S):
        sandbox = await client.create_sandbox(base)
        await sandbox.delete()
        mine: list[object] = []
        async for event in events:
            if getattr(event, "sandbox_id", "") == sandbox.id:
                mine.append(event)
            if len(mine) == 2:
                break
    assert [type(event) for event in mine] == [SandboxRunning, SandboxEnded]


async def test_the_behaviour_log_is_read_by_a_plain_kafka_consumer(stack: Stack, base: str) -> None:
    consumer = aiokafka.AIOKafkaConsumer(
        behavior_logs("default"),
        bootstrap_servers=stack.context.kafka_bootstrap,
        auto_offset_reset="earliest",
        value_deserializer=BehaviorLog.parse,
    )
    async with stack.client() as client:
        async with await client.create_sandbox(base, agent="tester") as sandbox:
            await sandbox.exec(["echo", "logged"])
        records: list[BehaviorLog] = []
        await consumer.start()
        try:
            async with asyncio.timeout(WAIT_S):
                async for message in consumer:
                    if message.value.sandbox_id == sandbox.id:
                        assert message.key.decode() == sandbox.id
                        records.append(message.value)
                    if records and records[-1].action in {"delete", "end"}:
                        break
        finally:
            await consumer.stop()
    assert [record.action for record in records[:2]] == ["create", "exec"]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert {record.agent for record in records} == {"tester"}
    assert BehaviorLog.from_text(records[1].to_text(full=True)) == records[1]


async def test_a_trace_tells_the_steps_in_order(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        async with await client.create_sandbox(base) as sandbox:
            await sandbox.exec(["echo", "one"])
            await sandbox.exec(["echo", "two"])
        async with asyncio.timeout(WAIT_S):
            steps: list[str] = []
            while len(steps) < 4:
                try:
                    steps = [step.action for step in (await client.trace(sandbox.id)).steps]
                except DsecError as error:
                    if error.code is not ErrorCode.NOT_FOUND:
                        raise
                await asyncio.sleep(0.05)
    assert steps[:3] == ["create", "exec", "exec"]


async def test_a_rollout_carries_stages_to_the_trainer_and_feedback_back(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client:
        rollout = await client.rollouts.open(labels={"task": "count"})
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await sandbox.upload(agent_channel.__file__, "/agent/agent_channel.py")
            await sandbox.write_file("/agent/main.py", AGENT)
            running = asyncio.create_task(sandbox.exec(["python3", "/agent/main.py"], timeout_s=60))
            seen = []
            async with asyncio.timeout(WAIT_S):
                async for stage in rollout.stages():
                    seen.append((stage.seq, stage.name, stage.payload["n"]))
                    assert stage.sandbox_id == sandbox.id
                    last = stage.seq == 3
                    await stage.reply({"double": 2 * stage.payload["n"]}, reward=0.5, done=last)
                    if last:
                        await rollout.close()
            result = (await running).check()
        assert seen == [(1, "try", 1), (2, "try", 2), (3, "try", 3)]
        answers = [json.loads(line) for line in result.stdout_text.splitlines()]
        assert [answer["payload"] for answer in answers] == [{"double": 2 * n} for n in (1, 2, 3)]
        info = await rollout.inspect()
        assert info.state is RolloutState.CLOSED
        assert info.total_reward == pytest.approx(1.5)
