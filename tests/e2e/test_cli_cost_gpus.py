"""``dsec cost`` of sandboxes on a GPU: what they held, what they used, and what nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common.metering import MICRO
from dsec_common.wire.sandbox import Limits
from nvml import GIB, Card, Inventory, a100, environment
from sandbox_process import process_in
from stack import BASE, Stack

PATIENCE_S = 60.0
CARD_CU = 100


def card(**fields: object) -> Card:
    return a100(0, uuid=f"GPU-cost-{os.getpid()}", **fields)


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    found = Inventory(Path(tmp_path_factory.mktemp("nvml")) / "gpus")
    found.write([card(utilisation="")])
    return found


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, inventory: Inventory) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    devices = Path(tmp_path_factory.mktemp("dev"))
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    platform = Stack(Path(tmp_path_factory.mktemp("cost")), name="c")
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


@contextlib.asynccontextmanager
async def working(platform: Stack, agent: str) -> AsyncIterator[int]:
    """Yield a process of a sandbox on the card; end the sandbox then."""
    async with platform.client() as client:
        limits = Limits(cu=50.0)
        async with await client.create_sandbox(BASE, agent=agent, limits=limits) as sandbox:
            await sandbox.start(["sleep", "600"])
            async with asyncio.timeout(PATIENCE_S):
                while (process := process_in(sandbox.id)) is None:
                    await asyncio.sleep(0.01)
            yield process


def amounts_of(platform: Stack, agent: str) -> dict[str, Any]:
    """Return an agent's sums once a sandbox and its lease are in them."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for row in platform.dsec_json("cost")["rows"]:
            amounts: dict[str, Any] = row["amounts"]
            if row["agent"] == agent and amounts["sandboxes"] and amounts["lease_ms"]:
                return amounts
        assert time.monotonic() < deadline
        time.sleep(0.1)


def cells(platform: Stack, agent: str) -> list[str]:
    """Return an agent's line of the table, cell by cell."""
    (line,) = (it for it in platform.dsec("cost").stdout.splitlines() if f" {agent} " in it)
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


async def test_units_held_and_used_stand_beside_each_other(
    platform: Stack, inventory: Inventory
) -> None:
    async with working(platform, "trainer") as process:
        inventory.write([card(processes=f"{process}:{GIB}", utilisation=f"{process}:50")])
        await asyncio.sleep(1.0)  # what is metered is time
    amounts = amounts_of(platform, "trainer")
    assert amounts["cu_micro_ms"] == CARD_CU * MICRO * amounts["lease_ms"]
    assert amounts["lease_ms"] >= amounts["sandbox_ms"]
    assert (amounts["gpu_memory_unknown_ms"], amounts["cu_used_unknown_ms"]) == (0, 0)
    assert 0 < amounts["gpu_memory_byte_ms"] <= GIB * amounts["sandbox_ms"]
    most = CARD_CU // 2 * MICRO * (amounts["sandbox_ms"] + 1000)
    assert 0 < amounts["cu_used_micro_ms"] <= most
    used = f"{amounts['cu_used_micro_ms'] / MICRO / 3_600_000:.3f} CU h"
    assert used in cells(platform, "trainer")


async def test_what_the_driver_does_not_tell_is_not_free(
    platform: Stack, inventory: Inventory
) -> None:
    inventory.write([card()])
    async with working(platform, "silent") as process:
        inventory.write([card(processes=str(process))])
        await asyncio.sleep(1.0)  # what is metered is time
    amounts = amounts_of(platform, "silent")
    assert amounts["cu_used_micro_ms"] is None or amounts["cu_used_unknown_ms"] > 0
    assert amounts["gpu_memory_unknown_ms"] > 0
    assert sum("unknown" in cell for cell in cells(platform, "silent")) == 2
