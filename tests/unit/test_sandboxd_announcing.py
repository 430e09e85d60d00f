"""What is told of sandboxes, and in which order: many that one request made are told of later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec_common.wire.base import Message
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, Limits, SandboxState
from dsec_sandboxd.admission import NodeRules
from dsec_sandboxd.announcing import Announcer
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog
from node_world import NODE, World

ROOM = Resources(cpus=8, memory_bytes=1 << 33, sandboxes=8)


def record_of(local: str, request_id: str, **changes: Any) -> SandboxRecord:
    record = SandboxRecord(
        local=local,
        project="p",
        placement_id=f"placed-{local}",
        request_id=request_id,
        state=SandboxState.RUNNING,
        created_at=1.0,
        layer_references=("base@1",),
        layer_digests=("sha256:1",),
        limits=Limits(),
    )
    return msgspec.structs.replace(record, **changes)


class Told:
    """An announcer, and in order what it tells: ``event name`` and ``step action`` by sandbox."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.events: list[tuple[str, str]] = []
        self.step_log = StepLog(NODE, self.steps)
        state = NodeState(NodeRules(node=NODE, physical=ROOM, capacity=ROOM))
        self.announcer = Announcer(state, self, self.step_log, None)  # type: ignore[arg-type]  # takes events as a publisher does

    def publish(self, subject: str, _: Message) -> None:
        local, name = subject.split(".")[-2:]
        self.events.append((local, name))

    def actions(self) -> list[tuple[str, int, str]]:
        return [(step.sandbox_id.partition(".")[2], step.seq, step.action) for step in self.steps]


def test_what_a_request_makes_in_number_is_told_of_when_it_is_asked_for() -> None:
    told = Told()
    told.announcer.hold_back("fork")
    told.announcer.running(record_of("a", "fork"))
    told.announcer.running(record_of("b", "create"))
    told.announcer.running(record_of("c", "fork"))
    assert told.events == [("b", "running")]
    for local in told.announcer.held_back("fork"):
        told.announcer.tell(local)
        told.announcer.tell(local)
    assert told.events == [("b", "running"), ("a", "running"), ("c", "running")]
    assert told.actions() == [("b", 1, "create"), ("a", 1, "create"), ("c", 1, "create")]
    told.announcer.running(record_of("d", "fork"))
    assert told.events[-1] == ("d", "running")


def test_a_sandboxs_beginning_is_told_before_anything_else_of_it() -> None:
    told = Told()
    told.announcer.hold_back("fork")
    first, second = record_of("a", "fork"), record_of("b", "fork", end_cause=EndCause.DELETED)
    told.announcer.running(first)
    told.announcer.running(second)
    told.step_log.step(first, "exec")
    told.announcer.ended(second)
    assert told.events == [("a", "running"), ("b", "running"), ("b", "ended")]
    assert told.actions() == [
        ("a", 1, "create"),
        ("a", 2, "exec"),
        ("b", 1, "create"),
        ("b", 2, "delete"),
    ]
    for local in told.announcer.held_back("fork"):
        told.announcer.tell(local)
    assert len(told.events) == 3


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.start()
    yield world
    await world.stop()
    world.memory.cleanup()


async def test_a_stop_waits_until_all_is_told(world: World) -> None:
    sandboxes = world.sandboxes
    with sandboxes.announced_later("many"):
        records = [record_of(local, "many", state=SandboxState.CREATING) for local in "abc"]
        made = await asyncio.gather(
            *(sandboxes.admit(record, (), world.clock.now() + 60) for record in records)
        )
        assert all(isinstance(record, SandboxRecord) for record in made)
        assert world.steps == []
    await sandboxes.settled()
    assert [(step.sandbox_id, step.action) for step in world.steps] == [
        (f"{NODE}.{local}", "create") for local in "abc"
    ]


async def test_one_that_a_killed_daemon_had_not_told_of_is_told_of_by_the_next(
    world: World,
) -> None:
    with world.sandboxes.announced_later("many"):
        record = record_of("a", "many", state=SandboxState.CREATING)
        await world.sandboxes.admit(record, (), world.clock.now() + 60)
        # Of this daemon nothing stays but records and sandboxes.
        world.kernel.orphan()
        world.holds = LayerHolds(world.kernel, idle_max=0)
        world.build()
        await world.sandboxes.recover()
    assert [(step.seq, step.action) for step in world.steps] == [(1, "create"), (2, "adopt")]
