"""A create request's own command: run once, whoever asks again, and never a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.clock import SystemClock
from dsec_common.errors import ErrorCode, not_found
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    ExecCommand,
    InspectSandbox,
    SandboxState,
)
from dsec_sandboxd.kernel.interface import CommandResult
from node_world import NOTHING, World
from refusals import refused


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    made.kernel.script(
        "greet", CommandResult(exit_code=3, signal=None, stdout=b"hello", stderr=b"")
    )
    await made.start()
    yield made
    await made.stop()
    assert made.left() == NOTHING
    made.directories.close()
    made.memory.cleanup()


def asked(argv: tuple[str, ...] = ("greet",), **changes: Any) -> CreateSandbox:
    return CreateSandbox(base="base@1", command=ExecCommand(argv=argv), **changes)


def direct(message: PlaceSandbox) -> Request[PlaceSandbox]:
    """Return a placement whose caller is answered by what the handler returns."""
    return Request(
        message=message,
        subject="dsec.v1._sys.node.n1.place",
        tokens=(),
        headers={},
        reply_to="_R_.x",
        caller=ReplyAddress("_R_.x"),
        content_type="",
        traceparent="",
    )


def placement(request: CreateSandbox) -> PlaceSandbox:
    return PlaceSandbox(
        project="p", local="s1", request=request, valid_until=SystemClock().now() + 60
    )


async def answered(world: World) -> Any:
    async with asyncio.timeout(20):
        while not world.caller.answers:
            await asyncio.sleep(0)
    (answer,) = world.caller.answers
    return answer


async def test_the_scheduler_is_answered_at_once_and_the_caller_with_the_result(
    world: World,
) -> None:
    gate = world.kernel.hold("exec")
    created = await world.place(request=asked())
    assert created.result is None
    assert world.caller.answers == []
    gate.set()
    answer = await answered(world)
    assert (answer.result.exit_code, answer.result.stdout) == (3, b"hello")
    assert answer.sandbox_id == created.sandbox_id


async def test_a_command_that_cannot_be_run_is_told_beside_a_living_sandbox(world: World) -> None:
    world.kernel.script("nowhere", not_found("no such program", what="command"))
    await world.place(request=asked(("nowhere",)))
    answer = await answered(world)
    assert answer.result is None
    assert answer.error.code is ErrorCode.NOT_FOUND
    assert world.kernel.alive == ["s1"]


async def test_a_command_that_makes_no_sense_makes_no_sandbox(world: World) -> None:
    assert (await refused(world.place(request=asked(())))).code is ErrorCode.INVALID
    assert world.left() == NOTHING
    assert world.store.load() == ()


async def test_without_a_command_there_is_nothing_to_delete_after(world: World) -> None:
    request = CreateSandbox(base="base@1", delete_after=True)
    assert (await refused(world.place(request=request))).code is ErrorCode.INVALID


async def test_a_sandbox_made_for_its_command_goes_with_it(world: World) -> None:
    await world.place(request=asked(delete_after=True))
    assert (await answered(world)).result.exit_code == 3
    async with asyncio.timeout(20):
        while world.state.is_living("s1"):
            await asyncio.sleep(0)
    assert world.state.find("p", "s1").end_cause is EndCause.DELETED


async def test_the_same_placement_again_does_not_run_the_command_again(world: World) -> None:
    gate = world.kernel.hold("exec")
    message = placement(asked())
    first, second = (asyncio.create_task(world.sandboxes.place(direct(message))) for _ in range(2))
    await second
    gate.set()
    assert (await first).result is not None
    await world.sandboxes.place(direct(message))
    assert world.kernel.names().count("exec") == 1


async def test_with_a_key_the_outcome_is_told_again_until_the_record_goes(world: World) -> None:
    gate = world.kernel.hold("exec")
    placing = asyncio.create_task(
        world.sandboxes.place(direct(placement(asked(idempotency_key="k"))))
    )
    while "exec" not in world.kernel.names():
        await asyncio.sleep(0)
    inspect = world.ask("s1", InspectSandbox())
    assert (await world.sandboxes.inspect(inspect)).first_command == "running"
    gate.set()
    created = await placing
    info = await world.sandboxes.inspect(inspect)
    assert (info.first_command, info.result) == ("done", created.result)
    await world.delete()
    info = await world.sandboxes.inspect(inspect)
    assert (info.state, info.result) == (SandboxState.ENDED, created.result)


async def test_an_outcome_that_died_with_the_daemon_is_said_to_be_lost(world: World) -> None:
    record = world.store.load
    await world.place(request=asked(idempotency_key="k"))
    await answered(world)
    (kept,) = record()
    world.store.delete("s1")
    world.store.put(msgspec.structs.replace(kept, state=SandboxState.RUNNING))
    info = await world.sandboxes.inspect(world.ask("s1", InspectSandbox()))
    assert (info.first_command, info.result) == ("lost", None)


async def test_a_command_counts_as_use_and_its_sandboxs_end_ends_it(world: World) -> None:
    gate = world.kernel.hold("exec")
    await world.place(request=asked())
    while "exec" not in world.kernel.names():
        await asyncio.sleep(0)
    await world.delete()
    gate.set()
    answer = await answered(world)
    assert answer.error.code is ErrorCode.EXPIRED
