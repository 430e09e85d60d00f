"""What a machine would be as a node, without starting one: what ``dsec-init`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dsec_common.compute.cards import cards_of
from dsec_common.compute.model import Card, CardMode
from dsec_common.compute.units import UnitTable
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NodesFile
from dsec_common.wire.node import Gpu, Machine
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.discovery.gpus import GpuReader
from dsec_sandboxd.discovery.machine import disk_bytes, read_machine
from dsec_sandboxd.discovery.mps import mps_runs
from dsec_sandboxd.discovery.nvml import open_nvml
from dsec_sandboxd.inventory import Inventory
from dsec_sandboxd.kernel.probe import require_host


class Discovery(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, and what it counts for.

    Attributes:
        node: the name it would have.
        machine: what it is made of.
        cpus: processors that the daemon may hand out, its own cgroup's limits included.
        memory_bytes: the same of memory.
        disk_bytes_available: what is free where the daemon keeps its state.
        gpus: as the driver and ``nodes.yaml`` tell.
        cards: the same as cards to be divided, with their units.
        cu_total: Compute Units in all.
        reasons: of everything that counts for nothing, or for less than it could.
    """

    node: str
    machine: Machine
    cpus: float
    memory_bytes: int
    disk_bytes_available: int
    gpus: tuple[Gpu, ...]
    cards: tuple[Card, ...]
    cu_total: float
    reasons: tuple[str, ...]


def discover(config: SandboxdConfig, nodes: NodesFile) -> Discovery:
    """Look at this machine as a node with these settings would.

    Never raises for what is missing: that is among the reasons.
    """
    gpus, driver, reasons = _find_gpus(config, nodes)
    cards, notes = cards_of(gpus, UnitTable(nodes.cu_table))
    inventory = Inventory()
    machine = read_machine(config.state_path)
    return Discovery(
        node=config.node_name,
        machine=msgspec.structs.replace(machine, driver=driver),
        cpus=inventory.cpus(),
        memory_bytes=inventory.memory_bytes(),
        disk_bytes_available=disk_bytes(config.state_path)[1],
        gpus=gpus,
        cards=cards,
        cu_total=sum(card.cu_total for card in cards),
        reasons=(*_host_flaws(), *reasons, *notes, *_whole_only(gpus)),
    )


def _find_gpus(
    config: SandboxdConfig, nodes: NodesFile
) -> tuple[tuple[Gpu, ...], str, tuple[str, ...]]:
    try:
        nvml = open_nvml()
    except DsecError as error:
        return (), "", (f"no GPUs: {error.message}",)
    entry = nodes.entry(config.node_name)
    pipes = Path(config.gpu_mps_directory)
    reader = GpuReader(nvml, entry, mps_runs=lambda: mps_runs(pipes))
    try:
        gpus = reader.read().gpus
        passed_over = tuple(f"{why}: CU 0" for why in reader.passed_over.values())
        none = ("no GPUs: the NVIDIA driver knows none",) if not gpus and not passed_over else ()
        return gpus, reader.driver, passed_over + none
    finally:
        reader.close()


def _host_flaws() -> tuple[str, ...]:
    try:
        require_host()
    except DsecError as error:
        return (error.message,)
    return ()


def _whole_only(gpus: Iterable[Gpu]) -> Iterable[str]:
    whole = [str(gpu.index) for gpu in gpus if gpu.mode is CardMode.WHOLE and gpu.healthy]
    if whole:
        yield (
            f"GPU {', '.join(whole)}: only whole, CUDA's MPS does not run; start it with "
            "nvidia-cuda-mps-control -d to share cards out in parts"
        )
