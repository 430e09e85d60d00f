"""A project that stores without end fills what is set aside for that, and no more.

JetStream holds leases, keys and policies, too: on a full disk nothing could be granted or written.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.agent import (
    PACKAGE_CHUNK_BYTES,
    AgentInfo,
    PackagePieceKept,
    RegisterAgent,
    UploadPackage,
)
from dsec_common.wire.base import Message
from dsec_common.wire.dag import DagInfo, DagRun, DagSpec, DagStep, RegisterDag, RunDag
from dsec_common.wire.sandbox import SandboxCreated

ROOM = 4 << 20
TEXT = {"type": "string"}
CONTRACT = {"input": TEXT, "output": TEXT, "command": ["/bin/cat"]}


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("evil",)) as nats, control_plane(nats) as plane:
        await plane.node("node-1")
        await plane.broker()
        await plane.scheduler(agent_packages_max_bytes=ROOM, dag_runs_max_bytes=ROOM)
        yield plane


async def ask(bus: Bus, verb: str, message: Message, reply: type[Message]) -> Message:
    return await bus.request(f"dsec.v1.evil.{verb}", message, reply)


async def assert_neighbour_is_served(plane: ControlPlane) -> None:
    neighbour = await plane.project()
    asked = request(idempotency_key="once")
    created = await neighbour.request(
        subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=10.0
    )
    assert created.node == "node-1"
    agent = RegisterAgent(name="bot", version="1", base="debian@12", contract=CONTRACT)
    assert (
        await neighbour.request("dsec.v1.default.agent.register", agent, AgentInfo)
    ).active == "1"


async def upload_without_end(bus: Bus) -> None:
    """Store pieces of packages of which none is ever registered."""
    for number in range(2 * ROOM // PACKAGE_CHUNK_BYTES):
        digest = hashlib.sha256(b"%d" % number).hexdigest()
        piece = UploadPackage(sha256=digest, index=0, data=bytes(PACKAGE_CHUNK_BYTES))
        await ask(bus, "agent.upload", piece, PackagePieceKept)


async def run_without_end(bus: Bus) -> None:
    """Begin runs whose inputs are large."""
    for number in range(2 * ROOM // PACKAGE_CHUNK_BYTES):
        run = RunDag(name="dag", input="x" * PACKAGE_CHUNK_BYTES, run_id=f"run-{number}")
        await ask(bus, "dag.run", run, DagRun)


async def test_packages_that_nobody_registers_fill_their_own_room_only(plane: ControlPlane) -> None:
    evil = await plane.project("evil")
    with pytest.raises(DsecError) as caught:
        await upload_without_end(evil)
    assert caught.value.code is ErrorCode.EXHAUSTED
    await assert_neighbour_is_served(plane)


async def test_runs_with_large_inputs_fill_their_own_room_only(plane: ControlPlane) -> None:
    evil = await plane.project("evil")
    agent = RegisterAgent(name="bot", version="1", base="debian@12", contract=CONTRACT)
    await ask(evil, "agent.register", agent, AgentInfo)
    spec = DagSpec(name="dag", input=TEXT, steps={"a": DagStep(agent="bot", inputs={"*": "$"})})
    await ask(evil, "dag.register", RegisterDag(spec=spec), DagInfo)
    with pytest.raises(DsecError) as caught:
        await run_without_end(evil)
    assert caught.value.code is ErrorCode.EXHAUSTED
    await assert_neighbour_is_served(plane)
