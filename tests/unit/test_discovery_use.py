"""Who uses a GPU and how much, as the driver tells it through the real binding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_sandboxd.discovery.nvml import Nvml, open_nvml
from dsec_sandboxd.discovery.use import GpuProcess, UseReader
from dsec_sandboxd.kernel.slots import FIRST_ID
from nvml import GIB, Card, Inventory, a100, load_library

CARD = "GPU-00000000"
SECOND_US = 1_000_000
NOT_SUPPORTED, UNKNOWN_ERROR = 3, 999


class World:
    """A card, and a ``/proc`` in which its processes are whose the test says."""

    def __init__(self, directory: Path) -> None:
        self.inventory = Inventory(directory / "gpus")
        self.processes = directory / "proc"
        self.nvml: Nvml | None = None

    def process(self, pid: int, user: int, name: str = "python3") -> None:
        directory = self.processes / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "comm").write_text(f"{name}\n")
        (directory / "status").write_text(f"Name:\t{name}\nUid:\t{user}\t0\t0\t0\nGid:\t0\n")

    def ends(self, pid: int) -> None:
        for name in ("comm", "status"):
            (self.processes / str(pid) / name).unlink()

    def card(self, **fields: object) -> Card:
        card = a100(0, **fields)
        self.inventory.write([card])
        return card

    def reader(self) -> UseReader:
        self.nvml = open_nvml()
        return UseReader(self.nvml, self.processes)

    def measure(self, reader: UseReader) -> dict[int, GpuProcess]:
        assert self.nvml is not None
        handle = self.nvml.ask("nvmlDeviceGetHandleByIndex", 0)
        listed = reader.running(CARD, handle)
        assert listed is not None
        return {it.pid: it for it in reader.measure(CARD, handle, listed)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    load_library()
    world = World(tmp_path)
    monkeypatch.setenv("NVML_STAND_IN", str(world.inventory.path))
    yield world
    if world.nvml is not None:
        world.nvml.close()


def busy(
    world: World, reader: UseReader, utilisation: str, **fields: object
) -> dict[int, int | None]:
    """Return for how long each process was busy when the driver says this."""
    world.card(**{"processes": "41:5,42:7", **fields}, utilisation=utilisation)
    return {pid: process.busy_us for pid, process in world.measure(reader).items()}


def test_memory_users_and_busy_times_are_each_process_s_own(world: World) -> None:
    world.process(41, FIRST_ID)
    world.process(42, FIRST_ID + 70_000)
    world.card(processes=f"41:{GIB},42:{2 * GIB}", utilisation=f"41:25:{SECOND_US}")
    assert list(world.measure(world.reader()).values()) == [
        GpuProcess(pid=41, gpu=CARD, memory_bytes=GIB, user=FIRST_ID, busy_us=250_000),
        GpuProcess(pid=42, gpu=CARD, memory_bytes=2 * GIB, user=FIRST_ID + 70_000, busy_us=0),
    ]


def test_memory_that_the_driver_does_not_tell_is_not_none_at_all(world: World) -> None:
    world.card(processes="41", utilisation="")
    assert world.measure(world.reader())[41].memory_bytes is None


def test_a_driver_that_does_not_tell_processes_leaves_them_unknown(world: World) -> None:
    world.card(processes="41:5", fail=f"GetComputeRunningProcesses:{NOT_SUPPORTED}")
    reader = world.reader()
    assert world.nvml is not None
    assert reader.running(CARD, world.nvml.ask("nvmlDeviceGetHandleByIndex", 0)) is None


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN_ERROR])
def test_a_driver_that_does_not_tell_how_busy_anyone_is_says_nothing_of_idleness(
    world: World, code: int
) -> None:
    world.card()
    reader = world.reader()
    failed = busy(world, reader, "41:50:9", fail=f"GetProcessUtilization:{code}")
    assert failed == {41: None, 42: None}
    assert busy(world, reader, "") == {41: 0, 42: 0}


def test_a_sample_stands_for_the_time_since_the_one_before_and_for_a_second_at_most(
    world: World,
) -> None:
    world.card()
    reader = world.reader()
    start = 5_000 * SECOND_US
    assert busy(world, reader, f"41:100:{start}") == {41: SECOND_US, 42: 0}
    soon = start + SECOND_US // 5
    assert busy(world, reader, f"41:60:{soon}") == {41: 120_000, 42: 0}
    two = f"41:50:{soon + 400_000},41:100:{soon + 500_000}"
    assert busy(world, reader, two) == {41: 200_000 + 100_000, 42: 0}
    late = f"41:10:{start + 3600 * SECOND_US}"
    assert busy(world, reader, late) == {41: SECOND_US // 10, 42: 0}


def test_no_sample_counts_twice(world: World) -> None:
    world.card()
    reader = world.reader()
    assert busy(world, reader, f"41:50:{SECOND_US}")[41] == 500_000
    assert busy(world, reader, f"41:50:{SECOND_US}")[41] == 0


def test_a_reading_between_two_samples_loses_nothing(world: World) -> None:
    world.card()
    reader = world.reader()
    busy(world, reader, f"41:100:{SECOND_US}")
    assert busy(world, reader, "")[41] == 0
    assert busy(world, reader, f"41:100:{2 * SECOND_US}")[41] == SECOND_US


def test_a_percentage_that_cannot_be_is_not_believed(world: World) -> None:
    world.card()
    assert busy(world, world.reader(), f"41:50:{SECOND_US},41:4096:7,42:50:{SECOND_US}") == {
        41: None,
        42: 500_000,
    }


def test_what_a_process_did_before_it_ended_counts(world: World) -> None:
    world.process(41, FIRST_ID)
    world.card(processes="41:5", utilisation="")
    reader = world.reader()
    world.measure(reader)
    world.ends(41)
    world.card(processes="", utilisation=f"41:40:{SECOND_US}")
    assert world.measure(reader) == {
        41: GpuProcess(pid=41, gpu=CARD, memory_bytes=0, user=FIRST_ID, busy_us=400_000)
    }


def test_work_of_the_mps_server_is_somebody_s_and_nobody_knows_whose(world: World) -> None:
    world.process(7, 0, "nvidia-cuda-mps")
    world.process(41, FIRST_ID)
    world.card(processes="7:1", mps_processes="41:5", utilisation=f"7:50:{SECOND_US}")
    reader = world.reader()
    assert world.measure(reader)[41].busy_us is None
    world.card(processes="7:1", mps_processes="41:5", utilisation=f"41:50:{2 * SECOND_US}")
    assert world.measure(reader)[41].busy_us == 500_000


def test_a_sandbox_cannot_call_itself_the_mps_server(world: World) -> None:
    world.process(41, FIRST_ID, "nvidia-cuda-mps")
    world.card(processes="41:5", utilisation=f"41:50:{SECOND_US}")
    assert world.measure(world.reader())[41].busy_us == 500_000


def test_the_user_of_a_living_process_is_the_kernel_s_word(world: World) -> None:
    world.processes = Path("/proc")
    world.card(processes=f"{os.getpid()}:5", utilisation="")
    assert world.measure(world.reader())[os.getpid()].user == os.getuid()
