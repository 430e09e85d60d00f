"""Looking after the GPUs while the daemon runs, off its event loop: a card that hangs may wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NodeEntry
from dsec_sandboxd.discovery.apart import apart
from dsec_sandboxd.discovery.claims import GpuClaims
from dsec_sandboxd.discovery.gpus import GpuReader, GpuSample
from dsec_sandboxd.discovery.mps import mps_runs
from dsec_sandboxd.discovery.nvml import open_nvml

_log: Final = structlog.get_logger(__name__)

_HANGS: Final = "the NVIDIA driver does not answer: look at its messages in dmesg"


class Observer(Protocol):
    """Who is told of each reading."""

    @property
    def measures_use(self) -> bool:
        """Whether the next reading shall say whose each process is, and how busy."""
        ...

    def seen(self, sample: GpuSample) -> None:
        """Take a reading. One that says nothing of a card's processes is one that failed."""
        ...


class GpuWatch:
    """What is known of the GPUs now. On a machine without any nothing runs.

    A driver that does not answer for ``patience_s`` hangs: all its cards are unhealthy until it
    does, and nothing else waits for it, not even the end of the daemon.
    """

    def __init__(self, node: str, patience_s: float) -> None:
        """Take the node's name, for others on the same machine, and how long to wait."""
        self._patience_s = patience_s
        self._claims = GpuClaims(node)
        self._reader: GpuReader | None = None
        self._flaw = ""
        self._opening: asyncio.Future[str] | None = None
        self._reading: asyncio.Future[GpuSample] | None = None
        self.sample = GpuSample()
        self.driver = ""

    async def open(self, entry: NodeEntry, mps_pipes: Path) -> None:
        """Find the GPUs, or the reason why there are none.

        Args:
            entry: what the operator says of this node.
            mps_pipes: the directory of the node's MPS daemon, where one runs.
        """
        self._flaw = _HANGS
        self._opening = apart("open NVML", lambda: self._open(entry, mps_pipes))
        await asyncio.wait({self._opening}, timeout=self._patience_s)
        if self._opening.done():
            self._flaw = self._opening.result()

    def _open(self, entry: NodeEntry, mps_pipes: Path) -> str:
        """Return why there are no GPUs; empty once the driver was asked for them."""
        try:
            nvml = open_nvml()
        except DsecError as error:
            return error.message
        reader = GpuReader(
            nvml, entry, claim=self._claims.claim, mps_runs=lambda: mps_runs(mps_pipes)
        )
        self.driver, self.sample, self._reader = reader.driver, reader.read(), reader
        return ""

    @property
    def reason(self) -> str:
        """Why there are no GPUs, or not all that the machine has; empty when there are."""
        if self._reader is None:
            return self._flaw
        passed_over = "; ".join(sorted(self._reader.passed_over.values()))
        return passed_over or ("" if self.sample.gpus else "the NVIDIA driver knows no GPU")

    async def run(self, clock: Clock, interval_s: float, observer: Observer) -> None:
        """Read again and again, until cancelled."""
        assert self._opening is not None  # noqa: S101  it is opened first
        self._flaw = await self._opening
        reader = self._reader
        if reader is None:
            return
        while True:
            await clock.sleep(interval_s)
            if self._reading is None:
                measure_use = observer.measures_use
                self._reading = apart("read GPUs", lambda: reader.read(measure_use=measure_use))  # noqa: B023  used at once
            await asyncio.wait({self._reading}, timeout=self._patience_s)
            if self._reading.done():
                done, self._reading = self._reading, None
                self._take(done.result())
            else:
                self._take(self._hanging())
            observer.seen(self.sample)

    def _hanging(self) -> GpuSample:
        """Return the last reading with every card unhealthy: nobody knows which one it is."""
        gpus = tuple(
            msgspec.structs.replace(gpu, healthy=False, reason=gpu.reason or _HANGS)
            for gpu in self.sample.gpus
        )
        return GpuSample(gpus=gpus)

    def _take(self, sample: GpuSample) -> None:
        before, self.sample = self.sample, sample
        for gpu in sample.gpus:
            if not gpu.healthy and gpu not in before.gpus:
                _log.warning("gpu_unhealthy", uuid=gpu.uuid, index=gpu.index, reason=gpu.reason)

    def close(self) -> None:
        """Let go of the driver, unless a call into it is still under way. Idempotent."""
        reader, self._reader = self._reader, None
        self._claims.close()
        is_asked = any(it is not None and not it.done() for it in (self._opening, self._reading))
        if reader is not None and not is_asked:
            reader.close()
