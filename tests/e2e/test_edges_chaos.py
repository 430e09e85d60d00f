"""Every part of the platform is killed in turn, under load, as a user sees it.

The platform is one of two nodes and Apache Kafka itself. What a user may see is a typed error
that says so; what nobody may see is a sandbox made twice, one that is left, or a lost step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiokafka
import pytest

from dsec import BehaviorLog, DSecClient, DsecError, ErrorCode, Sandbox
from dsec_common import subjects
from dsec_common.bus import Bus, BusConfig, Request
from dsec_common.topics import behavior_logs
from dsec_common.wire.base import new_id
from dsec_common.wire.node import PlaceSandbox
from stack import Stack, pid_of, running_stack

PATIENCE_S = 60.0
SMALL: dict[str, Any] = {"cpus": 0.05, "memory_bytes": 32 << 20, "disk_bytes": 1 << 20}
USERS = 6
#: Before and after a kill, each user gets so far.
ROUNDS = 5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("chaos"), "--kafka=apache", name="c", nodes=2
    ) as platform:
        yield platform


@pytest.fixture(scope="module")
def base(stack: Stack) -> str:
    return stack.import_host_base()


async def restarted(stack: Stack, part: str) -> None:
    """Return when the platform has said that it started the part again."""

    def wait() -> None:
        while stack.next_event("service_restarted")["name"] != part:
            pass

    await asyncio.to_thread(wait)


class Load:
    """Users that create, use and delete sandboxes until told to stop.

    Attributes:
        finished: rounds that went through, of all users.
        errors: what users were told instead.
        made: every sandbox that a user got.
    """

    def __init__(self, client: DSecClient, base: str) -> None:
        self.client = client
        self.base = base
        self.run = new_id()
        self.finished = 0
        self.errors: list[tuple[str, DsecError]] = []
        self.made: list[Sandbox] = []
        self._moved = asyncio.Event()
        self._over = False

    async def user(self) -> None:
        """Go round; a user's own error handling is: note it and go on."""
        while not self._over:
            sandbox: Sandbox | None = None
            step = "create"
            try:
                sandbox = await self.client.create_sandbox(
                    self.base, idempotency_key=new_id(), labels={"run": self.run}, **SMALL
                )
                self.made.append(sandbox)
                step = "exec"
                result = await sandbox.exec(["echo", sandbox.id])
                assert result.stdout == f"{sandbox.id}\n".encode()
                step = "delete"
                await sandbox.delete()
            except DsecError as error:
                self.errors.append((step, error))
                if sandbox is not None:
                    await sandbox.delete()
            else:
                self.finished += 1
                self._moved.set()

    async def progress(self) -> None:
        """Return when the users have gone some rounds further."""
        wanted = self.finished + USERS * ROUNDS
        async with asyncio.timeout(PATIENCE_S):
            while self.finished < wanted:
                self._moved.clear()
                await self._moved.wait()

    def end(self) -> None:
        self._over = True


@contextlib.asynccontextmanager
async def load(stack: Stack, base: str) -> AsyncIterator[Load]:
    """Yield a platform under load; afterwards nothing of it may be left."""
    async with stack.client() as client:
        users = Load(client, base)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(USERS):
                tasks.create_task(users.user())
            try:
                await users.progress()
                yield users
            finally:
                users.end()
        labels = {"run": users.run}
        assert await client.list_sandboxes(labels=labels) == []
        every = await client.list_sandboxes(labels=labels, include_ended=True)
        assert {sandbox.id for sandbox in users.made} <= {info.sandbox_id for info in every}


@pytest.mark.parametrize("part", ["scheduler", "broker", "chronus", "tracer"])
async def test_a_killed_service_costs_a_user_nothing(stack: Stack, base: str, part: str) -> None:
    async with load(stack, base) as users:
        os.kill(pid_of(stack, part), signal.SIGKILL)
        await users.progress()
        await restarted(stack, part)
        await users.progress()
    assert users.errors == []


async def test_a_killed_nats_server_costs_at_most_the_commands_under_way(
    stack: Stack, base: str
) -> None:
    async with load(stack, base) as users:
        os.kill(pid_of(stack, "nats"), signal.SIGKILL)
        await users.progress()
        await restarted(stack, "nats")
    # Only a command is not asked for again: it may have run.
    assert {(step, error.code) for step, error in users.errors} <= {("exec", ErrorCode.UNAVAILABLE)}
    assert len(users.errors) <= USERS
    assert all(error.details["may_have_happened"] for _, error in users.errors)


async def test_a_killed_node_daemon_costs_no_sandbox(stack: Stack, base: str) -> None:
    victim, other = stack.node_names
    async with stack.client() as client:
        kept = await one_on_each_node(client, base, {victim, other})
        await kept[victim].exec(["sh", "-c", "echo kept > /tmp/kept; sleep 1000 >/dev/null 2>&1 &"])
        async with load(stack, base) as users:
            os.kill(pid_of(stack, f"sandboxd-{victim}"), signal.SIGKILL)
            await users.progress()
            await restarted(stack, f"sandboxd-{victim}")
            await users.progress()
        # What is told of a command that was under way on the node; nothing of a creation.
        assert {(step, error.code) for step, error in users.errors} <= {
            ("exec", ErrorCode.UNAVAILABLE),
        }
        assert (await kept[other].exec("echo alive")).stdout == b"alive\n"
        assert (await kept[victim].exec("cat /tmp/kept")).stdout == b"kept\n"
        assert (await kept[victim].inspect()).end_cause is None
        for sandbox in kept.values():
            await sandbox.delete()


