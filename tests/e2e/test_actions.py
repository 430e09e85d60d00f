"""Actions through the SDK and the command line, on a whole platform with a card."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.client import DSecClient
from dsec.results import CommandFailed
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.action import ActionOutcome
from nvml import Inventory, a100, environment
from refusals import refused
from stack import BASE, Stack

PATIENCE_S = 60.0
CARD = f"GPU-actions-{os.getpid()}"
#: Begins an action, says so, and waits to be killed.
OWNER = """
import asyncio, sys
from dsec import DSecClient
async def main() -> None:
    async with DSecClient() as client:
        async with client.sandbox(sys.argv[1]).action("owned", cu=40, hold_s=1.0) as action:
            await action.start(["sleep", "600"])
            print(action.id, flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    inventory = Inventory(Path(tmp_path_factory.mktemp("nvml")) / "gpus")
    inventory.write([a100(0, uuid=CARD)])
    devices = Path(tmp_path_factory.mktemp("dev"))
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    platform = Stack(Path(tmp_path_factory.mktemp("actions")), name="a")
    platform.more_environment = {
        **environment(inventory.path),
        "DSEC_GPU_DEVICE_DIRECTORY": str(devices),
        "DSEC_GPU_INTERVAL_S": "0.1",
    }
    try:
        platform.start()
        platform.import_host_base()
        yield platform
    finally:
        code = platform.stop()
    assert code == 0, platform.said()
    assert platform.leftovers() == []


@pytest.fixture
async def client(platform: Stack) -> Any:
    async with platform.client() as connected:
        yield connected


def free_cu(platform: Stack) -> float:
    (node,) = platform.dsec_json("node", "list")["nodes"]
    return float(node["cu_total"]) - float(node["cu_allocated"])


def until_free(platform: Stack, cu: float = 100.0) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while free_cu(platform) != cu:
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def test_a_block_has_units_and_then_nobody_has_them(
    platform: Stack, client: DSecClient
) -> None:
    async with await client.create_sandbox(BASE) as sandbox:
        async with sandbox.action("train", gpu=GpuDemand(min_cu=20, max_cu=20)) as action:
            told = await action.exec("echo $CUDA_VISIBLE_DEVICES; ls /dev/nvidia0", check=True)
            assert told.stdout_text.split() == [CARD, "/dev/nvidia0"]
            assert action.cu == 100.0  # without MPS a card is given whole
            other = await refused(sandbox.action("too much", cu=1.0).begin())
            assert other.code is ErrorCode.EXHAUSTED
            async with await action.session() as shell:
                assert (await shell.run("echo $CUDA_VISIBLE_DEVICES")).stdout_text.strip() == CARD
        assert action.info.outcome is ActionOutcome.OK
        until_free(platform)
        first, second = await sandbox.actions()
        assert (first.outcome, second.outcome) == (ActionOutcome.OK, ActionOutcome.REFUSED)
        assert first.asked_at <= first.began_at <= first.ended_at
        assert len(first.commands) == 2


async def test_one_that_waits_begins_when_another_has_ended(client: DSecClient) -> None:
    async with await client.create_sandbox(BASE) as sandbox:
        first = await sandbox.action("first", cu=1.0).begin()
        waiting = asyncio.create_task(sandbox.action("second", cu=1.0, wait_s=PATIENCE_S).begin())
        while len(await sandbox.actions()) < 2:
            await asyncio.sleep(0.02)
        await first.end()
        second = await waiting
        assert second.info.asked_at < first.info.ended_at <= second.info.began_at
        await second.end()


async def test_a_block_that_fails_is_told_so_with_what_went_wrong(client: DSecClient) -> None:
    async with await client.create_sandbox(BASE) as sandbox:
        with pytest.raises(CommandFailed):
            async with sandbox.action("broken") as action:
                await action.exec("exit 3", check=True)
        (told,) = await sandbox.actions()
        assert told.outcome is ActionOutcome.FAILED
        assert told.detail.startswith("CommandFailed")


async def test_a_block_whose_action_had_ended_before_says_so(client: DSecClient) -> None:
    async with await client.create_sandbox(BASE) as sandbox:
        with pytest.raises(DsecError) as caught:
            async with sandbox.action("late", timeout_s=0.3) as action:
                await (await action.start(["sleep", "600"])).wait()
        assert (caught.value.code, caught.value.details["outcome"]) == ("expired", "timeout")


async def test_long_input_goes_to_a_command_of_an_action_too(client: DSecClient) -> None:
    async with await client.create_sandbox(BASE) as sandbox:
        action = await sandbox.action("reads").begin()
        result = await action.exec("wc -c; echo $DSEC_ACTION", stdin=b"x" * 2_000_000)
        await action.end()
        assert result.stdout_text.split() == ["2000000", action.id]


def test_what_an_owner_that_is_killed_held_is_returned(platform: Stack) -> None:
    sandbox_id = platform.dsec("sandbox", "create", BASE).stdout.strip()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, sandbox_id],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "DSEC_HOME": str(platform.directory),
            "DSEC_NATS_SERVERS": ",".join(platform.context.nats_servers),
            "DSEC_NATS_CREDENTIALS": platform.context.credentials,
        },
    )
    try:
        assert owner.stdout is not None
        action_id = owner.stdout.readline().strip()
        assert free_cu(platform) == 0.0
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    until_free(platform)
    (action,) = platform.dsec_json("sandbox", "actions", sandbox_id)
    assert (action["action_id"], action["outcome"]) == (action_id, "abandoned")
    (process,) = platform.dsec_json("sandbox", "ps", sandbox_id)
    assert process["state"] == "exited"
    platform.dsec("sandbox", "rm", sandbox_id)


