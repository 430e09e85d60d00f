from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_common.compute.cards import cards_of
from dsec_common.compute.model import CardMode
from dsec_common.compute.units import UnitTable
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NodeEntry
from dsec_sandboxd.discovery.gpus import REOPEN_ROUNDS, GpuReader
from dsec_sandboxd.discovery.mps import mps_runs
from dsec_sandboxd.discovery.nvml import open_nvml
from dsec_sandboxd.discovery.use import GpuProcess
from nvml import GIB, SWITCH, Card, Inventory, a100, l40, load_library, v100

LOST = "GPU is lost"


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    load_library()
    found = Inventory(tmp_path / "gpus")
    monkeypatch.setenv("NVML_STAND_IN", str(found.path))
    return found


@pytest.fixture
def readers() -> Iterator[list[GpuReader]]:
    opened: list[GpuReader] = []
    yield opened
    for reader in opened:
        reader.close()


def open_reader(readers: list[GpuReader], entry: NodeEntry | None = None) -> GpuReader:
    readers.append(GpuReader(open_nvml(), entry))
    return readers[-1]


@pytest.mark.parametrize(
    ("cards", "units"),
    [
        ([a100(index) for index in range(20)], 2000.0),
        ([l40(index) for index in range(15)], 975.0),
        ([v100(index) for index in range(8)], 336.0),
    ],
)
def test_a_node_s_cards_are_found_and_worth_what_the_table_says(
    inventory: Inventory, readers: list[GpuReader], cards: list[Card], units: float
) -> None:
    inventory.write(cards)
    sample = open_reader(readers).read()
    found, notes = cards_of(sample.gpus, UnitTable())
    assert [gpu.uuid for gpu in sample.gpus] == [card["uuid"] for card in cards]
    assert [str(gpu.memory_bytes) for gpu in sample.gpus] == [card["memory"] for card in cards]
    assert sum(card.cu_total for card in found) == units
    assert not notes