async def one_on_each_node(client: DSecClient, base: str, nodes: set[str]) -> dict[str, Sandbox]:
    """Return a sandbox on each node; the scheduler chooses, so it is asked until it has."""
    kept: dict[str, Sandbox] = {}
    async with asyncio.timeout(PATIENCE_S):
        while nodes - kept.keys():
            sandbox = await client.create_sandbox(base, **SMALL)
            if kept.setdefault(sandbox.node, sandbox) is not sandbox:
                await sandbox.delete()
    return kept


@contextlib.asynccontextmanager
async def asked_for_a_sandbox(stack: Stack, node: str) -> AsyncIterator[asyncio.Event]:
    """Yield what is set as soon as the scheduler has chosen this node and asks it."""
    asked = asyncio.Event()

    async def hear(_: Request[PlaceSandbox]) -> None:
        asked.set()

    config = BusConfig(
        servers=stack.context.nats_servers,
        credentials_path=str(stack.directory / "auth" / "creds" / f"sandboxd-{node}.creds"),
        name="hears what the node is asked",
    )
    async with await Bus.connect(config) as bus:
        await bus.subscribe(subjects.node_request(node, "place"), PlaceSandbox, hear)
        await bus.flush()
        yield asked


async def test_a_node_that_dies_between_grant_and_create_costs_only_time(
    stack: Stack, base: str
) -> None:
    victim, other = stack.node_names
    label = {"run": new_id()}
    async with stack.client() as client:
        for sandbox in (await one_on_each_node(client, base, {victim, other})).values():
            await sandbox.delete()
        pid = pid_of(stack, f"sandboxd-{victim}")
        creating: list[asyncio.Task[Sandbox]] = []
        try:
            async with (
                asked_for_a_sandbox(stack, victim) as asked,
                asyncio.timeout(PATIENCE_S),
            ):
                hearing = asyncio.create_task(asked.wait())
                while not asked.is_set():
                    # It hears no more, and while its heartbeats are fresh the scheduler grants and
                    # waits; on a slow machine they may be old before, and the other node has all.
                    os.kill(pid, signal.SIGSTOP)
                    batch = [
                        asyncio.create_task(client.create_sandbox(base, labels=label, **SMALL))
                        for _ in range(12)
                    ]
                    creating += batch
                    made_all = asyncio.gather(*batch)
                    first: set[asyncio.Future[Any]] = {hearing, made_all}
                    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                    if not asked.is_set():
                        os.kill(pid, signal.SIGCONT)
        finally:
            os.kill(pid, signal.SIGKILL)
        made = await asyncio.gather(*creating)
        await restarted(stack, f"sandboxd-{victim}")
        listed = await listed_by_all_nodes(client, label)
        assert sorted(listed) == sorted(sandbox.id for sandbox in made)
        for sandbox in made:
            await sandbox.delete()


async def listed_by_all_nodes(client: DSecClient, labels: dict[str, str]) -> list[str]:
    """Return the ids of the living once every node answers again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return [info.sandbox_id for info in await client.list_sandboxes(labels=labels)]
            except DsecError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)


async def test_a_killed_kafka_loses_no_step(stack: Stack, base: str) -> None:
    async with load(stack, base) as users:
        os.kill(pid_of(stack, "kafka"), signal.SIGKILL)
        await users.progress()
        await restarted(stack, "kafka")
        await users.progress()
    assert users.errors == []
    steps = await steps_in_kafka(stack, {sandbox.id for sandbox in users.made})
    for sandbox in users.made:
        numbers = sorted(steps[sandbox.id])
        assert numbers == list(range(1, len(numbers) + 1)), sandbox.id
        told = [steps[sandbox.id][number] for number in numbers]
        assert told[:2] == ["create", "exec"], sandbox.id


async def steps_in_kafka(stack: Stack, wanted: set[str]) -> dict[str, dict[int, str]]:
    """Return the steps of sandboxes as a plain consumer reads them, until all have their end."""
    consumer = aiokafka.AIOKafkaConsumer(
        behavior_logs("default"),
        bootstrap_servers=stack.context.kafka_bootstrap,
        auto_offset_reset="earliest",
        value_deserializer=BehaviorLog.parse,
    )
    steps: dict[str, dict[int, str]] = defaultdict(dict)
    open_ones = set(wanted)
    await consumer.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for message in consumer:
                record: BehaviorLog = message.value
                steps[record.sandbox_id][record.seq] = record.action
                if record.action in {"delete", "end"}:
                    open_ones.discard(record.sandbox_id)
                if not open_ones:
                    return steps
    finally:
        await consumer.stop()
    return steps
