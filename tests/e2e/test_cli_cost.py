"""``dsec cost``: what sandboxes used comes through Kafka to whoever asks."""

from __future__ import annotations

import time
from typing import Any

from stack import Stack

PATIENCE_S = 60.0
COUNT = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"


def agents(stack: Stack, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = stack.dsec_json("cost", *options)
    return {(row["project"], row["agent"]): row["amounts"] for row in found["rows"]}


def until_ended(stack: Stack, agent: str, count: int, *options: str) -> dict[str, Any]:
    """Return an agent's sums once so many of its sandboxes are in it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        amounts = agents(stack, *options).get(("default", agent), {})
        if amounts.get("sandboxes", 0) >= count:
            return amounts
        assert time.monotonic() < deadline, amounts
        time.sleep(0.1)


async def test_what_sandboxes_used_is_added_up_by_agent(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        lives = []
        for _ in range(2):
            began = time.time()
            async with await client.create_sandbox(base, agent="spender") as sandbox:
                await sandbox.exec(["sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
                await sandbox.write_file("/tmp/note", b"x" * 1000)
            lives.append(time.time() - began)
    amounts = until_ended(stack, "spender", 2)
    assert 0 < amounts["sandbox_ms"] <= 1000 * sum(lives) + 2
    assert amounts["cpu_us"] > 1000
    assert amounts["memory_byte_ms"] > 0
    assert (amounts["execs"], amounts["bytes_written"], amounts["unmeasured"]) == (2, 2000, 0)
    assert stack.dsec_json("cost")["missing"] == 0


async def test_the_operator_sees_every_project_and_a_project_its_own(
    stack: Stack, base: str
) -> None:
    stack.dsec("project", "create", "thrifty")
    async with stack.client() as client, await client.create_sandbox(base, agent="seen"):
        pass
    until_ended(stack, "seen", 1, "--by", "project,agent")
    async with stack.client("thrifty") as client:
        assert (await client.cost()).rows == ()
    table = stack.dsec("cost", "--by", "project", "--since", "1h").stdout
    assert "PROJECT" in table
    assert "default" in table
    stack.dsec("project", "rm", "thrifty")


def test_what_cannot_be_meant_is_a_usage_error(stack: Stack) -> None:
    for options in (["--by", "weather"], ["--since", "yesterday"], ["--since", "5"]):
        refused = stack.dsec("cost", *options, check=False)
        assert refused.returncode == 2, refused
        assert options[1] in refused.stderr
