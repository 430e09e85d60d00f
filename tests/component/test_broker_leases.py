"""Leases on slices, on a real NATS server: four broker processes, and force."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from control_plane import ControlPlane, control_plane, until
from dsec import DSecClient
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.streams import EVENTS
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.base import Message
from dsec_common.wire.lease import (
    UNLOCK_REASON_MAX,
    ForceUnlock,
    GrantLease,
    LeaseGranted,
    LeaseList,
    LeaseReleased,
    LeaseRevoked,
    LeasesUnlocked,
    ListLeases,
    ReleaseLease,
    RevokeLease,
    TransferLease,
)
from dsec_common.wire.node import Gpu

A100 = (Gpu(uuid="GPU-0", model="NVIDIA A100-SXM4-40GB"),)
R = TypeVar("R", bound=Message)
NODES = ("node-0", "node-1")


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


async def services_bus(plane: ControlPlane) -> Bus:
    return await plane._stack.enter_async_context(plane.nats.service("scheduler"))


async def persistently(bus: Bus, verb: str, message: Message, reply: type[R]) -> R:
    """Send the same message until some broker answers: one that was killed never will."""
    while True:
        try:
            return await bus.request(subjects.lease(verb), message, reply, timeout_s=5.0)
        except DsecError as error:
            if error.code not in {ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE}:
                raise


async def ask(bus: Bus, asked: GrantLease) -> LeaseGranted:
    return await persistently(bus, "grant", asked, LeaseGranted)


async def granted(
    bus: Bus, cu: float = 30.0, node: str = "node-0", project: str = "default"
) -> LeaseGranted:
    """Return a lease; ask until the node is known."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await ask(bus, GrantLease(project=project, holder="h", cu=cu, node=node))
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise


async def release(bus: Bus, lease: LeaseGranted) -> None:
    asked = ReleaseLease(lease_id=lease.lease_id)
    await persistently(bus, "release", asked, LeaseReleased)


async def broker_process(plane: ControlPlane, runtime: Path) -> asyncio.subprocess.Process:
    """Return a broker in a process of its own, once it is ready."""
    settings = plane.settings("broker")
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": settings["nats_servers"][0],
        "DSEC_NATS_CREDENTIALS": settings["nats_credentials"],
        "DSEC_RUNTIME_FILE": str(runtime),
        "DSEC_LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec_broker", env=environment
    )
    await until(lambda: runtime.exists() and '"running"' in runtime.read_text(), timeout_s=30)
    return process


