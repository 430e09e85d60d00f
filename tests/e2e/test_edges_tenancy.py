"""A second project's user, with an SDK and with a plain NATS client, beside a first one at work.

What the accounts alone keep apart is shown in ``tests/security``; here it is the whole platform.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiokafka
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dsec import BehaviorLog, DSecClient, DsecError, ErrorCode, Sandbox
from dsec.rollouts import Rollout
from dsec.rootfs import build_host_rootfs
from dsec_common import subjects
from dsec_common.subjects import ScopedId
from dsec_common.topics import behavior_logs
from dsec_common.wire.base import new_id
from dsec_common.wire.sandbox import EndCause
from stack import Stack

WAIT_S = 30.0


@dataclass(frozen=True)
class Victim:
    """What the first project has, and what may not be touched."""

    client: DSecClient
    sandbox: Sandbox
    rollout: Rollout
    base: str


@pytest.fixture(scope="module")
def evil(stack: Stack) -> Iterator[str]:
    """The name of the second project."""
    stack.dsec("project", "create", "evil")
    yield "evil"
    stack.dsec("project", "rm", "evil")


@pytest.fixture
async def victim(stack: Stack, base: str) -> AsyncIterator[Victim]:
    async with stack.client() as client:
        rollout = await client.rollouts.open(labels={"secret": "1"}, idempotency_key=new_id())
        async with await client.create_sandbox(base, rollout_id=rollout.id) as sandbox:
            await sandbox.write_file("/secret", "mine")
            yield Victim(client, sandbox, rollout, base)
            assert await sandbox.read_file("/secret") == b"mine"
        assert (await rollout.close()).last_seq == 0
        assert (await client.layers.inspect(base)).reference == base


Attack = Callable[[DSecClient, Victim], Awaitable[object]]

ATTACKS: dict[str, Attack] = {
    "exec": lambda me, it: me.sandbox(it.sandbox.id).exec("rm -rf /secret"),
    "read": lambda me, it: me.sandbox(it.sandbox.id).read_file("/secret"),
    "write": lambda me, it: me.sandbox(it.sandbox.id).write_file("/secret", "yours"),
    "stat": lambda me, it: me.sandbox(it.sandbox.id).stat("/secret"),
    "list directory": lambda me, it: me.sandbox(it.sandbox.id).list_directory("/"),
    "make directory": lambda me, it: me.sandbox(it.sandbox.id).make_directory("/evil"),
    "inspect": lambda me, it: me.sandbox(it.sandbox.id).inspect(),
    "trace": lambda me, it: me.trace(it.sandbox.id),
    "read stages": lambda me, it: me.rollouts.get(it.rollout.id).next(0, wait_s=0.0),
    "send feedback": lambda me, it: me.rollouts.get(it.rollout.id).feedback(1, {}, reward=9.0),
    "inspect rollout": lambda me, it: me.rollouts.get(it.rollout.id).inspect(),
    "close rollout": lambda me, it: me.rollouts.get(it.rollout.id).close(),
    "inspect layer": lambda me, it: me.layers.inspect(it.base),
    "remove layer": lambda me, it: me.layers.remove(it.base),
    "use layer": lambda me, it: me.create_sandbox(it.base),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_what_is_another_projects_is_not_found(
    stack: Stack, evil: str, victim: Victim, attack: Attack
) -> None:
    async with stack.client(evil) as me:
        with pytest.raises(DsecError) as caught:
            await attack(me, victim)
    assert caught.value.code is ErrorCode.NOT_FOUND, caught.value


async def test_a_digest_is_no_way_to_another_projects_layer(
    stack: Stack, evil: str, victim: Victim
) -> None:
    digest = (await victim.client.layers.inspect(victim.base)).digest
    async with stack.client(evil) as me:
        for attack in (me.create_sandbox(digest), me.layers.inspect(digest)):
            with pytest.raises(DsecError) as caught:
                await attack
            assert caught.value.code is ErrorCode.NOT_FOUND


async def test_deleting_another_projects_sandbox_deletes_nothing(
    stack: Stack, evil: str, victim: Victim
) -> None:
    async with stack.client(evil) as me:
        # It says what it says of any sandbox that is unknown, and the victim's fixture looks.
        assert await me.sandbox(victim.sandbox.id).delete() is EndCause.DELETED
        assert await me.list_sandboxes(include_ended=True) == []
    assert (await victim.sandbox.inspect()).end_cause is None


async def test_one_key_in_two_projects_is_two_rollouts(
    stack: Stack, evil: str, victim: Victim
) -> None:
    key = new_id()
    async with stack.client(evil) as me:
        mine = await me.rollouts.open(idempotency_key=key)
        theirs = await victim.client.rollouts.open(idempotency_key=key)
        assert mine.id != theirs.id
        await mine.close()
        await theirs.close()


async def test_events_are_heard_by_their_own_project_alone(
    stack: Stack, evil: str, victim: Victim
) -> None:
    async with (
        stack.client(evil) as me,
        me.events() as overheard,
        victim.client.events() as own,
        asyncio.timeout(WAIT_S),
    ):
        async with await victim.client.create_sandbox(victim.base) as sandbox:
            pass
        ended = 0
        async for event in own:
            ended += getattr(event, "sandbox_id", "") == sandbox.id
            if ended == 2:
                break
        # Mine, and the first that I hear: whatever came before it was heard before it.
        refused = asyncio.create_task(me.queue_sandbox("no-such-layer@1", timeout_s=WAIT_S))
        first = await anext(aiter(overheard))
        assert type(first).__name__ == "SandboxRefused"
        with pytest.raises(DsecError):
            await refused


async def test_a_plain_client_reaches_and_hears_nothing_of_another_project(
    stack: Stack, evil: str, victim: Victim
) -> None:
    refusals: list[str] = []
    heard: list[Msg] = []

    async def refused(error: Exception) -> None:
        refusals.append(str(error))

    async def hear(message: Msg) -> None:
        heard.append(message)

    raw = Client()
    await raw.connect(
        stack.context.nats_servers[0],
        user_credentials=str(stack.directory / "auth" / "projects" / f"{evil}.creds"),
        error_cb=refused,
        skip_subject_validation=True,
    )
    try:
        spying = ("dsec.v1.default.>", "dsec.v1.*.evt.>", "dsec.v1._sys.>", "_INBOX.>", "$JS.>")
        for subject in (*spying, "_R_.>", "$SYS.>", "$KV.>"):
            await raw.subscribe(subject, cb=hear)
        await raw.flush()
        scoped = ScopedId.parse(victim.sandbox.id)
        node, shard = stack.node_names[0], ScopedId.parse(victim.rollout.id)
        targets = [
            *(subjects.sandbox("default", scoped, verb) for verb in subjects.SANDBOX_VERBS),
            *(subjects.rollout("default", shard, verb) for verb in subjects.ROLLOUT_VERBS),
            *(subjects.layer("default", node, verb) for verb in subjects.LAYER_VERBS),
            subjects.sandbox_create("default"),
            subjects.queue_sandbox_create("default"),
            subjects.node_request(node, "place"),
            subjects.node_request(node, "list"),
            subjects.heartbeat(node),
            subjects.lease("release"),
            subjects.rollout_system("default", shard, "report"),
            subjects.rollout_journal(shard.owner),
            subjects.sandbox_event("default", scoped, "ended"),
            "$JS.API.STREAM.PURGE.DSEC_QUEUE",
            "$JS.API.STREAM.DELETE.DSEC_EVENTS",
            "$KV.dsec-idempotency.x",
            f"dsec.v1.default.sandbox.{scoped.owner}.*.delete",
            f"dsec.v1.evil.sandbox.{scoped.owner}.*.delete",
            f"dsec.v1.evil.sandbox.{scoped.owner}.>",
        ]
        for target in targets:
            await raw.publish(target, b"{}", headers={"content-type": "application/json"})
            reply = subjects.sandbox("default", scoped, "delete")
            await raw.publish(target, b"{}", reply=reply)
        # My own verbs, with replies that would hit another.
        own = ScopedId(scoped.owner, scoped.local)
        for reply in (subjects.sandbox("default", scoped, "delete"), "$JS.API.STREAM.PURGE.X"):
            await raw.publish(subjects.sandbox(evil, own, "inspect"), b"{}", reply=reply)
            await raw.publish(subjects.sandbox_list(evil), b"{}", reply=reply)
        await raw.flush()
        await raw.flush()
        # The victim works on meanwhile, and its traffic is not overheard.
        assert (await victim.sandbox.exec("echo alive")).stdout == b"alive\n"
        await raw.flush()
    finally:
        await raw.close()
    assert [message.subject for message in heard if "default" in message.subject] == []
    assert refusals, "the server said no"
    assert (await victim.sandbox.inspect()).end_cause is None


async def test_each_projects_steps_are_in_a_topic_of_its_own(
    stack: Stack, evil: str, victim: Victim, tmp_path: Path
) -> None:
    assert behavior_logs("default") == "dsec-behavior-logs"
    assert behavior_logs(evil) == "dsec-behavior-logs.evil"
    await victim.sandbox.exec(["echo", "step"])
    build_host_rootfs(tmp_path / "root", python=False)
    async with stack.client(evil) as me:
        await me.layers.import_directory(tmp_path / "root", kind="base", name="shell", version="1")
        async with await me.create_sandbox("shell@1") as mine:
            await mine.exec(["echo", "step"])
        await me.layers.remove("shell@1")
    for project, sandbox in (("default", victim.sandbox), (evil, mine)):
        consumer = aiokafka.AIOKafkaConsumer(
            behavior_logs(project),
            bootstrap_servers=stack.context.kafka_bootstrap,
            auto_offset_reset="earliest",
            metadata_max_age_ms=500,
            value_deserializer=BehaviorLog.parse,
        )
        await consumer.start()
        try:
            async with asyncio.timeout(WAIT_S):
                async for message in consumer:
                    assert message.value.project == project
                    if message.value.sandbox_id == sandbox.id and message.value.action == "exec":
                        break
        finally:
            await consumer.stop()
