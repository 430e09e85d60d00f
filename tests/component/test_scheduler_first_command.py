"""A first command whose answer is asked for again: told once it is known, and never run twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    ExecCommand,
    ExecResult,
    SandboxCreated,
    SandboxState,
)

COMMAND = ExecCommand(argv=("true",), timeout_s=1.0)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        yield plane


async def create(bus: Bus, **changes: Any) -> SandboxCreated:
    asked: CreateSandbox = request(command=COMMAND, **changes)
    return await bus.request(
        subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=15
    )


def tell(node: NodePeer, **changes: Any) -> None:
    """Have the node say this of its only sandbox from now on."""
    ((local, (project, info)),) = node.sandboxes.items()
    node.sandboxes[local] = (project, msgspec.structs.replace(info, **changes))


async def test_who_repeats_a_request_waits_for_the_commands_end(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    await create(user, idempotency_key="k")
    tell(node, first_command="running")
    again = asyncio.create_task(create(user, idempotency_key="k"))
    await until(lambda: node.inspected >= 2)
    assert not again.done()
    tell(
        node,
        first_command="done",
        result=ExecResult(exit_code=3, stdout=b"told"),
        files={"/out": b"kept"},
    )
    created = await again
    assert created.files == {"/out": b"kept"}
    assert created.result is not None
    assert (created.result.exit_code, created.result.stdout) == (3, b"told")
    assert len(node.placed) == 1


async def test_what_came_of_it_is_told_after_the_sandboxs_end_too(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    await create(user, idempotency_key="k")
    tell(
        node,
        state=SandboxState.ENDED,
        end_cause=EndCause.DELETED,
        first_command="done",
        result=ExecResult(exit_code=0),
    )
    assert (await create(user, idempotency_key="k")).result is not None
    assert len(node.placed) == 1


async def test_an_outcome_that_is_lost_is_said_to_be_lost_and_nothing_runs_again(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    await create(user, idempotency_key="k")
    tell(node, first_command="lost")
    created = await create(user, idempotency_key="k")
    assert created.result is None
    assert created.error is not None
    assert (created.error.code, created.error.retryable) == (ErrorCode.UNAVAILABLE, False)
    assert len(node.placed) == 1


async def test_a_command_that_does_not_end_is_not_waited_for_for_ever(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    await create(user, idempotency_key="k", timeout_s=2.0)
    tell(node, first_command="running")
    with pytest.raises(DsecError) as caught:
        await create(user, idempotency_key="k", timeout_s=2.0)
    assert caught.value.code is ErrorCode.TIMEOUT
    assert len(node.placed) == 1
