"""The agent socket against agents that are rude: the node is never harmed, others never wait."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_world import (
    LOCAL,
    AgentWorld,
    agent_world,
    answers_others,
    until,
)
from dsec_common.wire.rollout import RolloutInfo
from dsec_sandboxd.agent_limits import AgentLimits
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{}", b"null", b"\xff\xfe", b"GET / HTTP/1.1", b'{"id":1}', b"[" * 9000],
    ids=["empty", "object", "null", "no text", "http", "no op", "deep"],
)
async def test_a_frame_of_garbage_is_refused_and_the_next_one_served(
    world: AgentWorld, garbage: bytes
) -> None:
    agent = await world.agent()
    await agent.send(garbage)
    assert (await agent.receive())["error"]["code"] == "invalid"
    assert "result" in await agent.ask("hello")


@pytest.mark.parametrize("length", [FRAME_MAX_BYTES + 1, 2**31, 2**32 - 1])
async def test_an_oversize_frame_is_refused_by_its_header_and_the_connection_closed(
    world: AgentWorld, length: int
) -> None:
    agent = await world.agent()
    agent.writer.write(struct.pack(">I", length) + b"x" * 1000)
    answer = await agent.receive()
    assert answer["id"] is None
    assert answer["error"]["details"]["limit"] == FRAME_MAX_BYTES
    assert await agent.is_closed()
    await answers_others(world)


async def test_a_payload_of_exactly_the_limit_is_taken_and_one_byte_more_is_not(
    world: AgentWorld,
) -> None:
    agent = await world.agent()
    most = "x" * (PAYLOAD_MAX_BYTES - 2)
    assert "result" in await agent.ask("report", seq=1, stage="a", payload=most)
    answer = await agent.ask("report", seq=2, stage="a", payload=most + "x")
    assert answer["error"]["details"]["limit"] == PAYLOAD_MAX_BYTES


async def test_bytes_may_come_one_by_one(world: AgentWorld) -> None:
    agent = await world.agent()
    body = json.dumps({"id": 1, "op": "hello"}).encode()
    for byte in struct.pack(">I", len(body)) + body:
        agent.writer.write(bytes([byte]))
        await agent.writer.drain()
        await asyncio.sleep(0)
    assert "result" in await agent.receive()


async def test_a_frame_that_is_never_finished_is_given_up(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(frame_timeout_s=0.1)) as world:
        agent = await world.agent()
        agent.writer.write(struct.pack(">I", 200_000) + b"x")
        assert await agent.is_closed()
        await answers_others(world)


async def test_frames_that_come_one_into_another_for_long_are_no_unfinished_frame(
    tmp_path: Path,
) -> None:
    async with agent_world(tmp_path, AgentLimits(frame_timeout_s=1.0)) as world:
        agent = await world.agent()
        body = b'{"id":1,"op":"log","action":"a"}'
        frame = struct.pack(">I", len(body)) + body
        agent.writer.write(frame[:9])
        for _ in range(30):  # each write ends in the middle of the next frame
            await asyncio.sleep(0.05)
            agent.writer.write(frame[9:] + frame[:9])
            assert "result" in await agent.receive()


async def test_an_agent_that_fills_the_log_is_slowed_by_its_bytes(tmp_path: Path) -> None:
    limits = AgentLimits(requests_per_s=1000, burst=100, log_bytes_per_request=100)
    async with agent_world(tmp_path, limits) as world:
        agent = await world.agent()
        began = time.monotonic()
        for _ in range(20):
            await agent.ask("log", action="yes", attributes={"y": "y" * 2000})
        assert time.monotonic() - began > 0.2
        await answers_others(world)


async def test_an_agent_that_floods_is_slowed_not_refused(tmp_path: Path) -> None:
    limits = AgentLimits(requests_per_s=1000, burst=10)
    async with agent_world(tmp_path, limits) as world:
        agent = await world.agent()
        began = time.monotonic()
        for number in range(200):
            await agent.send({"id": number, "op": "log", "action": "flood"})
        answers = [await agent.receive() for _ in range(200)]
        assert [answer["id"] for answer in answers] == list(range(200))
        assert all("result" in answer for answer in answers)
        assert time.monotonic() - began > 0.15


async def test_a_flood_of_waits_stays_in_the_agents_own_socket(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(in_flight=4)) as world:
        agent = await world.agent()
        for number in range(50):
            await agent.send({"id": number, "op": "await", "seq": 1, "wait_s": 100})
        await until(lambda: world.gateway.waiting == 4)
        await answers_others(world)
        assert world.gateway.waiting == 4
        await world.gateway.give(1, "go")
        answers = [await agent.receive() for _ in range(50)]
        assert {answer["id"] for answer in answers} == set(range(50))


async def test_an_agent_that_reads_no_answers_is_not_read_either_and_then_dropped(
    tmp_path: Path,
) -> None:
    limits = AgentLimits(unsent_bytes=10_000, write_timeout_s=0.3)
    async with agent_world(tmp_path, limits) as world:
        await world.gateway.give(1, "x" * 200_000)
        rude = socket.socket(socket.AF_UNIX)
        rude.connect(str(world.path))
        rude.setblocking(False)
        body = json.dumps({"id": 1, "op": "await", "seq": 1}).encode()
        frame = struct.pack(">I", len(body)) + body
        await world.until_connections(1)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            for _ in range(20_000):
                rude.send(frame)
                await asyncio.sleep(0)
                if not world.server.connections:
                    break
        await world.until_connections(0)
        rude.close()
        await answers_others(world)


async def test_a_connection_beyond_the_limit_waits_until_one_closes(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(connections=1)) as world:
        first = await world.agent()
        await world.until_connections(1)
        second = await world.agent()
        await second.send({"id": 1, "op": "hello"})
        assert (await first.ask("hello"))["id"] == 1
        assert world.server.connections == 1
        await first.close()
        async with asyncio.timeout(20):
            assert "result" in await second.receive()


async def test_over_all_sandboxes_the_longest_idle_connection_makes_room(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(connections_all=2)) as world:
        first, second = await world.agent(), await world.agent()
        await first.ask("hello")
        await second.ask("hello")
        await first.ask("hello")
        third = await world.agent()
        assert "result" in await third.ask("hello")
        assert await second.is_closed()
        assert "result" in await first.ask("hello")


async def test_large_requests_under_way_are_bounded_small_ones_pass(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(large_bytes=300_000)) as world:
        one = await world.agent()
        one.writer.write(struct.pack(">I", 200_000) + b" " * 1000)
        await one.writer.drain()
        await world.until_connections(1)
        two = await world.agent()
        two.writer.write(struct.pack(">I", 200_000) + b" ")
        answer = await two.receive()
        assert answer["error"]["code"] == "exhausted"
        assert answer["error"]["retryable"]
        await answers_others(world)
        await one.close()
        await world.until_connections(0)
        three = await world.agent()
        assert "result" in await three.ask("report", stage="a", payload="x" * 200_000)


async def test_while_the_platform_is_away_the_agent_is_told_to_ask_again(
    world: AgentWorld,
) -> None:
    agent = await world.agent()
    world.gateway.away = True
    answer = await agent.ask("report", seq=1, stage="a")
    assert answer["error"]["code"] == "unavailable"
    assert answer["error"]["retryable"]
    world.gateway.away = False
    assert "result" in await agent.ask("report", seq=1, stage="a")


async def test_a_failure_of_ours_is_internal_and_tells_nothing_of_the_node(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> RolloutInfo:
        raise RuntimeError("secret of the node")

    monkeypatch.setattr(world.gateway, "inspect", broken)
    agent = await world.agent()
    answer = await agent.ask("hello")
    assert answer["error"]["code"] == "internal"
    assert "secret" not in json.dumps(answer)


async def test_an_agent_that_hangs_up_leaves_nothing_waiting(world: AgentWorld) -> None:
    agent = await world.agent()
    for number in range(3):
        await agent.send({"id": number, "op": "await", "seq": 1, "wait_s": 100})
    await until(lambda: world.gateway.waiting == 3)
    await agent.close()
    await until(lambda: world.gateway.waiting == 0)
    await world.until_connections(0)


async def test_connecting_and_hanging_up_over_and_over_leaves_nothing(tmp_path: Path) -> None:
    async with agent_world(tmp_path, AgentLimits(burst=2000)) as world:
        for number in range(300):
            agent = await world.agent()
            agent.writer.write(b"\0\0"[: number % 3])
            await agent.close()
        await world.until_connections(0)
        await answers_others(world)


async def test_descriptors_sent_to_the_daemon_do_not_stay_with_it(world: AgentWorld) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count
    rude = socket.socket(socket.AF_UNIX)
    rude.connect(str(world.path))
    rights = array.array("i", [0] * 50)
    body = b'{"id":1,"op":"hello"}'
    with contextlib.suppress(PermissionError):  # kernels that refuse it outright
        rude.sendmsg(
            [struct.pack(">I", len(body)) + body],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
        )
    await world.until_connections(1)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208  both ends of it
    rude.close()
    await world.until_connections(0)
    await answers_others(world)


async def test_closing_a_sandboxs_socket_ends_what_is_under_way(world: AgentWorld) -> None:
    agent = await world.agent()
    await agent.send({"id": 1, "op": "await", "seq": 1, "wait_s": 100})
    await until(lambda: world.gateway.waiting == 1)
    await world.server.close(LOCAL)
    assert world.gateway.waiting == 0
    assert world.server.connections == 0
    assert await agent.is_closed()
    await world.server.close(LOCAL)
