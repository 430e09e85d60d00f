"""``dsec debug force-unlock`` against a platform with GPUs: what ends, who hears, what is free."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common import subjects
from dsec_common.bus_types import Request
from dsec_common.wire.lease import LeasesUnlocked
from nvml import Inventory, environment, l40
from stack import BASE, Stack

NODES = 2
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    cards = [l40(index, uuid=f"GPU-unlock-{os.getpid()}-{index}") for index in range(NODES)]
    inventory = Inventory(Path(tmp_path_factory.mktemp("nvml")) / "gpus")
    inventory.write(cards)
    devices = Path(tmp_path_factory.mktemp("dev"))
    for name in (*(f"nvidia{index}" for index in range(NODES)), "nvidiactl", "nvidia-uvm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    platform = Stack(Path(tmp_path_factory.mktemp("unlock")), name="u", nodes=NODES)
    nodes_file = inventory.path.with_name("nodes.yaml")
    own = zip(platform.node_names, cards, strict=True)
    nodes_file.write_text(
        json.dumps({"nodes": {name: {"only": [card["uuid"]]} for name, card in own}})
    )
    platform.more_environment = {
        **environment(inventory.path),
        "DSEC_NODES_FILE": str(nodes_file),
        "DSEC_GPU_DEVICE_DIRECTORY": str(devices),
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
def sandboxes(platform: Stack) -> Iterator[dict[str, str]]:
    """Yield a sandbox on each node's card, by node."""
    until(lambda: "2 Ready, 130 CU" in platform.dsec("node", "list").stdout)
    until(lambda: all(node["cu_allocated"] == 0 for node in nodes(platform).values()))
    made = [platform.dsec("sandbox", "create", BASE, "--cu", "65").stdout.strip() for _ in range(2)]
    yield {sandbox_id.partition(".")[0]: sandbox_id for sandbox_id in made}
    for sandbox_id in made:
        platform.dsec("sandbox", "rm", sandbox_id, check=False)


def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def nodes(platform: Stack) -> dict[str, Any]:
    return {node["heartbeat"]["node"]: node for node in platform.dsec_json("node", "list")["nodes"]}


def info(platform: Stack, sandbox_id: str) -> Any:
    return platform.dsec_json("sandbox", "inspect", sandbox_id)


def is_lost(platform: Stack, sandbox_id: str, reason: str) -> bool:
    """Return whether a sandbox has ended, and check that it says why."""
    found = info(platform, sandbox_id)
    if found["state"] != "ended":
        return False
    assert found["end_cause"] == "lease_lost"
    assert f"its lease was unlocked by force: {reason}" in found["end_detail"]
    return True


@contextlib.asynccontextmanager
async def audit(platform: Stack, node: str) -> AsyncIterator[list[LeasesUnlocked]]:
    """Yield what the project hears of leases on a node that were ended by force."""
    heard: list[LeasesUnlocked] = []

    async def on_event(request: Request[LeasesUnlocked]) -> None:
        heard.append(request.message)

    async with platform.client() as client:
        bus = client._connected().bus
        subject = subjects.lease_event("default", node, "unlocked")
        await bus.subscribe(subject, LeasesUnlocked, on_event)
        await bus.flush()
        yield heard
        async with asyncio.timeout(PATIENCE_S):
            while not heard:
                await asyncio.sleep(0.01)


def test_what_is_to_be_unlocked_has_to_be_named_and_be_there(platform: Stack) -> None:
    for arguments in ([], ["--all", "--node", platform.node_names[0]], ["--lease", "a.b", "--all"]):
        refused = platform.dsec("debug", "force-unlock", *arguments, check=False)
        assert refused.returncode == 2
        assert "name one of --all, --node and --lease" in refused.stderr
    unknown = platform.dsec("debug", "force-unlock", "--node", "nowhere", check=False)
    assert unknown.returncode != 0
    assert "no node 'nowhere' has ever sent a heartbeat" in unknown.stderr
    nothing = platform.dsec("debug", "force-unlock", "--lease", f"{platform.node_names[0]}.no")
    assert "the project holds no such lease" in nothing.stdout + nothing.stderr


async def test_the_leases_of_a_node_end_with_their_sandboxes_and_an_event_tells_of_it(
    platform: Stack, sandboxes: dict[str, str]
) -> None:
    here, there = platform.node_names
    command = ("debug", "force-unlock", "--node", here, "--reason", "a card is to be changed")
    async with audit(platform, here) as heard:
        told = await asyncio.to_thread(platform.dsec_json, *command)
    (lease,) = told["leases"]
    assert (lease["cu"], lease["lease_id"].partition(".")[0]) == (65.0, here)
    (event,) = heard
    assert [it.lease_id for it in event.leases] == [lease["lease_id"]]
    assert event.reason == "a card is to be changed"
    until(lambda: is_lost(platform, sandboxes[here], "a card is to be changed"))
    assert info(platform, sandboxes[there])["state"] == "running"
    # Its units are free for the next one.
    again = platform.dsec("sandbox", "create", BASE, "--cu", "65").stdout.strip()
    assert again.partition(".")[0] == here
    platform.dsec("sandbox", "rm", again)


async def test_one_lease_is_unlocked_by_its_id(platform: Stack, sandboxes: dict[str, str]) -> None:
    # Its id is in the event of its sandbox.
    here, there = platform.node_names
    async with platform.client() as client, client.events() as events:
        await asyncio.to_thread(platform.dsec, "sandbox", "rm", sandboxes[here])
        made = await asyncio.to_thread(platform.dsec, "sandbox", "create", BASE, "--cu", "65")
        sandbox_id = made.stdout.strip()
        async with asyncio.timeout(PATIENCE_S):
            async for event in events:
                created = getattr(event, "created", None)
                if created is not None and created.sandbox_id == sandbox_id:
                    lease_id = created.lease_id
                    break
    assert sandbox_id.partition(".")[0] == here
    command = ("debug", "force-unlock", "--lease", lease_id, "--reason", "it hangs")
    async with audit(platform, here) as heard:
        told = await asyncio.to_thread(platform.dsec, *command)
    line = told.stdout.splitlines()[-1].split()
    assert (line[0], line[-2]) == (lease_id, "65")
    assert [it.lease_id for it in heard[0].leases] == [lease_id]
    until(lambda: is_lost(platform, sandbox_id, "it hangs"))
    assert info(platform, sandboxes[there])["state"] == "running"


def test_all_of_a_project_are_unlocked_and_none_of_another(
    platform: Stack, sandboxes: dict[str, str]
) -> None:
    other = platform.dsec_json("project", "create", "others")["credentials"]
    theirs = platform.dsec("--credentials", other, "debug", "force-unlock", "--all")
    assert "the project holds no such lease" in theirs.stdout + theirs.stderr
    assert [info(platform, it)["state"] for it in sandboxes.values()] == ["running"] * NODES
    told = platform.dsec_json("debug", "force-unlock", "--all", "--reason", "a clean start")
    assert {it["lease_id"].partition(".")[0] for it in told["leases"]} == set(sandboxes)
    for sandbox_id in sandboxes.values():
        until(lambda it=sandbox_id: is_lost(platform, it, "a clean start"))
    until(lambda: all(node["cu_allocated"] == 0 for node in nodes(platform).values()))
