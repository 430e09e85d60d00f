"""What each sandbox with slices uses of its GPUs, added up from the readings of the cards.

Memory is what its processes have, over time: a reading counts for the time since the one before,
and the last one for what remains. Compute Units used are the time for which its processes kept a
card's streaming multiprocessors busy times what that card is worth, whole::

    CU ms used = sum over its cards of (SM utilisation x time) x CU of the whole card

and the same of a MIG instance. The driver counts time in which a kernel ran, not how wide it was,
so a sandbox that has a part of a card may use more than it holds. Time in which the driver did not
tell is unknown, and counted as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from dsec_common.clock import Clock
from dsec_common.compute.model import WHOLE_PERCENT, Slice
from dsec_common.errors import DsecError
from dsec_common.metering import MICRO
from dsec_sandboxd.discovery.gpus import GpuSample
from dsec_sandboxd.discovery.use import GpuProcess
from dsec_sandboxd.kernel.interface import IDS_PER_SANDBOX
from dsec_sandboxd.records import SandboxRecord


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """These fields of a :class:`~dsec_common.metering.SandboxSegment`."""

    gpu_memory_byte_ms: int | None = None
    gpu_memory_unknown_ms: int = 0
    cu_used_micro_ms: int | None = None
    cu_used_unknown_ms: int = 0


@dataclass(slots=True)
class _Tally:
    """One amount over time, up to a moment. Before the first reading nothing is known.

    Attributes:
        level: what each millisecond adds; None while nobody knows.
        total: what was added in the time that is known.
    """

    since_ms: int
    level: int | None = None
    total: int = 0
    known_ms: int = 0
    unknown_ms: int = 0

    def read(self, at_ms: int, level: int | None, more: int = 0) -> None:
        """Take a reading: of the time since the one before, and of what comes until the next."""
        self.level = level
        self.go_to(at_ms)
        self.total += more

    def go_to(self, at_ms: int) -> None:
        """Let time pass."""
        lasted_ms = max(at_ms - self.since_ms, 0)
        self.since_ms += lasted_ms
        if self.level is None:
            self.unknown_ms += lasted_ms
        else:
            self.known_ms += lasted_ms
            self.total += self.level * lasted_ms

    @property
    def known(self) -> int | None:
        """The total; None when all of the time is unknown."""
        return self.total if self.known_ms or self.total else None

    def begin_anew(self) -> None:
        """Forget what was added up, not the moment."""
        self.total = self.known_ms = self.unknown_ms = 0


@dataclass(slots=True)
class _Use:
    record: SandboxRecord
    since_ms: int
    holds: bool = True
    """Whether it has slices now; without them it uses nothing, and that is known."""
    memory: _Tally = field(init=False)
    cu: _Tally = field(init=False)

    def __post_init__(self) -> None:
        self.memory, self.cu = _Tally(self.since_ms), _Tally(self.since_ms)


class GpuMeters:
    """The use of GPUs by every sandbox that has slices; without one nothing is read for it."""

    def __init__(self, clock: Clock, find: Callable[[str, str], SandboxRecord]) -> None:
        """Take the clock, and how to find a project's sandbox as it is now."""
        self._clock = clock
        self._find = find
        self._uses: dict[str, _Use] = {}
        #: Returns the slices that actions of a sandbox have.
        self.lent: Callable[[str], tuple[Slice, ...]] = lambda _local: ()

    def began(self, record: SandboxRecord, since_ms: int) -> None:
        """Add up from a moment on, in Unix milliseconds."""
        if record.slices:
            self._uses[record.local] = _Use(record, since_ms)

    def adopted(self, record: SandboxRecord, since_ms: int) -> None:
        """Go on with a sandbox of an earlier daemon; what that one read is lost with it."""
        self.began(record, since_ms)
        use = self._uses.get(record.local)
        if use is not None:
            self._read(use, None, None)

    def changed(self, record: SandboxRecord, since_ms: int) -> None:
        """Go on with the slices that a sandbox has now.

        Args:
            record: of a sandbox that is metered.
            since_ms: it has had them from then on, if it had none before. What it did up to now
                is not known.
        """
        now_ms = round(self._clock.now() * 1000)
        use = self._uses.get(record.local)
        holds = bool(self._slices(record))
        if use is None:
            if not holds:
                return
            use = self._uses[record.local] = _Use(record, min(since_ms, now_ms))
        for tally in (use.memory, use.cu):
            tally.go_to(now_ms)
            if not holds:
                tally.level = 0
            elif not use.holds:
                tally.level = None
        use.holds = holds

    def _slices(self, record: SandboxRecord) -> tuple[Slice, ...]:
        return (*record.slices, *self.lent(record.local))

    def used(self, local: str, to_ms: int) -> GpuUse:
        """Return what a sandbox used up to a moment since :meth:`told`."""
        use = self._uses.get(local)
        if use is None:
            return GpuUse()
        for tally in (use.memory, use.cu):
            tally.go_to(to_ms)
        return GpuUse(
            gpu_memory_byte_ms=use.memory.known,
            gpu_memory_unknown_ms=use.memory.unknown_ms,
            cu_used_micro_ms=use.cu.known,
            cu_used_unknown_ms=use.cu.unknown_ms,
        )

    def told(self, local: str) -> None:
        """Add up anew: what was used has been told."""
        use = self._uses.get(local)
        if use is not None:
            use.memory.begin_anew()
            use.cu.begin_anew()

    def ended(self, local: str) -> None:
        """Forget a sandbox that is over."""
        self._uses.pop(local, None)

    # --- The readings -------------------------------------------------------------------------

    @property
    def measures_use(self) -> bool:
        """Whether there is a sandbox with slices."""
        return any(use.holds for use in self._uses.values())

    def seen(self, sample: GpuSample) -> None:
        """Take a reading of all cards in."""
        for local, use in self._uses.items():
            try:
                record = self._find(use.record.project, local)
            except DsecError:
                continue  # it is over, and that will be told
            memory_bytes, cu_micro_ms = _use_of(record, self._slices(record), sample)
            self._read(use, memory_bytes, cu_micro_ms)

    def _read(self, use: _Use, memory_bytes: int | None, cu_micro_ms: int | None) -> None:
        now_ms = round(self._clock.now() * 1000)
        use.memory.read(now_ms, memory_bytes)
        use.cu.read(now_ms, None if cu_micro_ms is None else 0, cu_micro_ms or 0)


def _use_of(
    record: SandboxRecord, slices: Iterable[Slice], sample: GpuSample
) -> tuple[int | None, int | None]:
    """Return a sandbox's bytes now and what it used since the last reading; None: nobody knows."""
    memory_bytes: int | None = 0
    cu_micro_ms: int | None = 0
    # Slices of one place are all cut from the same whole.
    for place, cu in {it.place: it.cu * WHOLE_PERCENT / it.percent for it in slices}.items():
        listed = sample.processes.get(place)
        if listed is None:
            return None, None
        for process in _own(record, listed):
            memory_bytes = _plus(memory_bytes, process.memory_bytes)
            used = None if process.busy_us is None else round(process.busy_us * cu * MICRO / 1000)
            cu_micro_ms = _plus(cu_micro_ms, used)
    return memory_bytes, cu_micro_ms


def _own(record: SandboxRecord, processes: Iterable[GpuProcess]) -> Iterable[GpuProcess]:
    """Yield the sandbox's processes: their users are among its ids, which are its own alone."""
    if record.identity is not None:
        ids = range(record.identity.base_id, record.identity.base_id + IDS_PER_SANDBOX)
        yield from (process for process in processes if process.user in ids)


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