def test_what_changes_each_second_stays_apart_from_what_lasts(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([l40(0)])
    reader = open_reader(readers)
    idle = reader.read()
    busy = l40(0, busy=75, used=3 * GIB, generation_now=4, processes="41:1073741824,42:2147483648")
    inventory.write([busy])
    later = reader.read()
    assert later.gpus == idle.gpus
    assert [(it.utilisation, it.memory_bytes_used, it.processes) for it in idle.readings] == [
        (0.0, 0, 0)
    ]
    assert [(it.utilisation, it.memory_bytes_used, it.processes) for it in later.readings] == [
        (0.75, 3 * GIB, 2)
    ]
    assert later.readings[0].pcie_bytes_per_s > 7 * idle.readings[0].pcie_bytes_per_s
    assert later.processes == {
        "GPU-00000000": (
            GpuProcess(pid=41, gpu="GPU-00000000", memory_bytes=GIB),
            GpuProcess(pid=42, gpu="GPU-00000000", memory_bytes=2 * GIB),
        )
    }


def test_clients_of_mps_count_as_processes(inventory: Inventory, readers: list[GpuReader]) -> None:
    inventory.write([l40(0, processes="41:5", mps_processes="41:5,43:7")])
    sample = open_reader(readers).read()
    (listed,) = sample.processes.values()
    assert [(process.pid, process.memory_bytes) for process in listed] == [(41, 5), (43, 7)]


@pytest.mark.parametrize(
    ("generation", "width", "bytes_per_s"),
    [(3, 16, 15_753_846_153), (4, 16, 31_507_692_307), (5, 8, 31_507_692_307), (1, 1, 250_000_000)],
)
def test_a_link_to_the_host_carries_what_its_generation_and_width_say(
    inventory: Inventory,
    readers: list[GpuReader],
    generation: int,
    width: int,
    bytes_per_s: int,
) -> None:
    inventory.write([l40(0, generation=generation, width=width)])
    (gpu,) = open_reader(readers).read().gpus
    assert gpu.pcie_bytes_per_s == bytes_per_s


def test_cards_joined_in_pairs_are_islands_of_two(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    buses = [a100(index)["bus"] for index in range(4)]
    pairs = [a100(0, links=f"off,{buses[1]}"), a100(1, links=buses[0])]
    pairs += [a100(2, links=buses[3]), a100(3, links=buses[2]), l40(4)]
    inventory.write(pairs)
    islands = [gpu.island for gpu in open_reader(readers).read().gpus]
    assert islands == ["nvlink-0", "nvlink-0", "nvlink-2", "nvlink-2", ""]


def test_cards_behind_switches_are_one_island(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(index, links=SWITCH) for index in range(8)])
    assert {gpu.island for gpu in open_reader(readers).read().gpus} == {"nvlink-0"}


def test_a_card_cut_in_hardware_tells_its_instances(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    card = a100(0, slices=7)
    card["mig"] = "1"
    card.instance("MIG-a", "3g.20gb", 20 * GIB, 3)
    card.instance("MIG-b", "1g.5gb", 5 * GIB, 1)
    inventory.write([card])
    (gpu,) = open_reader(readers).read().gpus
    assert (gpu.mode, gpu.compute_slices) == (CardMode.MIG, 7)
    assert [(it.uuid, it.profile, it.compute_slices) for it in gpu.mig] == [
        ("MIG-a", "3g.20gb", 3),
        ("MIG-b", "1g.5gb", 1),
    ]
    (divided,), notes = cards_of([gpu], UnitTable())
    assert [instance.cu for instance in divided.mig] == [
        pytest.approx(300 / 7),
        pytest.approx(100 / 7),
    ]
    assert not notes


def test_processes_on_a_cut_card_are_each_instance_s_own(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    card = a100(0, slices=7, mig=1, processes="41:5,42:7,43:9", utilisation="41:50:1000000")
    card.instance("MIG-a", "3g.20gb", 20 * GIB, 3, processes="41:5")
    card.instance("MIG-b", "1g.5gb", 5 * GIB, 1, processes="42:7,43:9", utilisation="42:50:1000000")
    inventory.write([card])
    sample = open_reader(readers).read(measure_use=True)
    assert [
        (place, process.pid, process.memory_bytes, process.busy_us)
        for place, processes in sample.processes.items()
        for process in processes
    ] == [("MIG-a", 41, 5, None), ("MIG-b", 42, 7, 500_000), ("MIG-b", 43, 9, 0)]
    assert sample.readings[0].processes == 3


def test_a_driver_that_tells_no_processes_leaves_the_card_out(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(0, fail="GetComputeRunningProcesses:3"), a100(1)])
    sample = open_reader(readers).read()
    assert [gpu.healthy for gpu in sample.gpus] == [True, True]
    assert sample.processes == {"GPU-00000001": ()}


def test_a_card_in_mig_mode_without_instances_counts_for_nothing_and_says_so(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    card = a100(0, slices=7)
    card["mig"] = "1"
    inventory.write([card])
    cards, notes = cards_of(open_reader(readers).read().gpus, UnitTable())
    assert cards[0].cu_total == 0
    assert notes == ("GPU 0: CU 0, MIG is on and has no instances; make some: nvidia-smi mig",)


def test_a_card_that_falls_off_the_bus_is_unhealthy_and_its_units_are_gone(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(0), a100(1)])
    reader = open_reader(readers)
    before = reader.read()
    inventory.write([a100(0), a100(1, lost=1)])
    after = reader.read()
    assert [gpu.healthy for gpu in before.gpus] == [True, True]
    assert [gpu.healthy for gpu in after.gpus] == [True, False]
    assert LOST in after.gpus[1].reason
    assert [reading.uuid for reading in after.readings] == ["GPU-00000000"]
    cards, notes = cards_of(after.gpus, UnitTable())
    assert [card.cu_total for card in cards] == [100.0, 0.0]
    assert len(notes) == 1
    assert notes[0].startswith("GPU 1 (GPU-00000001): CU 0, it fell off the bus")


def test_a_card_that_answers_again_is_healthy_again(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(0, lost=1)])
    reader = open_reader(readers)
    (unknown,) = reader.read().gpus
    assert not unknown.healthy
    inventory.write([a100(0)])
    (back,) = reader.read().gpus
    assert (back.uuid, back.healthy, back.reason) == ("GPU-00000000", True, "")


def test_a_card_that_the_driver_no_longer_lists_stays_told_of(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(0), a100(1)])
    reader = open_reader(readers)
    reader.read()
    inventory.write([a100(0)])
    samples = [reader.read() for _ in range(REOPEN_ROUNDS + 1)]
    assert all([gpu.healthy for gpu in sample.gpus] == [True, False] for sample in samples)
    assert "does not list it" in samples[-1].gpus[1].reason


