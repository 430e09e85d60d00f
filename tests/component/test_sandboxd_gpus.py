"""A real daemon whose driver's library is a stand-in: what a lease's slices are in a sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common import subjects
from dsec_common.compute.model import CardMode, GpuDemand, Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.elastic import LeaseResized, ResizeLease
from dsec_common.wire.lease import LeaseRevoked, RevokeLease
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    InspectSandbox,
    SandboxEnded,
    SandboxInfo,
)
from nvml import GIB, Inventory, a100, environment, l40
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests, processes_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

SHARED, CUT, WHOLE, SPARE = (f"GPU-{os.getpid()}-{index}" for index in range(4))
INSTANCE, UNNAMED = f"MIG-{os.getpid()}-a", f"MIG-{os.getpid()}-b"
A_THIRD = Slice(card=SHARED, percent=34, cu=34.0, memory_bytes=13 * GIB)
AN_INSTANCE = Slice(card=CUT, kind=CardMode.MIG, mig_uuid=INSTANCE, cu=300 / 7)
A_CARD = Slice(card=WHOLE, kind=CardMode.WHOLE, cu=65.0)
LEASE = f"{NODE}.a-lease"
DEVICES = {"nvidia0": "zero", "nvidia1": "full", "nvidia2": "random"}
"""What stands in for the driver's files; the last card has none."""

Gpus = tuple[DaemonProcess, NodeForTests, Inventory]


@pytest.fixture
async def gpus(tmp_path: Path, layers: Path) -> AsyncIterator[Gpus]:
    """Yield a node with a card for slices, one that is cut, and two that are given whole."""
    inventory = Inventory(tmp_path / "gpus")
    cut = a100(1, uuid=CUT, mig=1, slices=7)
    cut.instance(INSTANCE, "3g.20gb", 20 * GIB, 3)
    cut.instance(UNNAMED, "1g.5gb", 5 * GIB, 1)
    inventory.write([a100(0, uuid=SHARED), cut, l40(2, uuid=WHOLE), l40(3, uuid=SPARE)])
    devices = tmp_path / "dev"
    (devices / "nvidia-caps").mkdir(parents=True)
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").write_text("of the daemon\n")
    for name, device in {**DEVICES, "nvidiactl": "null", "nvidia-uvm": "null"}.items():
        (devices / name).symlink_to(f"/dev/{device}")
    (devices / "nvidia-caps" / "nvidia-cap3").symlink_to("/dev/urandom")
    async with daemon_for_tests(
        tmp_path,
        layers,
        environment=environment(inventory.path),
        flags={
            "gpu-device-directory": devices,
            "gpu-devices": f"{INSTANCE}=nvidia-caps/nvidia-cap3",
            "gpu-mps-directory": tmp_path / "mps",
            "gpu-interval-s": 0.1,
        },
    ) as (daemon, node):
        await node.until(lambda: any(beat.gpus for beat in node.heartbeats))
        yield daemon, node, inventory


async def place(node: NodeForTests, *slices: Slice, lease_id: str = LEASE) -> str:
    demand = GpuDemand(min_cu=sum(it.cu for it in slices), max_cu=sum(it.cu for it in slices))
    created = await node.place(
        CreateSandbox(base=BASE, gpu=demand), lease_id=lease_id, slices=slices
    )
    return created.sandbox_id


async def variables(node: NodeForTests, sandbox_id: str, **told: str) -> dict[str, str]:
    """Return those of a command that have to do with GPUs."""
    result = await node.exec(sandbox_id, "env", env=told)
    assert result.exit_code == 0
    pairs = (line.split("=", 1) for line in result.stdout.decode().splitlines())
    return {name: value for name, value in pairs if "CUDA" in name or "NVIDIA" in name}


async def cards(node: NodeForTests, sandbox_id: str) -> list[str]:
    """Return the driver's devices that a sandbox has."""
    command = "cd /dev; find . -name 'nvidia*' -type c | sort"
    result = await node.exec(sandbox_id, "sh", "-c", command)
    return [line.removeprefix("./") for line in result.stdout.decode().split()]


async def reads(node: NodeForTests, sandbox_id: str, device: str) -> bool:
    """Return whether a sandbox can read a device."""
    result = await node.exec(sandbox_id, "head", "-c", "1", f"/dev/{device}")
    return (result.exit_code, len(result.stdout)) == (0, 1)


async def revoke(node: NodeForTests, lease_id: str = LEASE) -> None:
    message = RevokeLease(lease_id=lease_id, reason="its lease was unlocked by force: stuck")
    await node.scheduler.request(subjects.node_request(NODE, "revoke"), message, LeaseRevoked)


async def lives(node: NodeForTests, sandbox_id: str) -> SandboxInfo:
    return await node.ask(sandbox_id, "inspect", InspectSandbox(), SandboxInfo)


async def test_a_part_of_a_card_is_its_device_and_the_variables_that_mps_obeys(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, A_THIRD)
    assert await variables(node, sandbox_id, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100") == {
        "CUDA_VISIBLE_DEVICES": SHARED,
        "NVIDIA_VISIBLE_DEVICES": SHARED,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "34",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={13 * 1024}M",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/dsec/mps",
    }
    assert await cards(node, sandbox_id) == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert await reads(node, sandbox_id, "nvidia0")
    pipe = await node.exec(sandbox_id, "cat", "/run/dsec/mps/control")
    assert pipe.stdout == b"of the daemon\n"


