"""Chronus is killed between its writes, and a node is lost: rollouts are whole or as before."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import killing_chronus
from dsec import DSecClient, DsecError
from dsec.events import EventStream
from dsec_common.wire.checkpoint import RolloutPutBack
from dsec_common.wire.sandbox import SandboxState
from stack import Stack, pid_of

PATIENCE_S = 90.0
NODE_LOST_S = 3.0


@pytest.fixture(scope="module")
def kill_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("killing") / "when")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, kill_file: Path) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    platform = Stack(tmp_path_factory.mktemp("killed"), name="k", nodes=2)
    platform.more_environment = {
        "PYTHONPATH": killing_chronus.__path__[0],
        "DSEC_KILL_FILE": str(kill_file),
        "DSEC_CHRONUS_LEASE_TTL_S": "1",
        "DSEC_CHRONUS_NODE_LOST_S": str(NODE_LOST_S),
        "DSEC_CHRONUS_SWEEP_INTERVAL_S": "0.5",
    }
    try:
        platform.start()
        yield platform
    finally:
        code = platform.stop()
    assert code == 0, platform.said()
    assert platform.leftovers() == []


@pytest.fixture(scope="module")
def base(stack: Stack) -> str:
    return stack.import_host_base()


async def snapshots_of(client: DSecClient, rollout_id: str) -> list[str]:
    found = await client.snapshots.list(labels={"dsec-rollout": rollout_id})
    return [one.id for one in found]


async def put_back(events: EventStream, rollout_id: str) -> RolloutPutBack:
    async for event in events:
        if isinstance(event, RolloutPutBack) and event.rollout_id == rollout_id:
            return event
    raise AssertionError


def kill_at(kill_file: Path, moment: str) -> None:
    kill_file.write_text(moment)


def was_killed(kill_file: Path) -> bool:
    return not kill_file.exists()


# Each kill lets the next start of Chronus wait for longer: the other moments are the unit tests'.
@pytest.mark.parametrize("moment", ["after_intent", "before_result"])
async def test_a_checkpoint_is_whole_and_one_wherever_chronus_is_killed(
    stack: Stack, base: str, kill_file: Path, moment: str
) -> None:
    async with stack.client() as client, asyncio.timeout(PATIENCE_S):
        rollout = await client.rollouts.open()
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await sandbox.write_file("/work/x", "kept")
            await rollout.put_state({"plan": "kept"})
            kill_at(kill_file, moment)
            info = await rollout.checkpoint(sandbox=sandbox, key="one")
            assert was_killed(kill_file)
            (kept,) = await rollout.checkpoints()
            assert (kept.checkpoint, kept.snapshot_id) == (info.checkpoint, info.snapshot_id)
            assert await snapshots_of(client, rollout.id) == [info.snapshot_id]
            assert await rollout.get_state(checkpoint=info.checkpoint) == {"plan": "kept"}
        await rollout.close()


async def test_a_rollback_is_carried_to_its_end_by_the_next_owner(
    stack: Stack, base: str, kill_file: Path
) -> None:
    async with stack.client() as client, asyncio.timeout(PATIENCE_S):
        rollout = await client.rollouts.open()
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await sandbox.write_file("/work/x", "kept")
            await rollout.checkpoint(sandbox=sandbox)
            await sandbox.write_file("/work/x", "lost")
            kill_at(kill_file, "before_result")
            back = await rollout.roll_back(key="back")
            assert was_killed(kill_file)
            assert (back.sandbox_id, back.recreated) == (sandbox.id, False)
            assert await sandbox.read_text("/work/x") == "kept"
        await rollout.close()


async def test_no_branch_is_made_twice(stack: Stack, base: str, kill_file: Path) -> None:
    async with stack.client() as client, asyncio.timeout(PATIENCE_S):
        rollout = await client.rollouts.open()
        labels = {"tree": "one"}
        async with await client.create_sandbox(
            base, rollout_id=rollout.id, labels=labels, cpus=0.1
        ) as sandbox:
            await rollout.checkpoint(sandbox=sandbox)
        kill_at(kill_file, "after_intent")
        branches = await rollout.branch(4, key="tree")
        assert was_killed(kill_file)
        made = [one for one in branches if not isinstance(one, DsecError)]
        living = await client.list_sandboxes(labels=labels)
        assert {info.sandbox_id for info in living} == {one.sandbox.id for one in made}
        assert len(made) == 4
        for one in made:
            await one.sandbox.delete()
            await one.rollout.close()
        await rollout.close()


async def test_what_no_checkpoint_needs_is_collected_and_nothing_else(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, asyncio.timeout(PATIENCE_S):
        rollout = await client.rollouts.open()
        shard = rollout.id.partition(".")[0]
        labels = {"dsec-rollout": rollout.id, "dsec-action": "99", "dsec-shard": shard}
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            kept = await rollout.checkpoint(sandbox=sandbox, durable=True)
            left = await sandbox.snapshot(labels=labels, wait_durable=True)
            layer = await left.pack_diff(f"checkpoint-{rollout.id.replace('.', '-')}", "99")
        with pytest.raises(DsecError):  # as one that a node took too late
            await rollout.checkpoint(sandbox=sandbox)
        while await snapshots_of(client, rollout.id) != [kept.snapshot_id]:
            await asyncio.sleep(0.1)
        names = {it.reference for it in await client.layers.list(name=layer.reference[:-3])}
        assert names == {kept.layer}
        await rollout.close()


async def test_a_rollout_goes_on_on_another_node_when_its_own_is_lost(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, client.events() as events, asyncio.timeout(PATIENCE_S):
        rollout = await client.rollouts.open()
        sandbox = await client.create_sandbox(base, rollout_id=rollout.id, cpus=0.1)
        await sandbox.write_file("/work/x", "kept")
        await rollout.put_state({"plan": "kept"})
        await rollout.checkpoint(sandbox=sandbox, durable=True)
        await sandbox.write_file("/work/x", "lost")
        await rollout.put_state({"plan": "lost"})
        daemon = pid_of(stack, f"sandboxd-{sandbox.node}")
        os.kill(daemon, signal.SIGSTOP)
        try:
            event = await put_back(events, rollout.id)
            assert event.reason == "node_lost"
            other = client.sandbox(event.sandbox_id)
            assert other.node != sandbox.node
            assert await other.read_text("/work/x") == "kept"
            assert await rollout.get_state() == {"plan": "kept"}
            info = await rollout.inspect()
            assert info.sandbox_id == other.id
            assert info.restoration is not None
            assert info.restoration.reason == "node_lost"
            await other.delete()
            await rollout.close()
        finally:
            os.kill(daemon, signal.SIGCONT)
        # The node was not lost after all: what was there is its owner's.
        assert (await sandbox.inspect()).state is SandboxState.RUNNING
        await sandbox.delete()
