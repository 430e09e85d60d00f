"""Contracts at the registry: checked when they come, in force on requests for instances."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from contracts_shown import PDF_ANALYZER, WEATHER_FORECASTER
from control_plane import ControlPlane, NodePeer, control_plane, request
from dsec.agents import Agents
from dsec.channel import Channel
from dsec_common import subjects
from dsec_common.asdl.reading import read_text
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_common.wire.node import Gpu
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    ExecCommand,
    Limits,
    SandboxCreated,
)

BASE = "debian@12"
INSIDE = {"mode": "allow", "allow": [{"cidr": "10.1.0.0/16"}]}


class World:
    """A scheduler, a broker, a node with a card, and a project."""

    def __init__(self, plane: ControlPlane, node: NodePeer, user: Bus) -> None:
        self.plane = plane
        self.node = node
        self.user = user
        self.agents = Agents(Channel(user, "default"))

    async def create(self, agent: str, **fields: Any) -> CreateSandbox:
        """Create an instance and return what its node was asked for."""
        asked = request(**{"base": "", "limits": Limits(), "agent": agent, **fields})
        await self.user.request(
            subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=10
        )
        return self.node.placed[-1].request


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        await plane.broker()
        card = Gpu(uuid="GPU-1", model="NVIDIA A100", memory_bytes=80 << 30)
        node = await plane.node("gpu-1", gpus=(card,))
        await plane.scheduler()
        yield World(plane, node, await plane.project())


async def test_an_instance_has_what_its_contract_says(world: World) -> None:
    written = read_text(WEATHER_FORECASTER).written
    agent = await world.agents.register("weather_forecaster", "1.0", contract=written, base=BASE)
    assert agent.description == "Fetch weather data and generate human-readable summary"
    assert agent.versions[0].permissions == ("network_access",)
    placed = await world.create("weather_forecaster")
    assert placed.limits == Limits(memory_bytes=4096 * MIB)
    assert placed.network == NetworkPolicy(mode=NetworkMode.OPEN)
    assert placed.ttl_s == 130
    units = sum(slice_.cu for slice_ in world.node.placed[-1].slices)
    assert 15 <= units <= 45


async def test_a_contract_brings_its_layers(world: World) -> None:
    layers = {"base": "python@3.11", "workspace": "code@7", "toolkits": ["git@2"]}
    await world.agents.register("bot", "1", contract={"layers": layers})
    placed = await world.create("bot")
    assert (placed.base, placed.workspace, placed.toolkits) == (
        "python@3.11",
        "code@7",
        ("git@2",),
    )
    own = await world.create("bot", base="own@1")
    assert (own.base, own.workspace, own.toolkits) == ("own@1", "", ("git@2",))


@pytest.mark.parametrize(
    ("contract", "asked", "field"),
    [
        (
            {"resources": {"memory_mb": 64}},
            {"limits": Limits(memory_bytes=65 * MIB)},
            "limits.memory_bytes",
        ),
        ({"resources": {"max_cu": 5}}, {"limits": Limits(cu=6)}, "gpu"),
        ({"capabilities": []}, {"network": NetworkPolicy(mode=NetworkMode.OPEN)}, "network"),
        ({"network": INSIDE}, {"network": NetworkPolicy(mode=NetworkMode.OPEN)}, "network"),
    ],
)
async def test_more_than_a_contract_allows_is_denied_and_no_node_is_asked(
    world: World, contract: dict[str, Any], asked: dict[str, Any], field: str
) -> None:
    await world.agents.register("bot", "1", contract=contract, base=BASE)
    with pytest.raises(DsecError, match="contract of bot 1 does not allow") as caught:
        await world.create("bot", **asked)
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.DENIED, field)
    assert world.node.placed == []


async def test_a_command_and_a_sandbox_live_no_longer_than_the_contract_says(world: World) -> None:
    contract = {"lifecycle": {"timeout": "5s", "graceful_shutdown": False}}
    await world.agents.register("bot", "1", contract=contract, base=BASE)
    placed = await world.create("bot", ttl_s=99, command=ExecCommand(argv=("true",), timeout_s=99))
    assert placed.command is not None
    assert (placed.ttl_s, placed.command.timeout_s) == (5, 5)


async def test_each_version_has_its_own_contract(world: World) -> None:
    await world.agents.register("bot", "1", contract={"resources": {"memory_mb": 64}}, base=BASE)
    await world.agents.register("bot", "2", contract={"network": INSIDE}, base=BASE)
    first, second = await world.create("bot"), await world.create("bot", agent_version="2")
    assert (first.limits.memory_bytes, first.network) == (64 * MIB, None)
    assert second.limits == Limits()
    assert second.network == NetworkPolicy(
        mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.1.0.0/16"),)
    )


async def test_what_is_wrong_with_a_contract_is_told_at_once_and_nothing_is_registered(
    world: World,
) -> None:
    wrong = {"comand": ["x"], "resources": {"min_cu": 9, "max_cu": 1}, "lifecycle": {"timeout": 5}}
    with pytest.raises(DsecError) as caught:
        await world.agents.register("bot", "1", contract=wrong, base=BASE)
    assert caught.value.code is ErrorCode.INVALID
    assert [line.partition(": ")[2] for line in caught.value.message.splitlines()] == [
        "comand: 'comand' is not known here; did you mean 'command'?",
        "resources.min_cu: min_cu 9 is more than max_cu 1: swap them, or raise max_cu",
        "lifecycle.timeout: 5 of what? Write it as 120s, 5min or 2h",
    ]
    with pytest.raises(DsecError) as missing:
        await world.agents.inspect("bot")
    assert missing.value.code is ErrorCode.NOT_FOUND


async def test_the_same_contract_again_is_fine_and_another_one_is_a_conflict(world: World) -> None:
    written = read_text(PDF_ANALYZER).written
    for _ in range(2):
        agent = await world.agents.register("pdf_analyzer", "1.2", contract=written, base=BASE)
    assert agent.revision == 1
    with pytest.raises(DsecError) as caught:
        await world.agents.register(
            "pdf_analyzer", "1.2", contract={**written, "resources": {"memory_mb": 64}}, base=BASE
        )
    assert caught.value.code is ErrorCode.CONFLICT