def test_a_driver_that_dies_makes_every_card_unhealthy(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([a100(0), a100(1)])
    reader = open_reader(readers)
    reader.read()
    inventory.path.unlink()
    sample = reader.read()
    assert [gpu.healthy for gpu in sample.gpus] == [False, False]
    assert sample.readings == ()
    assert "the driver does not answer: Driver Not Loaded" in sample.gpus[0].reason


@pytest.mark.parametrize(
    "function",
    ["GetUUID", "GetName", "GetMemoryInfo", "GetUtilizationRates", "GetMigMode", "GetHandle"],
)
def test_one_call_that_fails_costs_one_card_and_no_other(
    inventory: Inventory, readers: list[GpuReader], function: str
) -> None:
    inventory.write([a100(0), a100(1, fail=f"{function}:999"), a100(2)])
    sample = open_reader(readers).read()
    assert [gpu.healthy for gpu in sample.gpus] == [True, False, True]
    assert "Unknown Error" in sample.gpus[1].reason
    assert sum(card.cu_total for card in cards_of(sample.gpus, UnitTable())[0]) == 200


def test_a_card_without_some_feature_is_healthy(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    card = v100(0)
    for name in ("busy", "generation", "width", "generation_now", "width_now", "compute_mode"):
        del card[name]
    inventory.write([card])
    sample = open_reader(readers).read()
    assert sample.gpus[0].healthy
    assert (sample.gpus[0].pcie_bytes_per_s, sample.readings[0].utilisation) == (0, 0.0)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("compute_mode", 2, "nvidia-smi -c DEFAULT"), ("remapping_failed", 1, "replace the card")],
)
def test_a_card_that_must_not_be_given_work_says_what_to_do(
    inventory: Inventory, readers: list[GpuReader], field: str, value: int, told: str
) -> None:
    card = a100(0)
    card[field] = str(value)
    inventory.write([card])
    (gpu,) = open_reader(readers).read().gpus
    assert not gpu.healthy
    assert told in gpu.reason


def test_the_operator_s_word_on_a_model_goes_before_the_driver_s(
    inventory: Inventory, readers: list[GpuReader]
) -> None:
    inventory.write([Card(index, "Graphics Device", 48 * GIB) for index in range(2)])
    entry = NodeEntry(gpu_model="L40", gpus={"GPU-00000001": "A100"})
    assert [gpu.model for gpu in open_reader(readers, entry).read().gpus] == ["L40", "A100"]


def test_a_machine_without_a_driver_says_so(inventory: Inventory) -> None:
    with pytest.raises(DsecError, match="no NVIDIA driver: Driver Not Loaded"):
        open_nvml()


def test_the_nearness_of_a_card_to_processors_is_the_kernel_s(
    inventory: Inventory, readers: list[GpuReader], tmp_path: Path
) -> None:
    inventory.write([a100(0)])
    device = tmp_path / "devices" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    readers.append(GpuReader(open_nvml(), pci_devices=tmp_path / "devices"))
    assert readers[0].read().gpus[0].numa_node == 1


def test_cards_are_divided_by_mps_only_where_its_daemon_lives(
    inventory: Inventory, readers: list[GpuReader], tmp_path: Path
) -> None:
    inventory.write([l40(0)])
    pipes, processes = tmp_path / "mps", tmp_path / "proc"
    pipes.mkdir()
    readers.append(GpuReader(open_nvml(), mps_runs=lambda: mps_runs(pipes, processes)))
    assert readers[0].read().gpus[0].mode is CardMode.WHOLE
    (pipes / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert readers[0].read().gpus[0].mode is CardMode.WHOLE
    (processes / str(os.getpid())).mkdir(parents=True)
    (processes / str(os.getpid()) / "comm").write_text("nvidia-cuda-mps\n")
    assert readers[0].read().gpus[0].mode is CardMode.MPS
