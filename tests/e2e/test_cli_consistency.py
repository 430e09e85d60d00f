"""State consistency from the command line: why an agent stands still is told everywhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stack import Stack

PATIENCE_S = 60.0

CONTRACT = """
name: fetcher
version: "1"
depends_on: [orders-db]
synchronise: [/bin/sh, -c, 'echo away >&2; exit 4']
"""


def behind(stack: Stack, sandbox_id: str) -> dict[str, Any]:
    """Return what is told of a sandbox once its synchronisation has failed."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        info: dict[str, Any] = stack.dsec_json("sandbox", "inspect", sandbox_id)
        if info["synchronise_error"]:
            return info
        time.sleep(0.1)
    raise AssertionError(sandbox_id)


def steps(stack: Stack, sandbox_id: str, wanted: str) -> list[dict[str, Any]]:
    """Return the sandbox's behaviour log once its last step is the wanted one."""
    until = time.monotonic() + PATIENCE_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < until:
        lines = stack.dsec("logs", "--sandbox", sandbox_id, "--json").stdout.splitlines()
        found = [json.loads(line) for line in lines]
        if found and found[-1]["action"] == wanted:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_what_an_agent_stands_still_for_is_told_wherever_one_looks(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    contract = tmp_path / "fetcher.yaml"
    contract.write_text(CONTRACT)
    stack.dsec("agent", "register", "--asdl", str(contract), "--base", base)
    created = stack.dsec_json("sandbox", "create", "--agent", "fetcher")
    sandbox_id = created["sandbox_id"]
    known = stack.dsec_json("agent", "changed", "orders-db")
    assert "orders-db" in known

    info = behind(stack, sandbox_id)
    assert (info["state"], info["synchronise_error"]) == (
        "paused",
        "exit code 4, signal None: away",
    )
    shown = stack.dsec("sandbox", "inspect", sandbox_id).stdout
    assert "is behind orders-db: synchronise to" in shown
    assert "away" in shown
    refused = stack.dsec("sandbox", "exec", sandbox_id, "--", "true", check=False)
    assert refused.returncode != 0
    assert "stands still" in refused.stderr
    asked = stack.dsec("agent", "synchronise", "fetcher", sandbox_id).stdout
    assert "away" in asked

    stack.dsec("sandbox", "rm", sandbox_id)
    told = steps(stack, sandbox_id, "delete")
    actions = [step["action"] for step in told]
    assert actions[actions.index("pause") :] == ["pause", "synchronise", "synchronise", "delete"]
    (paused,) = (step for step in told if step["action"] == "pause")
    assert paused["attributes"]["reason"] == info["behind"]
    failed = [step for step in told if step["action"] == "synchronise"]
    assert {step["status"] for step in failed} == {"failed"}

    wrong = stack.dsec("agent", "changed", "orders-db=soon", check=False)
    assert wrong.returncode == 2
    assert "Unix time in milliseconds" in wrong.stderr
