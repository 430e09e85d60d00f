"""The channel that agents use: one step counts once, whatever breaks in between."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec.agent_channel
from agent_world import LOCAL, NODE, AgentWorld, agent_world, sandbox_record
from dsec.agent_channel import AgentChannel, AgentError
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES

SOURCE = Path(dsec.agent_channel.__file__)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as running:
        yield running


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[AgentChannel]:
    with AgentChannel(str(tmp_path / "agent.sock"), patience_s=20) as opened:
        yield opened


def test_it_stands_alone_in_one_file_that_old_pythons_read() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


def test_its_limits_are_the_nodes() -> None:
    assert dsec.agent_channel.PAYLOAD_MAX_BYTES == PAYLOAD_MAX_BYTES
    assert dsec.agent_channel._REQUEST_MAX_BYTES == FRAME_MAX_BYTES


async def test_it_says_hello(world: AgentWorld, channel: AgentChannel) -> None:
    about = await asyncio.to_thread(channel.hello)
    assert about["sandbox_id"] == f"{NODE}.{LOCAL}"
    assert about["last_seq"] == 0


async def test_steps_are_numbered_by_themselves(world: AgentWorld, channel: AgentChannel) -> None:
    for seq in (1, 2, 3):
        await world.gateway.give(seq, seq * 10, reward=1.0, done=seq == 3)
    answers = [await asyncio.to_thread(channel.step, "s", {"n": n}) for n in range(3)]
    assert answers[0] == {"seq": 1, "payload": 10, "reward": 1.0, "done": False}
    assert [answer["seq"] for answer in answers] == [1, 2, 3]
    assert answers[2]["done"]


async def test_a_new_process_goes_on_after_what_an_earlier_one_reported(
    world: AgentWorld, channel: AgentChannel
) -> None:
    await asyncio.to_thread(channel.report, "first", 1)
    channel.close()
    with AgentChannel(str(world.path)) as other:
        assert await asyncio.to_thread(other.report, "second", 2) == 2
    assert [stage for stage, _ in world.gateway.reports] == ["first", "second"]


async def test_feedback_may_be_waited_for_apart(world: AgentWorld, channel: AgentChannel) -> None:
    seq = await asyncio.to_thread(channel.report, "s")
    assert await asyncio.to_thread(channel.await_feedback, seq, 0.02) is None
    await world.gateway.give(seq, "go")
    answer = await asyncio.to_thread(channel.await_feedback, seq)
    assert answer is not None
    assert answer["payload"] == "go"


async def test_it_logs_with_attributes_as_text(world: AgentWorld, channel: AgentChannel) -> None:
    await asyncio.to_thread(
        lambda: channel.log(action="a", status="failed", latency_ms=3, attributes={"exit": 1})
    )
    (step,) = world.gateway.steps
    assert (step["action"], step["status"], step["latency_ms"]) == ("a", "failed", 3)
    assert step["attributes"] == {"exit": "1"}


async def test_a_refusal_is_an_error_with_its_code(
    world: AgentWorld, channel: AgentChannel
) -> None:
    await asyncio.to_thread(channel.report, "s", 1, 1)
    with pytest.raises(AgentError) as refusal:
        await asyncio.to_thread(channel.report, "s", 2, 1)
    assert refusal.value.code == "conflict"
    assert not refusal.value.retryable


@pytest.mark.parametrize(
    "payload", ["x" * (FRAME_MAX_BYTES + 1), float("nan"), {1, 2}], ids=["large", "nan", "set"]
)
def test_what_can_never_be_sent_fails_before_it_is_sent(payload: Any) -> None:
    with AgentChannel("/nowhere") as channel, pytest.raises(AgentError) as refusal:
        channel.report("s", payload, 1)
    assert refusal.value.code == "invalid"


def test_where_no_socket_is_it_says_so_after_its_patience() -> None:
    channel = AgentChannel("/nowhere", patience_s=0.1)
    with pytest.raises(AgentError, match="is this a sandbox") as refusal:
        channel.hello()
    assert refusal.value.code == "unavailable"


async def test_a_daemon_that_is_started_again_is_found_and_the_step_counts_once(
    world: AgentWorld, channel: AgentChannel
) -> None:
    stepping = asyncio.create_task(asyncio.to_thread(channel.step, "s", {"n": 1}))
    await world.gateway.reported(1)
    await world.server.close(LOCAL)
    world.path.unlink()
    await world.gateway.give(1, "go")
    await world.server.open(sandbox_record(), world.directory)
    assert (await stepping)["payload"] == "go"
    assert world.gateway.reports == [("s", {"n": 1})]


async def test_while_the_platform_is_away_a_report_waits(
    world: AgentWorld, channel: AgentChannel
) -> None:
    world.gateway.away = True
    reporting = asyncio.create_task(asyncio.to_thread(channel.report, "s", None, 1))
    await world.until_connections(1)
    world.gateway.away = False
    assert await reporting == 1


def test_answers_lost_on_the_way_are_asked_for_again_with_the_same_number(tmp_path: Path) -> None:
    """The peer takes a report and dies before it answers; the next one answers."""
    seen: list[dict[str, Any]] = []
    path = str(tmp_path / "agent.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def request_of(peer: socket.socket) -> dict[str, Any]:
        (length,) = struct.unpack(">I", peer.recv(4, socket.MSG_WAITALL))
        request: dict[str, Any] = json.loads(peer.recv(length, socket.MSG_WAITALL))
        seen.append(request)
        return request

    def serve() -> None:
        peer, _ = listener.accept()
        request_of(peer)
        peer.close()
        peer, _ = listener.accept()
        request = request_of(peer)
        early = json.dumps({"id": 99, "result": {"seq": 7, "duplicate": False}}).encode()
        body = json.dumps({"id": request["id"], "result": {"seq": 1, "duplicate": True}}).encode()
        for answer in (early, body):
            peer.sendall(struct.pack(">I", len(answer)) + answer)
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with AgentChannel(path) as channel:
        assert channel.report("s", {"n": 1}, 1) == 1
    thread.join()
    listener.close()
    first, second = ({key: value for key, value in it.items() if key != "id"} for it in seen)
    assert first == second