async def ended(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_four_broker_processes_under_fire_grant_no_slice_twice(
    plane: ControlPlane, tmp_path: Path
) -> None:
    for name in NODES:
        await plane.node(name, gpus=A100)
    started = (broker_process(plane, tmp_path / str(number)) for number in range(4))
    brokers = await asyncio.gather(*started)
    plane._stack.push_async_callback(ended, brokers)
    bus = await services_bus(plane)
    for name in NODES:
        await release(bus, await granted(bus, node=name))
    held: Counter[tuple[str, str]] = Counter()
    tokens: set[tuple[str, int]] = set()
    refusals: set[ErrorCode] = set()

    async def fight(number: int) -> int:
        won = 0
        for turn in range(12):
            node = ("", *NODES)[(number + turn) % 3]
            asked = GrantLease(project="default", holder="h", cu=30.0, node=node)
            try:
                lease = await ask(bus, asked)
            except DsecError as error:
                refusals.add(error.code)
                continue
            won += 1
            assert (lease.node, lease.token) not in tokens
            tokens.add((lease.node, lease.token))
            for slice_ in lease.slices:
                held[lease.node, slice_.card] += slice_.percent
                assert held[lease.node, slice_.card] <= 100
            again = await ask(bus, asked) if node else lease
            assert (again.lease_id, again.token) == (lease.lease_id, lease.token)
            for slice_ in lease.slices:
                held[lease.node, slice_.card] -= slice_.percent
            await release(bus, lease)
        return won

    # One of them is killed in the middle of it.
    fights = asyncio.gather(*(fight(number) for number in range(16)))
    await until(lambda: len(tokens) > 10)
    brokers[0].kill()
    assert sum(await fights) > 16
    assert refusals <= {ErrorCode.EXHAUSTED}
    for name in NODES:
        # Whatever the killed one had granted was told by the others: no lease is left over.
        await release(bus, await granted(bus, 100.0, name))


async def test_a_node_with_more_slices_than_its_record_can_name_refuses_and_goes_on(
    plane: ControlPlane,
) -> None:
    cards = tuple(Gpu(uuid=f"GPU-{number}", model="NVIDIA A100") for number in range(18))
    await plane.broker()
    await plane.node("node-0", gpus=cards)
    bus = await services_bus(plane)
    leases = [await granted(bus, cu=1.0)]
    refusals: list[DsecError] = []

    async def grant() -> None:
        try:
            leases.append(await granted(bus, cu=1.0))
        except DsecError as error:
            refusals.append(error)

    for _ in range(17):
        await asyncio.gather(*(grant() for _ in range(100)))
    assert len(leases) > 1_400
    assert {(it.code, it.retryable) for it in refusals} == {(ErrorCode.EXHAUSTED, True)}
    assert all("keeps no more leases" in it.message for it in refusals)
    for lease in leases[:20]:
        await release(bus, lease)
    await granted(bus, cu=1.0)


async def test_force_ends_a_projects_leases_with_an_event_and_nobody_elses(
    plane: ControlPlane,
) -> None:
    await plane.node("node-0", gpus=A100)
    await plane.broker()
    bus = await services_bus(plane)
    await bus.ensure_stream(EVENTS)
    lease = await granted(bus)
    heard: list[LeasesUnlocked] = []

    async def on_event(request: Request[LeasesUnlocked]) -> None:
        heard.append(request.message)

    filter_subject = subjects.lease_event("default", "node-0", "unlocked")
    await bus.consume(EVENTS.name, "test", LeasesUnlocked, on_event, filter_subject=filter_subject)
    other, user = await plane.project("other"), await plane.project()
    for asked in (ForceUnlock(), ForceUnlock(lease_id=lease.lease_id)):
        theirs = await other.request(subjects.force_unlock("other"), asked, LeasesUnlocked)
        assert theirs.leases == ()
    story = ForceUnlock(node="node-0", reason="a" * (UNLOCK_REASON_MAX + 1))
    with pytest.raises(DsecError, match="257 characters is too long"):
        await user.request(subjects.force_unlock("default"), story, LeasesUnlocked)
    asked = ForceUnlock(node="node-0", reason="a ghost")
    mine = await user.request(subjects.force_unlock("default"), asked, LeasesUnlocked)
    assert [one.lease_id for one in mine.leases] == [lease.lease_id]
    await until(lambda: bool(heard))
    assert (heard[0].reason, heard[0].cause_id) == ("a ghost", asked.message_id)
    assert (await granted(bus, 100.0)).cu == 100.0


async def test_all_leases_of_a_project_end_however_many_an_answer_holds(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"node-{number}" for number in range(4)]
    for name in names:
        await plane.node(name, gpus=A100)
    await plane.broker()
    bus = await services_bus(plane)
    await bus.ensure_stream(EVENTS)
    leases = [await granted(bus, 30.0, name) for name in (*names[1:], names[1])]
    lasts = await granted(bus, 30.0, names[3], project="other")
    monkeypatch.setattr("dsec_broker.service.LISTING_PAGE_BYTES", 1)
    user = await plane.project()
    first = await user.request(subjects.force_unlock("default"), ForceUnlock(), LeasesUnlocked)
    assert {one.lease_id for one in first.leases} == {leases[0].lease_id, leases[3].lease_id}
    assert first.more
    async with DSecClient(plane.nats.server.url, plane.nats.auth.project("default")) as client:
        rest = await client.force_unlock(reason="all")
    assert [one.lease_id for one in rest.leases] == [one.lease_id for one in leases[1:3]]
    assert not rest.more
    await release(bus, lasts)
    for name in names:
        await release(bus, await granted(bus, 100.0, name))


async def test_the_node_of_a_transferred_lease_is_told_that_the_old_one_is_lost(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-0", gpus=A100)
    lost: list[str] = []

    async def on_revoke(request: Request[RevokeLease]) -> LeaseRevoked:
        lost.append(request.message.lease_id)
        node.lease_ids = ()
        return LeaseRevoked(lease_id=request.message.lease_id)

    await node.bus.serve(subjects.node_request("node-0", "revoke"), RevokeLease, on_revoke)
    await plane.broker()
    bus = await services_bus(plane)
    old = await granted(bus)
    node.lease_ids = (old.lease_id,)

    async def leases() -> LeaseList:
        return await bus.request(subjects.lease("list"), ListLeases(), LeaseList)

    asked = TransferLease(lease_id=old.lease_id, holder="another")
    # The node has named it, so a sandbox lives on it: that prolongs it.
    async with asyncio.timeout(20):
        while (await leases()).nodes[0].leases[0].expires_at <= old.expires_at:
            await node.beat()
            await asyncio.sleep(0.01)
    new = await bus.request(subjects.lease("transfer"), asked, LeaseGranted)
    assert (new.slices, new.token > old.token) == (old.slices, True)
    await until(lambda: lost == [old.lease_id])
    (known,) = (await leases()).nodes
    assert [one.lease_id for one in known.leases] == [new.lease_id]
