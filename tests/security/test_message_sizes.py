"""A project sends what is as large as the server takes: whatever comes of it, the services live.

The server closes the connection of whoever sends it more than its limit, headers included. Without
that counted, a project could make a service say too much and be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import TEXT_CHARACTERS_MAX, DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.base import Message, encode
from dsec_common.wire.node import InspectNode, ListNodes, NodeInfo, NodeList
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated

LARGEST = 1 << 20
"""What the server takes, headers included."""
HEADERS = 512
"""More than the headers of any message take."""


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("evil",)) as nats, control_plane(nats) as plane:
        await plane.node("node-1")
        await plane.broker()
        await plane.scheduler()
        yield plane


async def create(bus: Bus, project: str, asked: CreateSandbox) -> SandboxCreated:
    return await bus.request(subjects.sandbox_create(project), asked, SandboxCreated)


async def refused(bus: Bus, subject: str, asked: Message, reply: type[Message]) -> DsecError:
    with pytest.raises(DsecError) as caught:
        await bus.request(subject, asked, reply)
    return caught.value


async def assert_served(plane: ControlPlane) -> None:
    """A neighbour is answered by every service."""
    neighbour = await plane.project()
    assert (await create(neighbour, "default", request())).node == "node-1"
    listed = await neighbour.request("dsec.v1.default.node.list", ListNodes(), NodeList)
    assert [node.node for node in listed.nodes] == ["node-1"]


async def test_an_error_quotes_no_more_of_a_long_name_than_fits(plane: ControlPlane) -> None:
    evil = await plane.project("evil")
    # The name is said in the message, the details and a header: three times 400 kB.
    asked = InspectNode(node="n" * 400_000)
    error = await refused(evil, "dsec.v1.evil.node.inspect", asked, NodeInfo)
    assert error.code is ErrorCode.NOT_FOUND
    assert len(error.message) == TEXT_CHARACTERS_MAX
    await assert_served(plane)


async def test_what_grows_too_large_on_its_way_is_refused_and_ends_no_service(
    plane: ControlPlane,
) -> None:
    evil = await plane.project("evil")
    bare = len(encode(request(labels={"x": "y"})))
    reached = set()
    for length in range(LARGEST - HEADERS - bare, LARGEST - bare, 40):
        asked = request(labels={"x": "y" * length})
        reached.add((await refused(evil, subjects.sandbox_create("evil"), asked, Message)).code)
    assert reached == {ErrorCode.INVALID}
    await assert_served(plane)


async def test_a_message_at_the_limit_costs_its_sender_no_connection(plane: ControlPlane) -> None:
    user = await plane.project()
    for length in range(LARGEST - HEADERS, LARGEST + 64, 48):
        asked = InspectNode(node="n" * length)
        await refused(user, "dsec.v1.default.node.inspect", asked, NodeInfo)
        assert user.connected, length


@pytest.mark.parametrize("length", [700_000, LARGEST - HEADERS - 700])
async def test_a_node_that_tells_of_itself_without_end_hides_no_other(
    plane: ControlPlane, length: int
) -> None:
    liar = await plane.node("liar")
    liar.labels = {"long": "x" * length}
    user = await plane.project()
    async with asyncio.timeout(20):
        while True:
            listed = await user.request("dsec.v1.default.node.list", ListNodes(), NodeList)
            if {node.node for node in listed.nodes if "not shown" in str(node.notes)} == {"liar"}:
                break
    assert [node.node for node in listed.nodes] == ["liar", "node-1"]
    shown = await user.request("dsec.v1.default.node.inspect", InspectNode(node="liar"), NodeInfo)
    assert shown.heartbeat.capacity == liar.capacity
    assert (await create(user, "default", request())).node
