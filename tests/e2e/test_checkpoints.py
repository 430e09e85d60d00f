"""Rollouts kept, put back and branched through the whole platform, with real sandboxes."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from dsec import DsecError, ErrorCode, Sandbox, agent_channel, sync
from dsec.rollouts import Rollout
from dsec_chronus.acting import FENCED_NUMBERS
from dsec_common.model_calls import CallReader, answer_of
from dsec_common.wire.checkpoint import RolloutPutBack
from dsec_common.wire.sandbox import IdleAction
from stack import Stack

AGENT = """
import json, pathlib
from agent_channel import AgentChannel

work = pathlib.Path("/work/count")
with AgentChannel() as channel:
    done = False
    while not done:
        count = int(work.read_text()) + 1 if work.exists() else 1
        work.parent.mkdir(exist_ok=True)
        work.write_text(str(count))
        done = channel.step("counted", {"count": count})["done"]
"""


async def run_agent(sandbox: Sandbox) -> None:
    """Run the agent until it is told to stop or what it runs in is put back."""
    await sandbox.exec(["python3", "/agent/main.py"], timeout_s=60)


async def prepared(sandbox: Sandbox) -> Sandbox:
    await sandbox.upload(agent_channel.__file__, "/agent/agent_channel.py")
    await sandbox.write_file("/agent/main.py", AGENT)
    return sandbox


async def counted(rollout: Rollout, after_seq: int, count: int, *, done: bool) -> list[int]:
    """Answer so many steps; return what the agent had counted to at each."""
    seen: list[int] = []
    async for stage in rollout.stages(after_seq=after_seq):
        seen.append(stage.payload["count"])
        last = len(seen) == count
        await rollout.put_state({"seen": seen})
        await stage.reply(reward=1.0, done=done and last)
        if last:
            break
    return seen


async def test_a_rollout_is_put_back_with_its_sandbox_and_goes_on(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        rollout = await client.rollouts.open(checkpoint_every=2)
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await prepared(sandbox)
            running = asyncio.ensure_future(run_agent(sandbox))
            assert await counted(rollout, 0, 5, done=False) == [1, 2, 3, 4, 5]
            # Made before the feedback to their steps went out.
            assert [it.step for it in await rollout.checkpoints()] == [2, 4]
            back = await rollout.roll_back(3, key="again")
            assert (back.step, back.sandbox_id, back.recreated) == (2, sandbox.id, False)
            with pytest.raises(DsecError) as refusal:
                await running
            assert refusal.value.details["reason"] == "rolled_back"
            assert await sandbox.read_text("/work/count") == "2"
            assert await rollout.get_state() == {"seen": [1]}
            with pytest.raises(DsecError) as refusal:
                await rollout.feedback(5, "too late")
            assert refusal.value.code is ErrorCode.CONFLICT
            told = await rollout.roll_back(3, key="again")
            assert (told.checkpoint, told.last_seq) == (back.checkpoint, back.last_seq)
            running = asyncio.ensure_future(run_agent(sandbox))
            assert await counted(rollout, 5, 2, done=True) == [3, 4]
            await running
            info = await rollout.inspect()
            assert info.total_reward == 4.0
            assert info.last_seq == back.last_seq + 2
            assert back.last_seq >= 5 + FENCED_NUMBERS
            await rollout.close()


async def test_branches_go_on_each_by_itself(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        rollout = await client.rollouts.open(labels={"task": "tree"})
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await sandbox.write_file("/work/count", "7")
            await rollout.put_state({"plan": ["a"]})
            kept = await rollout.checkpoint(sandbox=sandbox)
            await sandbox.write_file("/work/count", "8")
        made = await rollout.branch(3, key="tree")
        same = await rollout.branch(3, key="tree")
        branches = [one for one in made if not isinstance(one, DsecError)]
        assert len(branches) == 3
        assert [repr(one) for one in same] == [repr(one) for one in made]
        for number, branch in enumerate(branches):
            assert await branch.sandbox.read_text("/work/count") == "7"
            await branch.sandbox.write_file("/work/count", str(number))
            assert await branch.rollout.get_state() == {"plan": ["a"]}
            info = await branch.rollout.inspect()
            assert (info.parent, info.parent_step) == (rollout.id, kept.step)
            assert info.labels == {"task": "tree"}
            assert (await branch.sandbox.inspect()).rollout_id == branch.rollout.id
        for number, branch in enumerate(branches):
            assert await branch.sandbox.read_text("/work/count") == str(number)
            await branch.sandbox.delete()
            await branch.rollout.close()
        await rollout.close()


async def test_another_sandbox_takes_the_place_of_one_that_is_gone(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        rollout = await client.rollouts.open()
        async with await client.create_sandbox(
            base, rollout_id=rollout.id, labels={"of": "test"}, cpus=0.25
        ) as sandbox:
            await sandbox.write_file("/work/x", "kept")
            await rollout.checkpoint(sandbox=sandbox, durable=True)
        back = await rollout.roll_back()
        assert back.recreated
        async with client.sandbox(back.sandbox_id) as other:
            assert await other.read_text("/work/x") == "kept"
            info = await other.inspect()
            assert (info.rollout_id, info.labels) == (rollout.id, {"of": "test"})
            assert info.limits.cpus == 0.25
        await rollout.close()


ONE_CALL = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "bare"}]}).encode(),
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
AS_IT_WAS = [
    "python3",
    "-c",
    "from os import *; print(getcwd(), getuid(), getenv('TOKEN'), getenv('OPENAI_API_KEY'))",
]


async def calls_of(rollout: Rollout, after_seq: int, sandbox: Sandbox) -> str:
    """Answer the sandbox's model call; return what the call was told."""
    asking = asyncio.ensure_future(sandbox.exec(["python3", "-c", ONE_CALL], timeout_s=30))
    async for stage in rollout.stages(after_seq=after_seq):
        assert stage.sandbox_id == sandbox.id
        said = {"choices": [{"message": {"content": f"answer {stage.seq - after_seq}"}}]}
        answer = answer_of(200, "application/json", {}, json.dumps(said).encode())
        await stage.reply(msgspec.to_builtins(answer))
        break
    return (await asking).stdout_text.strip()


