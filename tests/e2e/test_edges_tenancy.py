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
from dsec.network import PortStream
from dsec.process import Process
from dsec.rollouts import Rollout
from dsec.rootfs import build_host_rootfs
from dsec.snapshots import Snapshot
from dsec_common import subjects
from dsec_common.subjects import ScopedId
from dsec_common.topics import behavior_logs
from dsec_common.wire.base import new_id
from dsec_common.wire.network import NetworkMode
from dsec_common.wire.sandbox import EndCause, SandboxState
from stack import Stack

WAIT_S = 30.0


@dataclass(frozen=True)
class Victim:
    """What the first project has, and what may not be touched."""

    client: DSecClient
    sandbox: Sandbox
    rollout: Rollout
    base: str
    snapshot: Snapshot
    process: Process
    stream: PortStream


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
        async with await client.create_sandbox(
            base, rollout_id=rollout.id, labels={"whose": "mine"}
        ) as sandbox:
            await sandbox.write_file("/secret", "mine")
            snapshot = await sandbox.snapshot()
            process = await sandbox.start(["cat"], stdin=True)
            async with await _listener(sandbox) as stream:
                yield Victim(client, sandbox, rollout, base, snapshot, process, stream)
                await stream.write(b"x")
                assert await stream.read() == b"x"
            await process.write("still mine\n")
            await process.close_stdin()
            result = await process.output(WAIT_S)
            assert (result.exit_code, result.stdout) == (0, b"still mine\n")
            assert await sandbox.read_file("/secret") == b"mine"
            assert {info.path for info in await sandbox.list_directory("/")} & {"/evil"} == set()
            info = await sandbox.inspect()
            assert (info.state, info.labels) == (SandboxState.RUNNING, {"whose": "mine"})
            assert info.expires_at == 0
            assert (await sandbox.network.inspect()).policy.mode is NetworkMode.NONE
            assert (await snapshot.inspect()).snapshot_id == snapshot.id
            assert len(await client.snapshots.list(sandbox_id=sandbox.id)) == 1
            await snapshot.delete()
        assert (await rollout.close()).last_seq == 0
        assert (await client.layers.inspect(base)).reference == base


async def _listener(sandbox: Sandbox) -> PortStream:
    """Return a connection to an echo inside, which waits for what comes."""
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 8080)); open('/tmp/l', 'w'); "
        "c = s.accept()[0]\nwhile d := c.recv(9): c.sendall(d)"
    )
    await sandbox.write_file("/tmp/echo.py", code)
    command = "python3 /tmp/echo.py >/dev/null 2>&1 & until [ -e /tmp/l ]; do sleep 0.02; done"
    await sandbox.exec(command, check=True)
    return await sandbox.open_port(8080)


Attack = Callable[[DSecClient, Victim], Awaitable[object]]


def _sandbox(me: DSecClient, it: Victim) -> Sandbox:
    """Return my handle of the victim's sandbox."""
    return me.sandbox(it.sandbox.id)


def _snapshot(me: DSecClient, it: Victim) -> Snapshot:
    return me.snapshots.get(it.snapshot.id)


def _process(me: DSecClient, it: Victim) -> Process:
    return _sandbox(me, it).process(it.process.id)


def _stream(me: DSecClient, it: Victim) -> PortStream:
    return PortStream(me._connected(), it.sandbox._scoped, it.stream._id)


async def _watch(me: DSecClient, it: Victim) -> None:
    async with _sandbox(me, it).watch("/", recursive=True) as watch:
        await anext(watch)


