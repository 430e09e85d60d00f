"""A node's GPUs, used by processes in real sandboxes as the driver's stand-in tells of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from action_world import new_broker
from dsec_common.compute.model import CardMode, GpuDemand, Slice
from dsec_common.errors import DsecError
from dsec_common.log_meters import MeterConsumer
from dsec_common.metering import MICRO, LeaseSegment, SandboxSegment
from dsec_common.testing.kafka import KafkaForTests
from dsec_common.wire.action import ActionInfo, BeginAction, EndAction
from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxCreated, SandboxDeleted
from kafka_brokers import running
from nvml import GIB, Card, Inventory, a100, load_library
from sandbox_process import process_in
from sandboxd_node import BASE, NODE, NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

CARD = f"GPU-{NODE}"
SLICE = Slice(card=CARD, kind=CardMode.WHOLE, cu=100.0)
NULL = os.makedev(1, 3)
PATIENCE_S = 1.0
HANGS = "GetProcessUtilization"


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaForTests]:
    with running("embedded") as broker:
        yield broker


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    load_library()
    found = Inventory(tmp_path / "gpus")
    monkeypatch.setenv("NVML_STAND_IN", str(found.path))
    found.write([card()])
    return found


def card(**fields: object) -> Card:
    return a100(0, uuid=CARD, **fields)


@pytest.fixture
async def node(
    inventory: Inventory, tmp_path: Path, layers: Path, kafka: KafkaForTests
) -> AsyncIterator[NodeForTests]:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, NULL)
    async with node_for_tests(
        tmp_path,
        layers,
        kafka_bootstrap=kafka.bootstrap_servers,
        gpu_device_directory=str(devices),
        gpu_interval_s=0.05,
        gpu_patience_s=PATIENCE_S,
    ) as node:
        yield node
    inventory.write([])  # who still waits for the driver need not any longer


async def busy(node: NodeForTests, created: SandboxCreated) -> tuple[int, asyncio.Task[object]]:
    """Have a sandbox run something; return its process and the task that waits for it."""
    task = asyncio.create_task(node.exec(created.sandbox_id, "sh", "-c", "sleep 600"))
    async with asyncio.timeout(20):
        while (process := process_in(created.sandbox_id)) is None:
            await asyncio.sleep(0.01)
    return process, task


async def last_told(kafka: KafkaForTests, *ids: str) -> list[SandboxSegment | LeaseSegment]:
    """Return the last segments of sandboxes and leases."""
    found: dict[str, SandboxSegment | LeaseSegment] = {}
    async with MeterConsumer(kafka.config) as records, asyncio.timeout(30):
        async for record in records:
            if isinstance(record, SandboxSegment | LeaseSegment) and record.last:
                of = record.sandbox_id if isinstance(record, SandboxSegment) else record.lease_id
                assert of not in found
                found[of] = record
            if found.keys() >= set(ids):
                return [found[one] for one in ids]
    raise AssertionError


async def used_by(kafka: KafkaForTests, *sandbox_ids: str) -> list[SandboxSegment]:
    """Return the last segments of sandboxes."""
    told = await last_told(kafka, *sandbox_ids)
    return [segment for segment in told if isinstance(segment, SandboxSegment)]


async def told(node: NodeForTests, processes: int) -> None:
    """Return once the node has read the cards with so many processes, and once more."""
    for _ in range(2):
        node.heartbeats.clear()
        await node.until(
            lambda: any(
                reading.processes == processes
                for heartbeat in node.heartbeats
                for reading in heartbeat.gpu_readings
            )
        )


async def delete(node: NodeForTests, created: SandboxCreated, task: asyncio.Task[object]) -> None:
    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    await asyncio.gather(task, return_exceptions=True)


async def test_what_a_sandbox_s_process_does_on_a_card_is_in_its_record_and_no_other_s(
    node: NodeForTests, inventory: Inventory, kafka: KafkaForTests
) -> None:
    created = await node.place(lease_id=f"{NODE}.lease", slices=(SLICE,))
    other = await node.place()
    pid, task = await busy(node, created)
    other_pid, other_task = await busy(node, other)
    inventory.write(
        [
            card(
                processes=f"{pid}:{GIB},{os.getpid()}:{GIB},{other_pid}:{GIB}",
                utilisation=f"{pid}:10,{os.getpid()}:80,{other_pid}:10",
            )
        ]
    )
    await told(node, 3)
    await delete(node, created, task)
    await delete(node, other, other_task)
    mine, others = await used_by(kafka, created.sandbox_id, other.sandbox_id)
    assert mine.gpu_memory_byte_ms is not None
    assert mine.cu_used_micro_ms is not None
    assert 0 < mine.gpu_memory_byte_ms <= GIB * mine.lasted_ms
    # A tenth of the card, and the driver's first sample is of up to a second before it.
    assert 0 < mine.cu_used_micro_ms <= 10 * MICRO * (mine.lasted_ms + 1000)
    assert others.gpu_memory_byte_ms is None
    assert others.cu_used_micro_ms is None
    assert (others.gpu_memory_unknown_ms, others.cu_used_unknown_ms) == (0, 0)


async def test_what_an_action_held_and_used_is_told_once_of_its_sandbox_and_agent(
    node: NodeForTests, inventory: Inventory, kafka: KafkaForTests, tmp_path: Path
) -> None:
    broker = {"kafka_bootstrap": kafka.bootstrap_servers, "state_directory": str(tmp_path / "b")}
    asked = BeginAction(name="train", gpu=GpuDemand(min_cu=100, max_cu=100), hold_s=0)
    async with new_broker(node, **broker):
        created = await node.place(CreateSandbox(base=BASE, agent="crawler"))
        async with asyncio.timeout(20):
            while True:  # until the broker knows of the card
                with contextlib.suppress(DsecError):
                    await node.ask(created.sandbox_id, "begin_action", asked, ActionInfo)
                    break
                await asyncio.sleep(0.05)
        pid, task = await busy(node, created)
        inventory.write([card(processes=f"{pid}:{GIB}", utilisation=f"{pid}:10")])
        await told(node, 1)
        end = EndAction(action_id=asked.message_id)
        await node.ask(created.sandbox_id, "end_action", end, ActionInfo)
        await delete(node, created, task)
    used, held = await last_told(kafka, created.sandbox_id, f"{NODE}.{asked.message_id}")
    assert isinstance(used, SandboxSegment)
    assert isinstance(held, LeaseSegment)
    assert (used.project, used.agent, used.lease_id) == ("default", "crawler", "")
    assert used.cu_used_micro_ms is not None
    assert used.gpu_memory_byte_ms is not None
    assert 0 < used.cu_used_micro_ms <= 10 * MICRO * (used.lasted_ms + 1000)
    assert 0 < used.gpu_memory_byte_ms <= GIB * used.lasted_ms
    assert (held.project, held.agent, held.node) == ("default", "crawler", NODE)
    assert (held.number, held.cu_micro) == (1, 100 * MICRO)


async def test_a_driver_that_hangs_holds_up_no_sandbox_and_its_silence_is_told_as_unknown(
    node: NodeForTests, inventory: Inventory, kafka: KafkaForTests
) -> None:
    created = await node.place(lease_id=f"{NODE}.lease", slices=(SLICE,))
    inventory.write([card(hang=HANGS, utilisation="")])
    await node.until(lambda: node.heartbeats and not node.heartbeats[-1].gpus[0].healthy)
    assert (await node.exec(created.sandbox_id, "true")).exit_code == 0
    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    (segment,) = await used_by(kafka, created.sandbox_id)
    assert segment.measured
    assert 0 < segment.gpu_memory_unknown_ms <= segment.lasted_ms
    assert 0 < segment.cu_used_unknown_ms <= segment.lasted_ms
    # The fixture stops the daemon while the driver still hangs.


async def test_a_node_without_a_sandbox_on_its_cards_asks_nobody_how_busy_they_are(
    node: NodeForTests, inventory: Inventory
) -> None:
    await node.place()
    inventory.write([card(hang=HANGS, utilisation="", processes="1:1")])
    await told(node, 1)
    assert node.heartbeats[-1].gpus[0].healthy
