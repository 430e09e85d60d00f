"""Contracts in force in real sandboxes, through SDK and command line."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from dsec import DsecError, ErrorCode, SandboxState
from dsec_common.asdl.reading import json_schema
from dsec_common.wire.dag import StepState
from dsec_common.wire.sandbox import MIB, EndCause
from stack import Stack

GREEDY = "import mmap; mmap.mmap(-1, 200 << 20).write(b'x' * (200 << 20))"


async def test_a_sandbox_has_the_memory_and_the_network_of_its_contract(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(
        "name: reader\nversion: 1\n"
        "capabilities: [{tool: files, permissions: [read_file]}]\n"
        "resources: {memory_mb: 64}\n"
    )
    async with stack.client() as client:
        async with await client.create_sandbox(base, contract=path) as sandbox:
            info = await sandbox.inspect()
            assert (info.agent, info.limits.memory_bytes) == ("reader", 64 * MIB)
            assert (await sandbox.exec(["python3", "-c", GREEDY])).oom
            links = await sandbox.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1", check=True)
            assert links.stdout_text.split() == ["lo"]
        for more in ({"network": "open"}, {"memory_bytes": 65 * MIB}):
            with pytest.raises(DsecError, match="contract of reader does not allow") as caught:
                await client.create_sandbox(base, contract=path, **more)
            assert caught.value.code is ErrorCode.DENIED


@pytest.mark.usefixtures("router")
async def test_the_permission_of_a_contract_lets_an_instance_out(stack: Stack, base: str) -> None:
    name = f"caller-{uuid.uuid4().hex[:8]}"
    contract: dict[str, Any] = {
        "capabilities": [{"tool": "http_client", "permissions": ["network_access"]}],
        "network": {"allow": ["10.0.0.0/8"]},
        "layers": {"base": base},
    }
    async with stack.client() as client:
        await client.agents.register(name, "1", contract=contract)
        async with await client.create_sandbox(agent=name) as sandbox:
            told = await sandbox.network.inspect()
            assert [rule.cidr for rule in told.policy.allow] == ["10.0.0.0/8"]
            assert told.addresses
        await client.agents.revoke(name, ["network_access"])
        async with await client.create_sandbox(agent=name) as sandbox:
            assert (await sandbox.network.inspect()).policy.allow == ()


async def test_a_command_ends_with_its_contracts_time_and_tells_what_it_printed(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client:
        result = await client.run(
            base, "echo begun; sleep 60", contract={"lifecycle": {"timeout": "300ms"}}
        )
        assert (result.timed_out, result.stdout_text) == (True, "begun\n")


async def test_an_instance_ends_with_its_contracts_time(stack: Stack, base: str) -> None:
    name = f"brief-{uuid.uuid4().hex[:8]}"
    contract = {"lifecycle": {"timeout": "500ms", "graceful_shutdown": False}}
    async with stack.client() as client:
        await client.agents.register(name, "1", contract=contract, base=base)
        sandbox = await client.create_sandbox(agent=name, ttl_s=600)
        async with asyncio.timeout(20):
            while (info := await sandbox.inspect()).state is not SandboxState.ENDED:
                await asyncio.sleep(0.05)
        assert (info.state, info.end_cause) == (SandboxState.ENDED, EndCause.EXPIRED)


async def test_a_step_is_tried_as_often_as_its_contract_says(stack: Stack, base: str) -> None:
    name = f"failing-{uuid.uuid4().hex[:8]}"
    contract = {
        "input": {},
        "output": {},
        "command": ["/bin/false"],
        "lifecycle": {"retry_policy": {"max_attempts": 2, "backoff": "fixed", "jitter": 0}},
    }
    async with stack.client() as client:
        await client.agents.register(name, "1", contract=contract, base=base)
        await client.dags.register(
            {"name": name, "steps": {"only": {"agent": name, "inputs": {"*": "$"}}}}
        )
        run = await client.dags.wait((await client.dags.run(name, 1)).run_id)
        assert (run.steps["only"].state, run.steps["only"].attempts) == (StepState.FAILED, 2)


def test_the_command_line_takes_a_contract_and_lints_it(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("name: a\nversion: 1\nresources: {memory_mb: 64}\n")
    bad.write_text("name: a\nversion: 1\nresources: {memory_gb: 1}\n")
    stack.dsec("run", "--contract", str(good), base, "true")
    refused = stack.dsec(
        "run", "--contract", str(good), "--memory", "65m", base, "true", check=False
    )
    assert (refused.returncode, "does not allow" in refused.stderr) == (125, True)
    linted = stack.dsec("agent", "lint", str(good), str(bad), check=False)
    assert linted.returncode == 1
    unknown = "'memory_gb' is not known here; did you mean 'memory_mb'?"
    assert linted.stdout.splitlines() == [
        f"{good}: a 1 is a contract",
        f"{bad}:3:13: resources.memory_gb: {unknown}",
    ]
    (told,) = stack.dsec_json("agent", "lint", str(good))
    assert (told["problems"], told["terms"]["memory_bytes"]) == ([], 64 * MIB)
    assert json.loads(stack.dsec("agent", "schema").stdout) == json_schema()