ATTACKS: dict[str, Attack] = {
    "exec": lambda me, it: _sandbox(me, it).exec("rm -rf /secret"),
    "start": lambda me, it: _sandbox(me, it).start(["rm", "-rf", "/secret"]),
    "session": lambda me, it: _sandbox(me, it).session(),
    "list execs": lambda me, it: _sandbox(me, it).processes(),
    "read exec": lambda me, it: _process(me, it).read(wait_s=0.0),
    "inspect exec": lambda me, it: _process(me, it).inspect(),
    "write stdin": lambda me, it: _process(me, it).write("yours"),
    "end stdin": lambda me, it: _process(me, it).close_stdin(),
    "resize exec": lambda me, it: _process(me, it).resize(1, 1),
    "signal exec": lambda me, it: _process(me, it).signal(9),
    "cancel exec": lambda me, it: _process(me, it).cancel(),
    "read": lambda me, it: _sandbox(me, it).read_file("/secret"),
    "write": lambda me, it: _sandbox(me, it).write_file("/secret", "yours"),
    "stat": lambda me, it: _sandbox(me, it).stat("/secret"),
    "list directory": lambda me, it: _sandbox(me, it).list_directory("/"),
    "make directory": lambda me, it: _sandbox(me, it).make_directory("/evil"),
    "move": lambda me, it: _sandbox(me, it).move("/secret", "/evil"),
    "copy": lambda me, it: _sandbox(me, it).copy("/secret", "/evil"),
    "remove": lambda me, it: _sandbox(me, it).remove("/secret"),
    "upload a tree": lambda me, it: _sandbox(me, it).upload(Path(__file__).parent, "/evil"),
    "download": lambda me, it: _sandbox(me, it).download("/secret", "/dev/null/x"),
    "watch": _watch,
    "inspect": lambda me, it: _sandbox(me, it).inspect(),
    "pause": lambda me, it: _sandbox(me, it).pause(),
    "resume": lambda me, it: _sandbox(me, it).resume(),
    "touch": lambda me, it: _sandbox(me, it).touch(ttl_s=1.0),
    "label": lambda me, it: _sandbox(me, it).set_labels({"whose": "yours"}),
    "inspect network": lambda me, it: _sandbox(me, it).network.inspect(),
    "set network": lambda me, it: _sandbox(me, it).network.set({"allow": ["10.0.0.0/8"]}),
    "enter the agent phase": lambda me, it: _sandbox(me, it).network.enter_agent_phase(),
    "open a port": lambda me, it: _sandbox(me, it).open_port(8080),
    "read a port": lambda me, it: _stream(me, it).read(),
    "write to a port": lambda me, it: _stream(me, it).write(b"yours"),
    "snapshot": lambda me, it: _sandbox(me, it).snapshot(),
    "fork": lambda me, it: _sandbox(me, it).fork(2),
    "roll back": lambda me, it: _sandbox(me, it).roll_back(it.snapshot.id),
    "inspect a snapshot": lambda me, it: _snapshot(me, it).inspect(),
    "pack a snapshot": lambda me, it: _snapshot(me, it).pack_diff("stolen", "1"),
    "begin with a snapshot": lambda me, it: me.create_sandbox(snapshot=it.snapshot.id),
    "trace": lambda me, it: me.trace(it.sandbox.id),
    "read stages": lambda me, it: me.rollouts.get(it.rollout.id).next(0, wait_s=0.0),
    "send feedback": lambda me, it: me.rollouts.get(it.rollout.id).feedback(1, {}, reward=9.0),
    "inspect rollout": lambda me, it: me.rollouts.get(it.rollout.id).inspect(),
    "close rollout": lambda me, it: me.rollouts.get(it.rollout.id).close(),
    "inspect layer": lambda me, it: me.layers.inspect(it.base),
    "remove layer": lambda me, it: me.layers.remove(it.base),
    "use layer": lambda me, it: me.create_sandbox(it.base),
    "call with a layer": lambda me, it: me.call(it.base, ["true"]),
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


async def test_deleting_another_projects_snapshot_or_port_takes_nothing_away(
    stack: Stack, evil: str, victim: Victim
) -> None:
    async with stack.client(evil) as me:
        # Both say what they say of one that is not there; the victim's fixture uses them still.
        await _snapshot(me, victim).delete()
        await _stream(me, victim).close()
        assert await me.snapshots.list() == []
    assert (await victim.snapshot.inspect()).snapshot_id == victim.snapshot.id


async def test_a_pool_is_its_projects_alone(stack: Stack, evil: str, victim: Victim) -> None:
    pool = await victim.client.pools.set(victim.base, size=1)
    try:
        async with stack.client(evil) as me:
            assert await me.pools.list() == []
            for attempt in (me.pools.remove(key=pool.key), me.pools.remove(victim.base)):
                with pytest.raises(DsecError) as caught:
                    await attempt
                assert caught.value.code is ErrorCode.NOT_FOUND
        (same,) = await victim.client.pools.list()
        assert same.key == pool.key
    finally:
        await victim.client.pools.remove(victim.base)


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
            *(subjects.group("default", shard.owner, verb) for verb in subjects.GROUP_VERBS),
            *(subjects.rollout_group("default", verb) for verb in ("take_group", "open_group")),
            *(subjects.group_system("default", shard.owner, verb) for verb in ("take", "open")),
            subjects.shard_taken(shard.owner),
            *(subjects.layer("default", node, verb) for verb in subjects.LAYER_VERBS),
            *(subjects.snapshot("default", node, verb) for verb in subjects.SNAPSHOT_VERBS),
            *(subjects.pool("default", verb) for verb in subjects.POOL_VERBS),
            "dsec.v1.default.function.call",
            subjects.sandbox_create("default"),
            subjects.queue_sandbox_create("default"),
            subjects.node_request(node, "place"),
            subjects.node_request(node, "list"),
            subjects.heartbeat(node),
            subjects.lease("release"),
            subjects.rollout_system("default", shard, "report"),
            subjects.rollout_system("default", shard, "step"),
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
