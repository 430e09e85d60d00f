from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.nodes_file import NodeEntry
from dsec_sandboxd.discovery.claims import GpuClaims
from dsec_sandboxd.discovery.gpus import GpuReader
from dsec_sandboxd.discovery.links import islands
from dsec_sandboxd.discovery.machine import disk_bytes, read_machine
from dsec_sandboxd.discovery.nvml import open_nvml
from nvml import Inventory, l40, load_library

CPUINFO = """processor\t: {0}
model name\t: A Processor
physical id\t: {1}
core id\t\t: {2}
"""


def machine_tree(root: Path) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    threads = [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)]
    (root / "proc" / "cpuinfo").write_text("\n".join(CPUINFO.format(*it) for it in threads))
    (root / "proc" / "filesystems").write_text("nodev\ttmpfs\n\terofs\nnodev\toverlay\n")
    (root / "proc" / "swaps").write_text("Filename Type Size Used Priority\n")
    (root / "proc" / "self" / "mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    for number, processors in ((0, "0-1"), (1, "2,3")):
        directory = root / "sys" / "devices" / "system" / "node" / f"node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(processors)
        (directory / "meminfo").write_text(f"Node {number} MemTotal:  {number + 1} kB\n")
    return root


def test_a_machine_is_its_processors_numa_nodes_and_kernel(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "not" / "there", machine_tree(tmp_path))
    assert (machine.processor_model, machine.sockets, machine.cores) == ("A Processor", 2, 2)
    assert machine.threads == 4
    assert [(it.number, it.processors, it.memory_bytes) for it in machine.numa] == [
        (0, (0, 1), 1024),
        (1, (2, 3), 2048),
    ]
    assert machine.features == ("cgroup2", "erofs", "overlay")
    assert machine.disk_bytes == disk_bytes(tmp_path)[0] > 0


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert 0 < machine.cores <= machine.threads
    assert machine.kernel


def test_islands_join_whatever_is_linked_through_others() -> None:
    numbers = {"a": 3, "b": 1, "c": 2, "d": 0}
    peers = {"a": frozenset({"b"}), "b": frozenset({"c"}), "d": frozenset[str]()}
    assert islands(numbers, peers) == {"a": "nvlink-1", "b": "nvlink-1", "c": "nvlink-1"}


def test_a_card_has_one_node_of_its_machine(tmp_path: Path) -> None:
    first, second = GpuClaims("first", tmp_path), GpuClaims("second", tmp_path)
    assert [first.claim("GPU-0"), first.claim("GPU-0")] == ["", ""]
    assert second.claim("GPU-0") == "first"
    first.close()
    assert second.claim("GPU-0") == ""
    second.close()


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    load_library()
    found = Inventory(tmp_path / "gpus")
    monkeypatch.setenv("NVML_STAND_IN", str(found.path))
    return found


def test_a_node_offers_only_what_is_its_own(inventory: Inventory, tmp_path: Path) -> None:
    inventory.write([l40(index) for index in range(3)])
    other, own = GpuClaims("other", tmp_path / "claims"), GpuClaims("own", tmp_path / "claims")
    assert other.claim("GPU-00000001") == ""
    entry = NodeEntry(only=("GPU-00000000", "GPU-00000001"))
    reader = GpuReader(open_nvml(), entry, claim=own.claim)
    assert [gpu.index for gpu in reader.read().gpus] == [0]
    assert sorted(reader.passed_over.values()) == [
        "GPU 1 (GPU-00000001) is offered by other on this machine",
        "GPU 2 (GPU-00000002) is not under `only` in nodes.yaml",
    ]
    other.close()
    assert [gpu.index for gpu in reader.read().gpus] == [0, 1]
    own.close()
    reader.close()