def test_the_behaviour_log_has_the_actions_of_a_sandbox(platform: Stack) -> None:
    sandbox_id = platform.dsec("sandbox", "create", BASE).stdout.strip()
    platform.dsec("sandbox", "action", "--name", "train", "--cu", "5", sandbox_id, "true")
    (told,) = platform.dsec_json("sandbox", "actions", sandbox_id)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = platform.dsec("logs", "--sandbox", sandbox_id, "--full", "--json").stdout
        steps = [json.loads(line) for line in lines.splitlines()]
        found = {it["action"]: it for it in steps if it["action"].startswith("action_")}
        if len(found) == 2:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    began, ended = found["action_begin"], found["action_end"]
    assert began["cause_id"] == ended["cause_id"] == told["action_id"]
    assert began["attributes"]["action_name"] == "train"
    assert ended["status"] == "ok"
    assert ended["attributes"]["cu"] == "100"
    platform.dsec("sandbox", "rm", sandbox_id)


def test_a_command_runs_as_an_action_from_the_command_line(platform: Stack) -> None:
    sandbox_id = platform.dsec("sandbox", "create", BASE).stdout.strip()
    line = 'echo $CUDA_VISIBLE_DEVICES; touch "$DSEC_ACTION_VOLUMES/scratch/x"; exit 7'
    options = ("--name", "cli", "--cu", "5", "--volume", "scratch=1MiB", "--shell")
    done = platform.dsec("sandbox", "action", *options, sandbox_id, line, check=False)
    assert (done.returncode, done.stdout.strip()) == (7, CARD)
    (told,) = platform.dsec_json("sandbox", "actions", sandbox_id)
    assert (told["name"], told["outcome"], told["cu"]) == ("cli", "failed", 100.0)
    assert [it["kind"] for it in told["acquired"]] == ["units", "volume"]
    table = platform.dsec("sandbox", "actions", sandbox_id).stdout
    assert "100 CU volume:scratch" in table
    until_free(platform)
    platform.dsec("sandbox", "rm", sandbox_id)
