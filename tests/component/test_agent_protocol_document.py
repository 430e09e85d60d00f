"""The protocol's document is true: its code is run, and its examples are asked and answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import msgspec

from agent_world import AgentWorld, agent_world, sandbox_record
from dsec_common.clock import SystemClock
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.tools import NodeTools, ToolTerms
from dsec_sandboxd.agent_limits import AgentLimits
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES
from dsec_sandboxd.state_database import StateDatabase
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.rates import CallRates
from tool_names import Names

DOCUMENT = Path(__file__).parents[2] / "docs" / "agent-protocol.md"


def blocks(language: str) -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each request of the document with its answer."""
    decoder = json.JSONDecoder()
    messages = []
    for block in blocks("json"):
        rest = block.strip()
        while rest:
            message, end = decoder.raw_decode(rest)
            messages.append(message)
            rest = rest[end:].strip()
    return list(zip(messages[::2], messages[1::2], strict=True))


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as the document shows it: the wording of errors is left open."""
    if "error" in answer:
        return answer | {"error": answer["error"] | {"message": "…"}}
    return answer


def speak(path: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send requests and return their answers with the document's own client."""
    (client,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(client, str(DOCUMENT), "exec"), names)  # noqa: S102  it is what is tested
    answers = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for request in requests:
            names["send"](connection, request)
            answers.append(names["receive"](connection))
    return answers


async def run_tools(world: AgentWorld, database: StateDatabase, directory: Path) -> None:
    """Have the sandbox be of a contract with a client that may reach anything."""
    desk = ToolDesk(
        Names(),
        None,
        CallRates(database, SystemClock().monotonic),
        SystemClock(),
        network_of=lambda record: record.tools.network if record.tools else None,
        log=world.gateway.log,
    )
    world.server.run_tools(desk)
    terms = {"http_client": ToolTerms(permissions=("network_access",))}
    tools = NodeTools(terms=terms, network=NetworkPolicy(mode=NetworkMode.OPEN))
    await world.server.open(msgspec.structs.replace(sandbox_record(), tools=tools), directory)


async def test_its_examples_are_answered_as_it_says_through_its_own_client(tmp_path: Path) -> None:
    asked = examples()
    assert {request["op"] for request, _ in asked} == {
        "hello",
        "report",
        "await",
        "step",
        "log",
        "tool",
    }
    with contextlib.closing(StateDatabase(tmp_path / "rates")) as database:
        async with agent_world(tmp_path) as world:
            await run_tools(world, database, tmp_path)
            await world.gateway.give(1, {"do": "x"}, reward=0.5)
            requests = [request for request, _ in asked]
            answers = await asyncio.to_thread(speak, str(world.path), requests)
    for (request, expected), answer in zip(asked, answers, strict=True):
        assert shown(answer) == expected, request


def test_its_limits_are_those_in_force() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    limits = AgentLimits()
    for said in (
        f"{FRAME_MAX_BYTES:,} bytes",
        f"{PAYLOAD_MAX_BYTES:,} bytes of JSON",
        f"| connections of a sandbox | {limits.connections};",
        f"| unanswered requests of a connection | {limits.in_flight};",
        f"{limits.requests_per_s:,.0f} a second, {limits.burst:,} at once",
        f"frames over {limits.large_frame_bytes // 1024} KiB",
        f"{limits.large_bytes // 2**20} MiB for a sandbox",
        f"{limits.frame_timeout_s:.0f} seconds after its beginning",
        f"within {limits.write_timeout_s:.0f} seconds",
    ):
        assert said in text, said
