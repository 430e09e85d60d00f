"""The agent socket and what it is for: reports, feedback, logs, one for each sandbox."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_world import (
    LOCAL,
    NODE,
    AgentWorld,
    MemoryGateway,
    RawAgent,
    agent_world,
    sandbox_record,
    until,
)
from dsec_common.errors import DsecError
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES
from dsec_sandboxd.agent_socket import SOCKET_NAME, AgentSocketServer
from dsec_sandboxd.step_log import PLATFORM_ACTIONS


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as running:
        yield running


class Counted:
    """Counts uses."""

    def __init__(self) -> None:
        self.open = 0
        self.seen = 0

    def began(self, local: str) -> None:
        assert local == LOCAL
        self.open += 1
        self.seen += 1

    def ended(self, local: str) -> None:
        assert local == LOCAL
        self.open -= 1


async def test_every_call_uses_the_sandbox_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    server, uses = AgentSocketServer(MemoryGateway(), NODE), Counted()
    server.count_uses(uses)
    await server.open(sandbox_record(), tmp_path)
    world = AgentWorld(server, MemoryGateway(), tmp_path)
    agent = await world.agent()
    await agent.ask("hello")
    await agent.ask("log", action="think")
    assert (uses.seen, uses.open) == (2, 0)
    await agent.send({"id": 9, "op": "await", "seq": 1, "wait_s": 30})
    await until(lambda: uses.open == 1)
    await agent.close()
    await world.close()
    assert uses.open == 0


async def test_anyone_in_the_sandbox_may_connect(world: AgentWorld) -> None:
    assert stat.S_IMODE(world.path.stat().st_mode) == 0o666


async def test_hello_says_who_the_socket_says_one_is(world: AgentWorld) -> None:
    agent = await world.agent()
    assert await agent.ask("hello", sandbox_id="n.other") == {
        "id": 1,
        "result": {
            "protocol": 1,
            "sandbox_id": f"{NODE}.{LOCAL}",
            "rollout_id": "s0.01rollout",
            "last_seq": 0,
            "tools": [],
            "payload_max_bytes": PAYLOAD_MAX_BYTES,
            "frame_max_bytes": FRAME_MAX_BYTES,
        },
    }


async def test_a_step_is_a_report_and_its_feedback(world: AgentWorld) -> None:
    agent = await world.agent()
    await agent.send({"id": "a", "op": "step", "seq": 1, "stage": "tested", "payload": {"n": [1]}})
    await world.gateway.reported(1)
    assert world.gateway.reports == [("tested", {"n": [1]})]
    await world.gateway.give(1, {"do": "x"}, reward=0.5, done=True)
    assert await agent.receive() == {
        "id": "a",
        "result": {
            "ready": True,
            "seq": 1,
            "payload": {"do": "x"},
            "reward": 0.5,
            "done": True,
        },
    }
    assert world.gateway.actions() == ["stage", "feedback"]


async def test_a_wait_that_ends_without_feedback_says_so(world: AgentWorld) -> None:
    agent = await world.agent()
    await agent.ask("report", stage="a")
    answer = await agent.ask("await", seq=1, wait_s=0.01)
    assert answer["result"] == {"ready": False, "seq": 1}


async def test_reports_without_a_number_take_the_next_one(world: AgentWorld) -> None:
    agent = await world.agent()
    for number in range(8):
        await agent.send({"id": number, "op": "report", "stage": f"s{number}"})
    answers = [await agent.receive() for _ in range(8)]
    assert sorted(answer["result"]["seq"] for answer in answers) == list(range(1, 9))
    assert len(world.gateway.reports) == 8


async def test_the_same_report_twice_is_one_and_is_logged_once(world: AgentWorld) -> None:
    agent = await world.agent()
    first = await agent.ask("report", seq=1, stage="a", payload=1)
    second = await agent.ask("report", seq=1, stage="a", payload=1)
    other = await agent.ask("report", seq=1, stage="a", payload=2)
    assert first["result"] == {"seq": 1, "duplicate": False}
    assert second["result"] == {"seq": 1, "duplicate": True}
    assert other["error"]["code"] == "conflict"
    assert world.gateway.actions() == ["stage"]


async def test_answers_come_as_they_are_ready_not_as_they_were_asked(world: AgentWorld) -> None:
    agent = await world.agent()
    await agent.send({"id": 1, "op": "step", "seq": 1, "stage": "slow", "wait_s": 60})
    await world.gateway.reported(1)
    await agent.send({"id": 2, "op": "log", "action": "meanwhile"})
    assert (await agent.receive())["id"] == 2
    await world.gateway.give(1)
    assert (await agent.receive())["id"] == 1


async def test_a_log_says_what_was_done_and_who_is_known_from_the_socket(
    world: AgentWorld,
) -> None:
    agent = await world.agent()
    answer = await agent.ask(
        "log",
        action="fetch_url",
        status="200",
        latency_ms=142.5,
        tokens_in=512,
        tokens_out=89,
        attributes={"url": "http://example.org"},
        sandbox_id="n.other",
    )
    assert answer == {"id": 1, "result": {}}
    assert world.gateway.steps == [
        {
            "local": LOCAL,
            "action": "fetch_url",
            "status": "200",
            "latency_ms": 142.5,
            "attributes": {"url": "http://example.org"},
            "tokens_in": 512,
            "tokens_out": 89,
        }
    ]


@pytest.mark.parametrize("action", sorted(PLATFORM_ACTIONS))
async def test_an_agent_cannot_write_a_step_that_is_the_platforms_own(
    world: AgentWorld, action: str
) -> None:
    agent = await world.agent()
    answer = await agent.ask("log", action=action, status="0")
    assert answer["error"]["code"] == "denied"
    assert world.gateway.steps == []
    assert (await agent.ask("log", action="mine"))["result"] == {}


async def test_without_a_rollout_only_the_log_is_there(tmp_path: Path) -> None:
    async with agent_world(tmp_path, rollout_id="") as world:
        agent = await world.agent()
        assert (await agent.ask("hello"))["result"]["rollout_id"] == ""
        assert (await agent.ask("log", action="a"))["result"] == {}
        for answer in (await agent.ask("report", stage="a"), await agent.ask("await", seq=1)):
            assert answer["error"]["code"] == "not_found"
            assert "serves no rollout" in answer["error"]["message"]


async def test_each_sandbox_has_its_own_socket(tmp_path: Path) -> None:
    gateway = MemoryGateway()
    server = AgentSocketServer(gateway, NODE)
    agents = []
    for local in ("a", "b"):
        (tmp_path / local).mkdir()
        await server.open(sandbox_record(local), tmp_path / local)
        path = str(tmp_path / local / SOCKET_NAME)
        agents.append(RawAgent(*await asyncio.open_unix_connection(path)))
    for agent in agents:
        await agent.ask("log", action="x")
    assert [step["local"] for step in gateway.steps] == ["a", "b"]
    await server.close("a")
    assert await agents[0].is_closed()
    assert (await agents[1].ask("log", action="x"))["result"] == {}
    for agent in agents:
        await agent.close()
    await server.aclose()


async def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    server = AgentSocketServer(MemoryGateway(), NODE)
    await server.open(sandbox_record(), directory)
    descriptor = os.open(directory, os.O_PATH)
    try:
        path = f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
        agent = RawAgent(*await asyncio.open_unix_connection(path))
        assert "result" in await agent.ask("hello")
        await agent.close()
    finally:
        os.close(descriptor)
        await server.aclose()


async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    server = AgentSocketServer(MemoryGateway(), NODE)
    with pytest.raises(DsecError, match="nowhere"):
        await server.open(sandbox_record(), tmp_path / "nowhere")


@pytest.mark.alone
async def test_a_listening_socket_is_made_in_a_fraction_of_a_millisecond() -> None:
    server = AgentSocketServer(MemoryGateway(), NODE)
    took_s = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs:  # as run directories are
        for number in range(200):
            directory = Path(tmpfs) / str(number)
            directory.mkdir()
            began = time.perf_counter()
            await server.open(sandbox_record(str(number)), directory)
            took_s.append(time.perf_counter() - began)
        await server.aclose()
    # The best tenth: the machine may be busy with other things.
    assert sorted(took_s)[20] < 0.000_15