async def test_a_whole_card_needs_no_mps(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, A_CARD)
    assert await variables(node, sandbox_id) == {
        "CUDA_VISIBLE_DEVICES": WHOLE,
        "NVIDIA_VISIBLE_DEVICES": WHOLE,
    }
    assert await cards(node, sandbox_id) == ["nvidia-uvm", "nvidia2", "nvidiactl"]
    assert (await node.exec(sandbox_id, "test", "-e", "/run/dsec/mps")).exit_code == 1


async def test_a_mig_instance_is_its_card_and_its_own_capability(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, AN_INSTANCE)
    assert await variables(node, sandbox_id) == {
        "CUDA_VISIBLE_DEVICES": INSTANCE,
        "NVIDIA_VISIBLE_DEVICES": INSTANCE,
    }
    assert await cards(node, sandbox_id) == [
        "nvidia-caps/nvidia-cap3",
        "nvidia-uvm",
        "nvidia1",
        "nvidiactl",
    ]
    assert await reads(node, sandbox_id, "nvidia-caps/nvidia-cap3")


async def test_a_sandbox_without_a_lease_sees_no_card_and_can_make_none(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = (await node.place()).sandbox_id
    assert await variables(node, sandbox_id) == {}
    assert await cards(node, sandbox_id) == []
    made = await node.exec(
        sandbox_id, "sh", "-c", "mknod /tmp/nvidia0 c 1 5 && head -c 1 /tmp/nvidia0"
    )
    assert made.exit_code != 0
    assert made.stdout == b""


async def test_a_lease_that_is_revoked_ends_its_sandbox_with_the_cause_and_no_other(
    gpus: Gpus,
) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, A_THIRD)
    other = await place(node, A_CARD, lease_id=f"{NODE}.another")
    local = sandbox_id.partition(".")[2]
    await node.until(lambda: LEASE in node.heartbeats[-1].lease_ids)
    await revoke(node)
    await revoke(node)
    ended = await node.event_of(sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.LEASE_LOST
    assert ended.detail == "its lease was unlocked by force: stuck"
    await node.until(lambda: LEASE not in node.heartbeats[-1].lease_ids)
    assert processes_of(local) == []
    gone = await refused(node.exec(sandbox_id, "true"))
    assert (gone.code, gone.details["end_cause"]) == (ErrorCode.EXPIRED, "lease_lost")
    assert (await node.exec(other, "true")).exit_code == 0
    assert node.heartbeats[-1].lease_ids == (f"{NODE}.another",)


async def test_a_sandbox_whose_lease_is_revoked_after_the_daemon_was_killed_ends_too(
    gpus: Gpus,
) -> None:
    daemon, node, _ = gpus
    sandbox_id = await place(node, A_THIRD)
    await daemon.kill()
    node.heartbeats.clear()
    await daemon.start()
    await node.until(lambda: node.heartbeats)
    assert all(beat.lease_ids == (LEASE,) for beat in node.heartbeats)
    assert (await variables(node, sandbox_id))["CUDA_VISIBLE_DEVICES"] == SHARED
    await revoke(node)
    assert (await node.event_of(sandbox_id, SandboxEnded)).cause is EndCause.LEASE_LOST


async def test_a_lease_that_nobody_lives_on_is_revoked_without_harm(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, A_THIRD)
    await revoke(node, f"{NODE}.unknown")
    assert (await lives(node, sandbox_id)).end_cause is None


async def test_a_lease_that_shrinks_is_told_to_the_next_command(gpus: Gpus) -> None:
    _, node, _ = gpus
    sandbox_id = await place(node, A_THIRD)
    smaller = Slice(card=SHARED, percent=10, cu=10.0, memory_bytes=4 * GIB)
    message = ResizeLease(lease_id=LEASE, slices=(smaller,), resizes=1, reason="full")
    await node.scheduler.request(subjects.node_request(NODE, "resize"), message, LeaseResized)
    told = await variables(node, sandbox_id)
    assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
    assert told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"


async def fails(node: NodeForTests, *slices: Slice) -> DsecError:
    error = await refused(place(node, *slices))
    await node.until(lambda: node.heartbeats[-1].allocated.sandboxes == 0)
    assert node.heartbeats[-1].lease_ids == ()
    return error


async def test_what_cannot_be_enforced_is_refused_and_leaves_nothing(
    gpus: Gpus, tmp_path: Path
) -> None:
    _, node, _ = gpus
    unnamed = Slice(card=CUT, kind=CardMode.MIG, mig_uuid=UNNAMED, cu=100 / 7)
    error = await fails(node, unnamed)
    assert (error.code, UNNAMED in error.message) == (ErrorCode.UNSUPPORTED, True)
    assert "name them in gpu_devices" in error.message

    error = await fails(node, Slice(card="GPU-of-another-node", kind=CardMode.WHOLE, cu=65.0))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "this node has no GPU GPU-of-another-node" in error.message

    # The last card has no device: its driver is half installed.
    error = await fails(node, A_CARD, Slice(card=SPARE, kind=CardMode.WHOLE, cu=65.0))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "nvidia3 cannot be given to a sandbox" in error.message

    shutil.rmtree(tmp_path / "mps")
    error = await fails(node, A_THIRD)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "start nvidia-cuda-mps-control on this node" in error.message

    demand = GpuDemand(min_cu=10.0, max_cu=10.0)
    error = await refused(node.place(CreateSandbox(base=BASE, gpu=demand)))
    assert (error.code, "need a lease" in error.message) == (ErrorCode.INVALID, True)
