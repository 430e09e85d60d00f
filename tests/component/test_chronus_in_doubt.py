"""What Chronus asked a node for, and does not know the end of, is neither lost nor done twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from chronus_parties import chronus_service
from dsec.channel import Channel
from dsec.rollouts import Rollout, Rollouts
from dsec_chronus.effects import DropCheckpoint
from dsec_chronus.leavings import Leavings
from dsec_chronus.node_asking import NodeAsking
from dsec_chronus.node_watch import NodesSeen
from dsec_chronus.records import Taken
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.clock import SystemClock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.checkpoint import RollBackRollout, RolloutRolledBack
from dsec_common.wire.layer import LayerList, ListLayers
from dsec_common.wire.rollout import StageAccepted, StageReport
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_sandboxd.kernel.linux import LinuxKernel
from dsec_sandboxd.making import Maker
from dsec_sandboxd.snapshot_taking import SnapshotMaker
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

Both = tuple[DaemonProcess, NodeForTests]
SETTINGS: dict[str, Any] = {"shards": 1, "node_lost_s": 3.0, "sweep_interval_s": 0.2}


class Held:
    """Calls of a node's method that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.begun = 0

    def hold(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """Have a method's calls wait from now on."""
        call = getattr(owner, name)

        async def held(*arguments: Any, **named: Any) -> Any:
            self.begun += 1
            await self.going.wait()
            return await call(*arguments, **named)

        monkeypatch.setattr(owner, name, held)


@pytest.fixture
async def held(node: NodeForTests) -> AsyncIterator[Held]:
    """Let all go on before the node ends."""
    held = Held()
    yield held
    held.going.set()


@pytest.fixture
def said() -> Iterator[list[EventDict]]:
    """What is logged meanwhile."""
    with capture_logs() as captured:
        yield captured
    structlog.reset_defaults()


@contextlib.asynccontextmanager
async def chronus_of(both: Both) -> AsyncIterator[Both]:
    async with chronus_service(both[1].nats, **SETTINGS):
        yield both


async def schedule(node: NodeForTests) -> None:
    """Be the scheduler: what is to be made is made on this node."""

    async def place(request: Request[CreateSandbox]) -> SandboxCreated:
        return await node.place(request.message)

    await node.scheduler.serve(subjects.sandbox_create("default"), CreateSandbox, place)


async def opened(node: NodeForTests) -> Rollout:
    return await Rollouts(Channel(node.project, "default")).open()


async def past_its_checkpoint(node: NodeForTests) -> tuple[Rollout, str]:
    """Return a rollout and its sandbox; the state at the checkpoint is ``kept``, now ``lost``."""
    rollout = await opened(node)
    sandbox = (await node.place()).sandbox_id
    await rollout.put_state({"plan": "kept"})
    await rollout.checkpoint(sandbox=sandbox)
    await rollout.put_state({"plan": "lost"})
    return rollout, sandbox


def going_back(node: NodeForTests, rollout: Rollout, key: str) -> asyncio.Future[Any]:
    """Ask once for a rollback."""
    return asyncio.ensure_future(
        node.project.request(
            subjects.rollout("default", ScopedId.parse(rollout.id), "rollback"),
            RollBackRollout(key=key),
            RolloutRolledBack,
            timeout_s=30.0,
        )
    )


async def until_in_doubt(said: list[EventDict], back: asyncio.Future[Any], times: int) -> None:
    while not back.done() and [it["event"] for it in said].count("a rollback is in doubt") < times:
        await asyncio.sleep(0.01)
    assert not back.done(), back.exception()


async def test_a_rollback_that_its_node_carries_out_late_is_recorded_and_done_once(
    node: NodeForTests,
    held: Held,
    said: list[EventDict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsec_chronus.node_actions._CREATE_S", 0.2)
    monkeypatch.setattr("dsec_chronus.node_asking.PATIENCE_S", 0.0)
    async with chronus_service(node.nats, **SETTINGS):
        rollout, sandbox = await past_its_checkpoint(node)
        held.hold(monkeypatch, Maker, "remake")
        back = going_back(node, rollout, "back")
        await until_in_doubt(said, back, 2)
        held.going.set()
        assert (await back).sandbox_id == sandbox
        assert await rollout.get_state() == {"plan": "kept"}
        assert held.begun == 1


async def test_the_next_owner_of_a_shard_finds_out_what_became_of_a_rollback(
    node: NodeForTests,
    held: Held,
    said: list[EventDict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsec_chronus.node_actions._CREATE_S", 0.2)
    async with chronus_service(node.nats, **SETTINGS):
        rollout, sandbox = await past_its_checkpoint(node)
        held.hold(monkeypatch, Maker, "remake")
        back = going_back(node, rollout, "back")
        await until_in_doubt(said, back, 1)
    assert (await refused(back)).code is ErrorCode.UNAVAILABLE
    held.going.set()
    async with chronus_service(node.nats, **SETTINGS):
        assert (await rollout.roll_back(key="back")).sandbox_id == sandbox
        assert await rollout.get_state() == {"plan": "kept"}
        assert held.begun == 1


async def test_a_rollback_in_doubt_ends_when_its_node_is_gone_and_says_so(
    tmp_path: Path, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_chronus.node_actions._CREATE_S", 0.5)
    async with daemon_for_tests(tmp_path, layers) as both, chronus_of(both) as (daemon, node):
        rollout = await opened(node)
        sandbox = (await node.place()).sandbox_id
        await rollout.checkpoint(sandbox=sandbox)
        await rollout.put_state({"plan": "going on"})
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            error = await refused(going_back(node, rollout, "back"))
            assert (error.code, error.details["node"]) == (ErrorCode.UNAVAILABLE, NODE)
            assert error.details[MAY_HAVE_HAPPENED] is True
            # The rollout is nobody's prisoner.
            await rollout.put_state({"plan": "gone on"})
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


async def test_a_sandbox_of_other_layers_than_its_checkpoint_gives_way_to_another(
    node: NodeForTests,
) -> None:
    await schedule(node)
    async with chronus_service(node.nats, **SETTINGS):
        rollout = await opened(node)
        first = (await node.place()).sandbox_id
        kept = await rollout.checkpoint(sandbox=first, durable=True)
        # As one that was made of the layer while the node had no room for the snapshot.
        again = await node.place(CreateSandbox(base=BASE, toolkits=(kept.layer,)))
        async with node.nats.service("sandboxd", NODE) as speaking:
            await speaking.request(
                subjects.rollout_system("default", ScopedId.parse(rollout.id), "report"),
                StageReport(seq=1, stage="saw", payload=None, sandbox_id=again.sandbox_id),
                StageAccepted,
            )
        back = await rollout.roll_back()
        assert back.recreated
        assert back.sandbox_id not in {first, again.sandbox_id}


async def test_a_sandbox_that_ends_by_its_rollback_gives_way_to_another(
    node: NodeForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_self: LinuxKernel, _local: str, _heir: str) -> None:
        raise DsecError(ErrorCode.INTERNAL, "told to")

    await schedule(node)
    async with chronus_service(node.nats, **SETTINGS):
        rollout = await opened(node)
        sandbox = (await node.place()).sandbox_id
        await rollout.checkpoint(sandbox=sandbox)
        monkeypatch.setattr(LinuxKernel, "replace", refuse)
        back = await rollout.roll_back()
        assert back.recreated
        assert (await rollout.inspect()).sandbox_id == back.sandbox_id != sandbox


async def test_a_snapshot_that_was_taken_twice_is_kept_once(
    node: NodeForTests, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_chronus.node_asking.ATTEMPT_S", 0.3)
    ask = Asker(node)
    async with chronus_service(node.nats, **SETTINGS), asyncio.timeout(20):
        rollout = await opened(node)
        sandbox = (await node.place()).sandbox_id
        held.hold(monkeypatch, SnapshotMaker, "take")
        making = asyncio.ensure_future(rollout.checkpoint(sandbox=sandbox))
        while held.begun < 2:
            await asyncio.sleep(0.01)
        held.going.set()
        kept = await making
        while [it.snapshot_id for it in await ask.list()] != [kept.snapshot_id]:
            await asyncio.sleep(0.05)


async def test_the_layer_of_a_node_that_is_gone_is_removed_by_another(
    node: NodeForTests,
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await Asker(node).take(sandbox)
    packed = await Asker(node).pack(taken.snapshot_id, "1")
    gone = DropCheckpoint(
        project="default",
        taken=Taken(
            snapshot_id="gone.snapshot",
            layers=(BASE,),
            layer=packed.reference,
            template=CreateSandbox(base=""),
        ),
    )
    async with node.nats.service("chronus") as bus:
        asking = NodeAsking("s0", bus, SystemClock(), lambda: True)
        leavings = Leavings("s0", asking, lambda: True, lambda _local, _snapshot: False)
        leavings.seen = NodesSeen(frozenset({"gone"}), frozenset({NODE}))
        await leavings.drop(gone)
        listed = await node.project.request(
            subjects.layer("default", NODE, "list"), ListLayers(), LayerList
        )
        assert packed.reference not in {it.reference for it in listed.layers}
        # Its node is asked for nothing while it is gone, and for the rest when it is back.
        assert leavings.nodes == {"gone"}
        assert leavings.due() == []
        leavings.seen = NodesSeen(living=frozenset({NODE, "gone"}))
        (left,) = leavings.due()
        assert isinstance(left, DropCheckpoint)
        assert (left.taken.snapshot_id, left.taken.layer) == ("gone.snapshot", "")
        assert leavings.nodes == set()


async def test_nothing_is_asked_of_nodes_for_a_shard_that_may_be_anothers(
    node: NodeForTests,
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await Asker(node).take(sandbox)
    left = DropCheckpoint(
        project="default",
        taken=Taken(snapshot_id=taken.snapshot_id, layers=(BASE,), template=CreateSandbox(base="")),
    )
    async with node.nats.service("chronus") as bus:
        asking = NodeAsking("s0", bus, SystemClock(), lambda: False)
        leavings = Leavings("s0", asking, lambda: False, lambda _local, _snapshot: False)
        await leavings.drop(left)
        assert [it.snapshot_id for it in await Asker(node).list()] == [taken.snapshot_id]
        assert leavings.due() == [left]