@pytest.mark.parametrize("here", [True, False], ids=["of a snapshot", "of a layer"])
async def test_another_sandbox_is_as_the_first_was_made(
    stack: Stack, base: str, here: bool
) -> None:
    async with stack.client() as client:
        rollout, model = await client.rollouts.open(), await client.rollouts.open()
        sandbox = await client.create_sandbox(
            base,
            rollout_id=rollout.id,
            model_rollout_id=model.id,
            env={"TOKEN": "of its own"},
            user="1000:1000",
            cwd="/tmp",
            ttl_s=600,
            idle_ttl_s=500,
            idle_action=IdleAction.PAUSE,
        )
        first = (await sandbox.exec(AS_IT_WAS, check=True)).stdout_text.split()
        assert await calls_of(model, 0, sandbox) == "answer 1"
        kept = await rollout.checkpoint(sandbox=sandbox, durable=True)
        (branch,) = await rollout.branch(1)
        assert not isinstance(branch, DsecError)
        assert branch.model_rollout is not None
        assert (await branch.sandbox.exec(AS_IT_WAS, check=True)).stdout_text.split() == first
        assert await calls_of(branch.model_rollout, 0, branch.sandbox) == "answer 1"
        await branch.sandbox.delete()
        await sandbox.delete()
        if not here:
            await client.snapshots.get(kept.snapshot_id).delete()
        back = await rollout.roll_back()
        assert back.recreated
        async with client.sandbox(back.sandbox_id) as other:
            told = (await other.exec(AS_IT_WAS, check=True)).stdout_text.split()
            # Variables are on the node where the snapshot is, and nowhere else.
            assert told == first if here else [*first[:2], "None", first[-1]]
            assert await calls_of(model, 1, other) == "answer 1"
            info = await other.inspect()
            assert (info.ttl_s, info.idle_ttl_s, info.idle_action) == (600, 500, IdleAction.PAUSE)
        for one in (rollout, model, branch.rollout, branch.model_rollout):
            await one.close()


