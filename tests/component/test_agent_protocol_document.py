"""The protocol's document is true: its code is run, and its examples are asked and answered."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

from agent_world import agent_world
from dsec_sandboxd.agent_limits import AgentLimits
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES

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


async def test_its_examples_are_answered_as_it_says_through_its_own_client(tmp_path: Path) -> None:
    asked = examples()
    assert {request["op"] for request, _ in asked} == {"hello", "report", "await", "step", "log"}
    async with agent_world(tmp_path) as world:
        await world.gateway.give(1, {"do": "x"}, reward=0.5)
        answers = await asyncio.to_thread(speak, str(world.path), [request for request, _ in asked])
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
