"""What each sandbox of the node uses, told in segments on ``dsec-metering``.

A sandbox's segments follow each other from its creation to its end. One is told every few minutes
and when it ends, and is kept in the StateDB before: a daemon that is killed in between leaves the
next one to tell it again, and what is told twice has the same number. Most sandboxes are short:
they are one segment, and nothing is kept for them but their own records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.metering import SandboxSegment, encode_segment
from dsec_common.topics import METERING
from dsec_sandboxd.gpu_metering import GpuMeters
from dsec_sandboxd.kernel.interface import Kernel, SandboxUsage
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"meter|"
#: So many are read from the kernel in one round; each costs a few reads of small files.
_AT_ONCE: Final = 32
#: What ended so long before a daemon's start is told of again.
_TOLD_AGAIN_S: Final = 60.0


class RecordWriter(Protocol):
    """The part of the log producer that takes records of other topics; it never waits."""

    def append_raw(self, topic: str, key: bytes, value: bytes) -> None:
        """Accept a record."""
        ...


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where a sandbox has been told of.

    Attributes:
        number: of the last segment; 0 before the first.
        at_ms: its end.
        cpu_us: what the kernel had counted there.
        memory_bytes: what was charged there.
        told: that segment, as it was told, or would have been but for a crash.
    """

    number: int = 0
    at_ms: int
    cpu_us: int = 0
    memory_bytes: int = 0
    told: bytes = b""


