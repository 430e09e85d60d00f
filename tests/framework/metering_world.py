"""A node's meters and what they tell, with a kernel that uses what the test says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.metering import SandboxSegment, decode_segment
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.gpu_metering import GpuMeters
from dsec_sandboxd.kernel.interface import SandboxIdentity, SandboxUsage
from dsec_sandboxd.kernel.recording import RecordingKernel
from dsec_sandboxd.metering import Meters
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase

INTERVAL_S = 300.0
MIB = 1 << 20


class Kernel(RecordingKernel):
    """Says of each sandbox what the test says it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[str, tuple[float, int]] = {}

    async def usage(self, local: str) -> SandboxUsage:
        if local not in self.uses:
            raise DsecError(ErrorCode.NOT_FOUND, "it has ended")
        cpu_s, memory_bytes = self.uses[local]
        return SandboxUsage(
            memory_bytes=memory_bytes, memory_peak_bytes=memory_bytes, cpu_s=cpu_s, pids=1
        )


class Topic:
    """What was told, in order; ``dies`` has the daemon die before it tells the next."""

    def __init__(self) -> None:
        self.segments: list[SandboxSegment] = []
        self.dies = False

    def append_raw(self, topic: str, key: bytes, value: bytes) -> None:
        if self.dies:
            raise KeyboardInterrupt
        segment = decode_segment(value)
        assert isinstance(segment, SandboxSegment)
        assert (topic, key.decode()) == ("dsec-metering", segment.sandbox_id)
        self.segments.append(segment)


class World:
    def __init__(self, directory: Path) -> None:
        self.clock, self.kernel, self.topic = FakeClock(), Kernel(), Topic()
        self.database = StateDatabase(directory)
        self.records: dict[str, SandboxRecord] = {}
        self.restart()

    def restart(self) -> None:
        """Have another daemon take over; the one before it is gone."""
        self.gpus = GpuMeters(self.clock, lambda _, local: self.records[local])
        self.meters = Meters(
            *("n1", self.kernel, self.topic, self.database, self.clock, INTERVAL_S, self.gpus)
        )

    def record(
        self,
        local: str = "a",
        *,
        ended: bool = False,
        slices: Iterable[Slice] = (),
        base_id: int = 1,
    ) -> SandboxRecord:
        now = self.clock.now()
        record = self.records[local] = SandboxRecord(
            local=local,
            project="team",
            placement_id="p",
            request_id="r",
            state=SandboxState.ENDED if ended else SandboxState.RUNNING,
            created_at=now,
            ended_at=now if ended else 0.0,
            layer_references=(),
            layer_digests=(),
            limits=Limits(),
            agent="coder",
            lease_id="n1.lease",
            identity=SandboxIdentity(init_inode=1, slot=0, base_id=base_id),
            slices=tuple(slices),
        )
        return record

    async def end(self, record: SandboxRecord) -> None:
        await self.meters.sandbox_ending(record.local)
        self.kernel.uses.pop(record.local, None)
        self.meters.ended(over(record, self.clock))


def over(record: SandboxRecord, clock: FakeClock) -> SandboxRecord:
    return msgspec.structs.replace(record, state=SandboxState.ENDED, ended_at=clock.now())


def checked(segments: list[SandboxSegment], born: float) -> None:
    """Return if segments follow each other from the first moment to the last."""
    assert [it.number for it in segments] == list(range(1, len(segments) + 1))
    assert segments[0].from_ms == round(born * 1000)
    for before, after in itertools.pairwise(segments):
        assert after.from_ms == before.to_ms
    assert [it.last for it in segments] == [False] * (len(segments) - 1) + [True]
