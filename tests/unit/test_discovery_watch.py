"""Looking after GPUs from an event loop that no driver can hold up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.nodes_file import NodeEntry
from dsec_common.testing.clock import FakeClock
from dsec_sandboxd.discovery.gpus import GpuSample
from dsec_sandboxd.discovery.watch import GpuWatch
from nvml import GIB, Inventory, a100, environment, load_library

PATIENCE_S = 1.0
WAIT_MAX_S = 30.0
CARD = f"GPU-watched-{os.getpid()}"


class Observer:
    """Is told of readings; the next one can be waited for."""

    def __init__(self) -> None:
        self.measures_use = False
        self.samples: asyncio.Queue[GpuSample] = asyncio.Queue()

    def seen(self, sample: GpuSample) -> None:
        self.samples.put_nowait(sample)


class World:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory, self.clock, self.observer = inventory, FakeClock(), Observer()
        self.watch = GpuWatch("watcher", PATIENCE_S)
        self.running: asyncio.Task[None] | None = None

    def card(self, **fields: object) -> None:
        self.inventory.write([a100(0, uuid=CARD, processes=f"41:{GIB}", utilisation="", **fields)])

    async def open(self) -> None:
        await self.watch.open(NodeEntry(), self.inventory.path.with_name("mps"))
        self.running = asyncio.create_task(self.watch.run(self.clock, 1.0, self.observer))

    async def reading(self) -> GpuSample:
        """Let a second pass, and return what is read then."""
        async with asyncio.timeout(WAIT_MAX_S):
            while not self.clock.sleeping:
                await asyncio.sleep(0.001)
            await self.clock.advance(1.0)
            return await self.observer.samples.get()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    load_library()
    world = World(Inventory(tmp_path / "gpus"))
    monkeypatch.setenv("NVML_STAND_IN", str(world.inventory.path))
    yield world
    if world.running is not None:
        world.running.cancel()
        await asyncio.wait({world.running})
    world.watch.close()
    world.inventory.write([])  # who still waits for the driver need not any longer


async def test_use_is_measured_only_while_somebody_wants_to_know(world: World) -> None:
    world.card()
    await world.open()
    (unasked,) = (await world.reading()).processes[CARD]
    world.observer.measures_use = True
    (asked,) = (await world.reading()).processes[CARD]
    assert (unasked.busy_us, asked.busy_us) == (None, 0)


async def test_a_machine_without_a_driver_reads_nothing(world: World) -> None:
    await world.open()
    assert world.running is not None
    await world.running
    assert world.watch.reason == "no NVIDIA driver: Driver Not Loaded"
    assert world.watch.sample == GpuSample()


async def test_a_card_that_falls_off_while_the_daemon_runs_is_told_of(world: World) -> None:
    world.card()
    await world.open()
    assert [gpu.healthy for gpu in world.watch.sample.gpus] == [True]
    world.card(lost=1)
    assert [gpu.healthy for gpu in (await world.reading()).gpus] == [False]


async def test_a_reading_that_hangs_makes_every_card_unhealthy_until_it_is_done(
    world: World,
) -> None:
    world.card()
    await world.open()
    world.card(hang="GetProcessUtilization")
    world.observer.measures_use = True
    hanging = await world.reading()
    assert [gpu.healthy for gpu in hanging.gpus] == [False]
    assert "does not answer" in hanging.gpus[0].reason
    assert hanging.processes == {}
    world.card()
    while not (back := await world.reading()).processes:
        assert not back.gpus[0].healthy
    assert [gpu.healthy for gpu in back.gpus] == [True]


async def test_a_driver_that_hangs_at_the_start_is_taken_in_when_it_answers(world: World) -> None:
    world.inventory.write([a100(0, uuid=CARD)], hang="GetCount")
    await world.open()
    assert world.watch.sample == GpuSample()
    assert "does not answer" in world.watch.reason
    world.card()
    assert [gpu.uuid for gpu in (await world.reading()).gpus] == [CARD]
    assert world.watch.reason == ""


def test_a_process_whose_driver_hangs_ends_all_the_same(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path / "gpus")
    inventory.write([a100(0, uuid=CARD)], hang="GetCount")
    program = """
import asyncio, pathlib, sys
from dsec_common.nodes_file import NodeEntry
from dsec_sandboxd.discovery.watch import GpuWatch

async def main():
    watch = GpuWatch("watcher", 0.1)
    await watch.open(NodeEntry(), pathlib.Path(sys.argv[1]))
    print(watch.reason)
    watch.close()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, **environment(inventory.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_MAX_S,
        check=True,
    )
    assert "does not answer" in ended.stdout