@dataclass(slots=True)
class _Meter:
    record: SandboxRecord
    mark: Mark
    cpu_us: int = 0
    """Used since the mark by what the sandbox was before it was put back to a snapshot."""
    last: SandboxUsage | None = None
    """What the kernel said before it let go of the sandbox."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Mark)


class Meters:
    """The meters of all sandboxes that somebody has. Nothing here fails a request.

    Attributes:
        gpus: of their GPUs.
    """

    def __init__(  # noqa: PLR0917  each is another part
        self,
        node: str,
        kernel: Kernel,
        writer: RecordWriter | None,
        database: StateDatabase,
        clock: Clock,
        interval_s: float,
        gpus: GpuMeters,
    ) -> None:
        """Take where to read and write; without a writer nothing is metered."""
        self._node = node
        self._kernel = kernel
        self._writer = writer
        self._database = database
        self._clock = clock
        self._interval_ms = int(interval_s * 1000)
        self.gpus = gpus
        # In the order of their last segments: the first is due first.
        self._meters: dict[str, _Meter] = {}

    def began(self, record: SandboxRecord) -> None:
        """Meter a sandbox that has come to life."""
        if self._writer is not None and record.local not in self._meters:
            mark = Mark(at_ms=_ms(record.created_at))
            self._meters[record.local] = _Meter(record, mark)
            self.gpus.began(record, mark.at_ms)

    async def sandbox_adopted(self, record: SandboxRecord) -> None:
        """Go on with a sandbox of an earlier daemon."""
        if self._writer is not None:
            mark = self._taken_up(record)
            self._meters[record.local] = _Meter(record, mark)
            self.gpus.adopted(record, mark.at_ms)

    def slices_changed(self, record: SandboxRecord, since: float) -> None:
        """Meter a sandbox's use of the GPUs that it has now, from a moment on.

        That it had them before, if a daemon before this one knew of it, is at most since its last
        segment: what was used before is told.
        """
        meter = self._meters.get(record.local)
        if meter is not None:
            self.gpus.changed(record, max(_ms(since), meter.mark.at_ms))

    def recovered(self, records: Iterable[SandboxRecord]) -> None:
        """Tell once more of sandboxes that ended shortly before the earlier daemon did.

        It may have died before it told of them. What they used is not known any more.
        """
        since = self._clock.now() - _TOLD_AGAIN_S
        for record in records:
            if record.ended_at > since and record.local not in self._meters:
                self.ended(record)

    async def sandbox_ending(self, local: str) -> None:
        """Read for the last time what a sandbox uses, before the kernel lets go of it."""
        meter = self._meters.get(local)
        if meter is not None and meter.last is None:
            meter.last = await self._read(local)

    async def sandbox_put_back(self, local: str) -> None:
        """Keep what a sandbox has used, whose counters begin anew with its files."""
        meter = self._meters.get(local)
        if meter is None:
            return
        usage = await self._read(local)
        if usage is not None:
            meter.cpu_us += max(_us(usage) - meter.mark.cpu_us, 0)
        meter.mark = msgspec.structs.replace(meter.mark, cpu_us=0)

    def ended(self, record: SandboxRecord) -> None:
        """Tell the last segment of a sandbox that is over."""
        if self._writer is None:
            return
        meter = self._meters.pop(record.local, None)
        if meter is None:
            if record.identity is None:
                return  # it never ran
            meter = _Meter(record, self._taken_up(record))
        meter.record = record
        self._tell(meter, _ms(record.ended_at), meter.last, last=True)
        self.gpus.ended(record.local)
        if meter.mark.number > 1:
            self._forget(record.local)

    async def tick(self) -> None:
        """Tell of sandboxes that have not been told of for long; of some, if there are many."""
        now_ms = _ms(self._clock.now())
        due: list[str] = []
        for local, meter in self._meters.items():
            if now_ms - meter.mark.at_ms < self._interval_ms or len(due) == _AT_ONCE:
                break
            due.append(local)
        for local in due:
            usage = await self._read(local)
            read = self._meters.get(local)
            if read is None or usage is None or read.last is not None:
                continue  # it is ending, and that will be told
            self._meters[local] = self._meters.pop(local)
            self._tell(read, now_ms, usage, last=False)

    def _tell(self, meter: _Meter, to_ms: int, usage: SandboxUsage | None, *, last: bool) -> None:
        mark, record = meter.mark, meter.record
        to_ms = max(to_ms, mark.at_ms)  # clocks are put back now and then
        cpu_us = mark.cpu_us if usage is None else _us(usage)
        memory_bytes = mark.memory_bytes if usage is None else usage.memory_bytes
        segment = SandboxSegment(
            project=record.project,
            agent=record.agent,
            node=self._node,
            number=mark.number + 1,
            from_ms=mark.at_ms,
            to_ms=to_ms,
            last=last,
            sandbox_id=f"{self._node}.{record.local}",
            lease_id=record.lease_id,
            rollout_id=record.rollout_id,
            cpu_us=meter.cpu_us + max(cpu_us - mark.cpu_us, 0),
            memory_byte_ms=(mark.memory_bytes + memory_bytes) * (to_ms - mark.at_ms) // 2,
            measured=usage is not None,
            **msgspec.structs.asdict(self.gpus.used(record.local, to_ms)),
        )
        message = encode_segment(segment)
        told = Mark(
            number=segment.number,
            at_ms=to_ms,
            cpu_us=cpu_us,
            memory_bytes=memory_bytes,
            told=message[2],
        )
        if not last and not self._keep(record.local, told):
            return  # a later one tells all
        meter.mark, meter.cpu_us = told, 0
        self.gpus.told(record.local)
        self._write(*message)

    def _write(self, topic: str, key: bytes, value: bytes) -> None:
        assert self._writer is not None  # noqa: S101  nothing is metered without
        try:
            self._writer.append_raw(topic, key, value)
        except DsecError as error:
            _log.error("use_not_told", sandbox=key.decode(), error=str(error))

    async def _read(self, local: str) -> SandboxUsage | None:
        try:
            return await self._kernel.usage(local)
        except DsecError:
            return None  # it has just ended by itself

    # --- The StateDB --------------------------------------------------------------------------

    def _taken_up(self, record: SandboxRecord) -> Mark:
        """Return up to where an earlier daemon told of a sandbox; tell its last word again."""
        begun = Mark(at_ms=_ms(record.created_at))
        try:
            kept = self._database.get(_PREFIX + record.local.encode())
            mark = begun if kept is None else _decoder.decode(kept)
        except Exception as error:  # noqa: BLE001  rocksdict raises plain Exception
            _log.error("meter_unreadable", local=record.local, error=str(error))
            return begun
        if mark.told:
            self._write(METERING, f"{self._node}.{record.local}".encode(), mark.told)
        return mark

    def _keep(self, local: str, mark: Mark) -> bool:
        try:
            self._database[_PREFIX + local.encode()] = _encoder.encode(mark)
        except Exception as error:  # noqa: BLE001  as above
            _log.warning("meter_not_kept", local=local, error=str(error))
            return False
        return True

    def _forget(self, local: str) -> None:
        try:
            del self._database[_PREFIX + local.encode()]
        except Exception as error:  # noqa: BLE001  as above
            _log.warning("meter_not_dropped", local=local, error=str(error))


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)


def _us(usage: SandboxUsage) -> int:
    return round(usage.cpu_s * 1e6)
