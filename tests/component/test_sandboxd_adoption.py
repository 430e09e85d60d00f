"""A node's daemon is killed, upgraded or stopped; its sandboxes live on under the next one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    SandboxDeleted,
    SandboxEnded,
    SandboxInfo,
    SandboxState,
)
from refusals import refused
from sandboxd_node import BASE, TOOLKIT, NodeForTests, connect_to_agent_socket
from sandboxd_process import DaemonProcess, daemon_for_tests, kill_process, processes_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

#: A node of one processor has room for 32: a fast machine makes more within the test.
ALIVE_AT_ONCE_MAX = 12
Both = tuple[DaemonProcess, NodeForTests]
T = TypeVar("T")


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with daemon_for_tests(tmp_path, layers) as running:
        yield running


def local_of(sandbox_id: str) -> str:
    return sandbox_id.partition(".")[2]


async def info_of(node: NodeForTests, sandbox_id: str) -> SandboxInfo:
    return await node.ask(sandbox_id, "inspect", InspectSandbox(), SandboxInfo)


async def outcome(asking: Awaitable[T]) -> T | DsecError:
    try:
        return await asking
    except DsecError as error:
        return error


async def test_kill_9_of_the_daemon_costs_no_sandbox(both: Both) -> None:
    daemon, node = both
    created = await node.place(
        CreateSandbox(
            base=BASE, toolkits=(TOOLKIT,), env={"A": "b"}, labels={"of": "me"}, ttl_s=600.0
        ),
        lease_id="lease-1",
    )
    wrote = await node.exec(
        created.sandbox_id, "sh", "-c", "echo kept > /tmp/kept; sleep 1000 >/dev/null 2>&1 &"
    )
    assert wrote.exit_code == 0
    before = await info_of(node, created.sandbox_id)
    processes = processes_of(local_of(created.sandbox_id))
    await daemon.kill()
    assert processes_of(local_of(created.sandbox_id)) == processes
    await daemon.start()
    result = await node.exec(
        created.sandbox_id, "sh", "-c", "cat /tmp/kept /opt/tools/hello; echo $A"
    )
    assert result.stdout == b"kept\nhello from the toolkit\nb\n"
    after = await info_of(node, created.sandbox_id)
    for name in ("state", "created_at", "layers", "limits", "labels", "expires_at"):
        assert getattr(after, name) == getattr(before, name), name
    assert set(processes) <= set(processes_of(local_of(created.sandbox_id)))
    await node.until(lambda: node.heartbeats[-1].lease_ids == ("lease-1",))
    # A heartbeat of the new daemon that did not name the lease would have it released.
    epoch = node.heartbeats[-1].epoch
    assert all(beat.lease_ids for beat in node.heartbeats if beat.epoch == epoch)
    assert node.heartbeats[-1].allocated.sandboxes == 1
    deleted = await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    assert deleted.end_cause is EndCause.DELETED
    assert processes_of(local_of(created.sandbox_id)) == []
    ends = [event for event in node.events if isinstance(event, SandboxEnded)]
    assert [event.cause for event in ends] == [EndCause.DELETED] * len(ends)


async def test_a_stop_for_an_upgrade_keeps_the_sandboxes_and_an_ordinary_one_ends_them(
    both: Both,
) -> None:
    daemon, node = both
    created = await node.place()
    await node.exec(created.sandbox_id, "sh", "-c", "echo kept > /tmp/kept")
    assert await daemon.end(signal.SIGUSR2) == 0
    assert processes_of(local_of(created.sandbox_id))
    await daemon.start(stop_keeps_sandboxes="true")
    assert (await node.exec(created.sandbox_id, "cat", "/tmp/kept")).stdout == b"kept\n"
    assert await daemon.end(signal.SIGTERM) == 0
    assert processes_of(local_of(created.sandbox_id))
    await daemon.start()
    assert (await node.exec(created.sandbox_id, "cat", "/tmp/kept")).stdout == b"kept\n"
    assert await daemon.end(signal.SIGTERM) == 0
    assert processes_of(local_of(created.sandbox_id)) == []
    await daemon.start()
    ended = await info_of(node, created.sandbox_id)
    assert (ended.state, ended.end_cause) == (SandboxState.ENDED, EndCause.NODE_RESTARTED)


async def test_who_dies_while_the_daemon_is_away_ends_with_a_cause(both: Both) -> None:
    daemon, node = both
    dead, alive = await node.place(), await node.place()
    await daemon.kill()
    kill_process(processes_of(local_of(dead.sandbox_id))[0])
    await daemon.start()
    error = await refused(node.exec(dead.sandbox_id, "true"))
    assert error.code is ErrorCode.EXPIRED
    info = await info_of(node, dead.sandbox_id)
    assert info.end_cause is EndCause.NODE_RESTARTED
    assert "PID 1" in info.end_detail
    ended = await node.event_of(dead.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.NODE_RESTARTED
    assert (await node.exec(alive.sandbox_id, "echo", "alive")).stdout == b"alive\n"


async def test_the_agents_socket_is_at_its_place_again(both: Both) -> None:
    daemon, node = both
    created = await node.place()
    await daemon.kill()
    await daemon.start()
    listed = await node.exec(created.sandbox_id, "ls", "/run/dsec")
    assert listed.stdout == b"agent.sock\n"
    directory = Path(node.config.run_directory) / "s" / local_of(created.sandbox_id)
    _, writer = await connect_to_agent_socket(directory)
    writer.close()
    await writer.wait_closed()


async def test_a_killed_spawner_costs_nothing_but_the_creations_under_way(both: Both) -> None:
    daemon, node = both
    created = await node.place()
    kill_process(daemon.spawner_pid())
    assert (await node.exec(created.sandbox_id, "echo", "alive")).stdout == b"alive\n"
    outcomes = [await outcome(node.place()) for _ in range(3)]
    assert all(it.retryable for it in outcomes if isinstance(it, DsecError))
    another = next(it for it in outcomes if not isinstance(it, DsecError))
    assert (await node.exec(another.sandbox_id, "echo", "new")).stdout == b"new\n"


@pytest.mark.parametrize("seed", range(4))
async def test_kill_9_at_any_moment_of_a_load_leaves_each_sandbox_alive_or_ended(
    tmp_path: Path, layers: Path, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311  no secret
    made: list[str] = []
    deleted: list[str] = []
    told: dict[ErrorCode, str] = {}
    stop = False

    async def user(node: NodeForTests) -> None:
        while not stop:
            try:
                created = await node.place(valid_s=5.0)
                made.append(created.sandbox_id)
                await node.exec(created.sandbox_id, "true")
                if len(made) - len(deleted) > ALIVE_AT_ONCE_MAX or chance.random() < 0.6:
                    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
                    deleted.append(created.sandbox_id)
            except DsecError as error:
                told[error.code] = error.message
                await asyncio.sleep(0.05)

    async with daemon_for_tests(tmp_path, layers, ended_kept_s=3600.0) as (daemon, node):
        node.patience_s = 4.0
        users = [asyncio.create_task(user(node)) for _ in range(3)]
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.05, 0.6))
            await daemon.kill()
            await daemon.start()
        stop = True
        await asyncio.gather(*users)
        node.patience_s = 20.0
        alive = 0
        for sandbox_id in made:
            info = await info_of(node, sandbox_id)
            if sandbox_id in deleted:
                assert info.state is SandboxState.ENDED
            elif info.state is SandboxState.RUNNING:
                assert (await node.exec(sandbox_id, "echo", "alive")).stdout == b"alive\n"
                alive += 1
            else:
                # Its deletion was on the way. None whose creation was answered is lost otherwise.
                assert info.end_cause is EndCause.DELETED, info
        await node.until(lambda: node.heartbeats[-1].allocated.sandboxes >= alive)
        assert alive
        assert told.keys() <= {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT, ErrorCode.EXPIRED}, told


def strike(alive: set[str], chance: random.Random) -> str:
    """Kill PID 1 of one of the living; return whose."""
    victim = chance.choice(sorted(alive))
    alive.discard(victim)
    for pid in processes_of(local_of(victim))[:1]:
        kill_process(pid)
    return victim


async def test_kill_9_of_inits_and_spawners_under_load_ends_only_what_was_hit(
    both: Both,
) -> None:
    daemon, node = both
    chance = random.Random(7)  # noqa: S311  no secret
    told: dict[ErrorCode, str] = {}
    alive: set[str] = set()
    stop = False

    async def user() -> None:
        while not stop:
            try:
                created = await node.place(valid_s=5.0)
                alive.add(created.sandbox_id)
                await node.exec(created.sandbox_id, "true")
                if len(alive) > ALIVE_AT_ONCE_MAX or chance.random() < 0.5:
                    alive.discard(created.sandbox_id)
                    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
            except DsecError as error:
                told[error.code] = error.message

    users = [asyncio.create_task(user()) for _ in range(3)]
    hit: set[str] = set()
    for turn in range(30):
        await asyncio.sleep(0.05)
        if turn % 10 == 9:
            kill_process(daemon.spawner_pid())
        elif alive:
            hit.add(strike(alive, chance))
    stop = True
    await asyncio.gather(*users)
    # What was being made when the spawner died is refused; all else is typed by its cause.
    assert told.keys() <= {ErrorCode.UNAVAILABLE, ErrorCode.EXPIRED, ErrorCode.TIMEOUT}, told
    for sandbox_id in hit:
        info = await info_of(node, sandbox_id)
        assert info.end_cause in {EndCause.KILLED, EndCause.DELETED}, info
    for sandbox_id in sorted(alive):
        assert (await node.exec(sandbox_id, "echo", "alive")).stdout == b"alive\n"


async def test_a_daemon_that_is_killed_while_it_takes_over_costs_nothing(both: Both) -> None:
    daemon, node = both
    made = [await node.place() for _ in range(5)]
    for created in made:
        await node.exec(created.sandbox_id, "sh", "-c", "echo kept > /tmp/kept")
    await daemon.kill()
    chance = random.Random(3)  # noqa: S311  no secret
    for _ in range(6):
        await daemon.start(wait=False)
        await asyncio.sleep(chance.uniform(0.3, 1.5))
        await daemon.kill()
    await daemon.start()
    for created in made:
        kept = await node.exec(created.sandbox_id, "cat", "/tmp/kept")
        assert kept.stdout == b"kept\n"
    await node.until(lambda: node.heartbeats[-1].allocated.sandboxes == len(made))


@pytest.mark.parametrize("step", ["recover", "subscribe"])
async def test_a_start_that_fails_ends_no_sandbox(both: Both, step: str) -> None:
    daemon, node = both
    created = await node.place()
    await daemon.kill()
    service = node.make_service()
    real = getattr(service, step)

    async def fail() -> None:
        await real()
        service._subscribed = False  # as if it had come no further
        raise unavailable("NATS has gone")

    setattr(service, step, fail)
    with pytest.raises(DsecError):
        await service.start()
    await service.stop()
    assert processes_of(local_of(created.sandbox_id))
    await daemon.start()
    assert (await node.exec(created.sandbox_id, "echo", "alive")).stdout == b"alive\n"


async def test_a_daemon_that_fails_while_it_runs_ends_no_sandbox(both: Both) -> None:
    daemon, node = both
    created = await node.place()
    await daemon.kill()
    service = node.make_service()
    await service.start()
    service.fail(OSError("no descriptor is left"))
    assert await service.stop() == 1
    assert processes_of(local_of(created.sandbox_id))
    await daemon.start()
    assert (await node.exec(created.sandbox_id, "echo", "alive")).stdout == b"alive\n"
