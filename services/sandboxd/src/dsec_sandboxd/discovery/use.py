"""Who uses a card, or an instance of one, and how much: what the driver says of processes.

Memory is what a process has at the moment. The time for which it kept the card busy is put
together from the driver's samples of its streaming multiprocessors: each stands for the time since
the one before, and for :data:`PERIOD_US` at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec_sandboxd.discovery.mps import is_mps
from dsec_sandboxd.discovery.nvml import Nvml
from dsec_sandboxd.kernel.slots import FIRST_ID

PERIOD_US: Final = 1_000_000
"""The longest time that one of the driver's samples is of, by the documentation of NVML."""

_WHOLE: Final = 100
_PROCESSES: Final = Path("/proc")


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a GPU.

    Attributes:
        pid: on the host.
        gpu: the card, or the MIG instance, by its uuid.
        memory_bytes: of the GPU; None where the driver does not say.
        user: its user id on the host; None when it is gone, or was not asked for.
        busy_us: for how long it kept all of ``gpu`` busy since the reading before, in
            microseconds; None where the driver does not say, or was not asked.
    """

    pid: int
    gpu: str
    memory_bytes: int | None = None
    user: int | None = None
    busy_us: int | None = None


class UseReader:
    """Reads processes, each place's own: cards, and MIG instances of those that are cut."""

    def __init__(self, nvml: Nvml, processes: Path = _PROCESSES) -> None:
        """Take the library, open, and the kernel's directory of processes."""
        self._nvml = nvml
        self._processes = processes
        self._sampled_us: dict[str, int] = {}  # the newest sample of each place, by the driver
        self._users: dict[str, dict[int, int | None]] = {}  # of a place's processes, last time

    def running(self, place: str, handle: Any) -> list[GpuProcess] | None:
        """Return who uses a place, by pid; None where the driver does not tell.

        Raises:
            DeviceLost: the card does not answer any more.
        """
        # Clients of MPS are listed apart from others.
        others = self._nvml.ask_or(None, "nvmlDeviceGetComputeRunningProcesses", handle)
        if others is None:
            return None
        clients = self._nvml.ask_or([], "nvmlDeviceGetMPSComputeRunningProcesses", handle)
        found = {process.pid: process.usedGpuMemory for process in (*others, *clients)}
        return [
            GpuProcess(pid=pid, gpu=place, memory_bytes=memory)
            for pid, memory in sorted(found.items())
        ]

    def measure(
        self, place: str, handle: Any, listed: Iterable[GpuProcess]
    ) -> tuple[GpuProcess, ...]:
        """Return the processes with their users and for how long they were busy.

        One that was listed before and ended since is among them, for what it did until then.
        """
        samples = self._samples(place, handle)
        found = {it.pid: msgspec.structs.replace(it, user=self._user(it.pid)) for it in listed}
        before = self._users.get(place, {})
        self._users[place] = {pid: process.user for pid, process in found.items()}
        if samples is None:
            return tuple(found.values())
        for pid in samples.keys() - found.keys():
            user = before.get(pid) or self._user(pid)
            found[pid] = GpuProcess(pid=pid, gpu=place, memory_bytes=0, user=user)
        if any(busy and self._is_server(found[pid]) for pid, busy in samples.items()):
            return tuple(found.values())  # it worked for clients, and nobody knows for which
        return tuple(
            msgspec.structs.replace(it, busy_us=samples.get(it.pid, 0)) for it in found.values()
        )

    def _is_server(self, process: GpuProcess) -> bool:
        """Return whether it is MPS's own, whatever processes of sandboxes call themselves."""
        is_host_s = process.user is not None and process.user < FIRST_ID
        return is_host_s and is_mps(process.pid, self._processes)

    def _samples(self, place: str, handle: Any) -> dict[int, int | None] | None:
        """Return for how long each process was busy since the last call; None if nobody knows.

        A process whose samples make no sense has None; one without any was not busy.
        """
        library, since_us = self._nvml.library, self._sampled_us.get(place, 0)
        try:
            samples = library.nvmlDeviceGetProcessUtilization(handle, since_us)
        except library.NVMLError as error:
            # So it says that nobody was busy. Whether the card is lost, other calls will tell.
            return {} if error.value == library.NVML_ERROR_NOT_FOUND else None
        busy_us: dict[int, int | None] = {}
        at_us: dict[int, int] = {}
        for sample in sorted(samples, key=lambda it: it.timeStamp):
            if sample.timeStamp <= since_us:
                continue  # some drivers tell of old ones all the same
            so_far_us = busy_us.get(sample.pid, 0)
            if sample.smUtil > _WHOLE or so_far_us is None:
                busy_us[sample.pid] = None
                continue
            lasted_us = min(sample.timeStamp - at_us.get(sample.pid, since_us), PERIOD_US)
            busy_us[sample.pid] = so_far_us + sample.smUtil * lasted_us // _WHOLE
            at_us[sample.pid] = sample.timeStamp
        self._sampled_us[place] = max(at_us.values(), default=since_us)
        return busy_us

    def _user(self, pid: int) -> int | None:
        try:
            status = (self._processes / str(pid) / "status").read_bytes()
        except OSError:
            return None
        found = re.search(rb"^Uid:\s*(\d+)", status, re.MULTILINE)
        return int(found[1]) if found else None