async def test_model_calls_after_a_rollback_are_read_without_those_that_are_void(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client:
        model = await client.rollouts.open()
        async with await client.create_sandbox(base, model_rollout_id=model.id) as sandbox:
            assert await calls_of(model, 0, sandbox) == "answer 1"
            await model.checkpoint(sandbox=sandbox)
            assert await calls_of(model, 1, sandbox) == "answer 1"
            back = await model.roll_back()
            assert await calls_of(model, back.last_seq, sandbox) == "answer 1"
        await model.close()
        # As whoever reads them from the beginning, such as a relay that is started again.
        reader = CallReader()
        calls = [reader.take(it.seq, it.payload) async for it in model.stages()]
        bodies = [json.loads(call.body) for call in calls if call is not None]
        assert [one["messages"][0]["content"] for one in bodies] == ["bare", "bare"]


async def test_a_checkpoint_needs_a_sandbox_that_is_there(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        rollout = await client.rollouts.open()
        with pytest.raises(DsecError, match="no sandbox has reported") as refusal:
            await rollout.checkpoint()
        assert refusal.value.code is ErrorCode.INVALID
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            pass
        with pytest.raises(DsecError) as refusal:
            await rollout.checkpoint(sandbox=sandbox)
        assert refusal.value.code is ErrorCode.EXPIRED
        with pytest.raises(DsecError, match="no checkpoint") as refusal:
            await rollout.roll_back()
        assert refusal.value.code is ErrorCode.NOT_FOUND
        assert await rollout.checkpoints() == []


HELLO = """
import json
from agent_channel import AgentChannel
with AgentChannel() as channel:
    print(json.dumps(channel.hello()))
"""


async def test_whoever_listens_and_the_agent_are_told_of_a_rollback(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, client.events() as events, asyncio.timeout(60):
        rollout = await client.rollouts.open()
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await prepared(sandbox)
            await sandbox.write_file("/agent/hello.py", HELLO)
            first = await sandbox.exec(["python3", "/agent/hello.py"], check=True)
            assert "restoration" not in json.loads(first.stdout)
            await rollout.checkpoint(sandbox=sandbox)
            back = await rollout.roll_back()
            again = await sandbox.exec(["python3", "/agent/hello.py"], check=True)
            told = json.loads(again.stdout)
            assert told["last_seq"] == back.last_seq
            assert (told["restoration"]["step"], told["restoration"]["reason"]) == (0, "rollback")
            async for event in events:
                if isinstance(event, RolloutPutBack) and event.rollout_id == rollout.id:
                    assert (event.step, event.sandbox_id) == (0, sandbox.id)
                    assert event.reason == "rollback"
                    break
        await rollout.close()


async def test_a_groups_trainer_loses_the_steps_that_a_rollback_made_void(
    stack: Stack, base: str
) -> None:
    async with (
        stack.client() as client,
        client.rollouts.group("put back", ["task"], checkpoint_every=2) as group,
        asyncio.timeout(60),
    ):
        (rollout,) = group.rollouts
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await prepared(sandbox)
            running = asyncio.ensure_future(run_agent(sandbox))
            steps = group.steps()
            for _ in range(3):
                step = await anext(steps)
                if step.seq < 3:
                    await step.reply(reward=1.0)
            await rollout.roll_back()
            await asyncio.gather(running, return_exceptions=True)
            with pytest.raises(DsecError) as refusal:
                await step.reply(reward=1.0)
            assert refusal.value.details["reason"] == "rolled_back"
            running = asyncio.ensure_future(run_agent(sandbox))
            step = await anext(steps)
            assert step.observation == {"count": 3}
            await step.reply(reward=1.0, done=True)
            await running
            assert [left async for left in steps] == []
        assert (await rollout.inspect()).total_reward == 3.0


def test_a_client_without_await_keeps_puts_back_and_branches(stack: Stack, base: str) -> None:
    credentials = stack.directory / "auth" / "projects" / "default.creds"
    with sync.DSecClient(stack.context.nats_servers, credentials) as client:
        rollout = client.rollouts.open()
        with client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            sandbox.write_file("/work/x", "kept")
            rollout.put_state({"plan": 1})
            kept = rollout.checkpoint(sandbox=sandbox.id)
            assert [it.checkpoint for it in rollout.checkpoints()] == [kept.checkpoint]
            sandbox.write_file("/work/x", "lost")
            assert rollout.roll_back().checkpoint == kept.checkpoint
            assert sandbox.read_text("/work/x") == "kept"
            (branch,) = rollout.branch(1)
            with branch.sandbox as other:
                assert other.read_text("/work/x") == "kept"
            assert branch.rollout.get_state("plan") == {"plan": 1}
            branch.rollout.close()
        rollout.close()
